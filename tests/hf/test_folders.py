"""What is wrong with a model folder of Hugging Face is told from its config and headers, before anything is read."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_folders import GPT2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, VIT, make_folder
from hypothesis import event, given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from colossus.checkpoint import CheckpointError, DamagedCheckpoint
from colossus.hf.hf_folder import options_of, read_folder, spec_of
from colossus.registry import HF_FAMILIES

Damage = Callable[[Path], Any]


def _header(edit: Callable[[dict[str, Any]], Any]) -> Damage:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        body = json.loads(data[8 : 8 + length])
        edit(body)
        text = json.dumps(body).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return change


def _config(**changed: Any) -> Damage:
    def change(folder: Path) -> None:
        body = {**json.loads((folder / "config.json").read_text()), **changed}
        (folder / "config.json").write_text(json.dumps(body))

    return change


def _tensors(edit: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return change


def _bytes(data: Callable[[bytes], bytes], file: str = "model.safetensors") -> Damage:
    return lambda folder: (folder / file).write_bytes(data((folder / file).read_bytes()))


WPE = "transformer.wpe.weight"
DAMAGED: dict[str, tuple[Damage, str]] = {
    "truncated": (_bytes(lambda data: data[:-10]), r"model.safetensors: is truncated or changed, .* not fully covered"),
    "a pickle": (_bytes(lambda data: b"\x80\x02}q\x00." * 9), r"or no safetensors file"),
    "negative": (_header(lambda b: b[WPE].update(shape=[-6, -8])), r"invalid JSON in header"),
    "overlapping": (_header(lambda b: b[WPE].update(data_offsets=[0, 192])), r"invalid offset for tensor"),
    "an unknown dtype": (_header(lambda b: b[WPE].update(dtype="F4")), r"invalid shape, data type"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), r"has neither model.safetensors nor model.saf"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"config.json: cannot be read: .* No such file"),
    "config cut": (_bytes(lambda data: data[:9], "config.json"), r"config.json: cannot be read"),
    "config a list": (_bytes(lambda data: b"[]", "config.json"), r"holds a list where an object is expected"),
}
WRONG: dict[str, tuple[Damage, str]] = {
    "missing": (
        _tensors(lambda t: t.pop(WPE)),
        r"not the GPT2LMHeadModel of its config.json: 1 missing: transformer.wp",
    ),
    "extra": (_tensors(lambda t: t.update(score=torch.ones(2))), r"1 not in a gpt2: score"),
    "another shape": (_config(n_positions=7), r"wpe.weight has shape \[6, 8\], config.json says \[7, 8\]"),
    "integers": (
        _tensors(lambda t: t.update({WPE: t[WPE].to(torch.int8)})),
        r"wpe.weight has dtype int8: weights are float64",
    ),
    "another model": (
        _config(model_type="mamba"),
        r"model_type = 'mamba': colossus reads .*gpt2, gpt_oss, .*vit",
    ),
    "no model": (_config(model_type=None), r"model_type = None"),
    "quantised": (
        _config(quantization_config={"bits": 4}),
        r"quantization_config: colossus reads no quantised weights",
    ),
    "MXFP4": (
        _config(model_type="gpt_oss", quantization_config={"quant_method": "mxfp4"}),
        r"experts in MXFP4: let transformers write them in bfloat16 first",
    ),
    "code of its own": (_config(auto_map={"AutoModel": "x.Y"}), r"auto_map: colossus reads no code of the model's own"),
    "an activation": (
        _config(activation_function="relu"),
        r"activation_function = 'relu': it must be one of 'gelu_new'",
    ),
    "scaled by layer": (
        _config(scale_attn_by_inverse_layer_idx=True),
        r"scale_attn_by_inverse_layer_idx = True: colos",
    ),
    "unscaled": (_config(scale_attn_weights=False), r"scale_attn_weights = False: colossus has True only"),
    "cross attention": (_config(add_cross_attention=True), r"add_cross_attention = True"),
    "two dropouts": (
        _config(resid_pdrop=0.1),
        r"resid_pdrop = 0.1, embd_pdrop = 0.0: colossus has one",
    ),
    "no size": (_config(n_embd="8"), r"n_embd: must be a whole number, got '8'"),
    "a tie that is none": (
        _config(tie_word_embeddings="no"),
        r"tie_word_embeddings: must be True or False, got 'no'",
    ),
}


@pytest.mark.parametrize("name", [*DAMAGED, *WRONG])
def test_what_is_wrong_is_told(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2)
    read_folder(folder)
    damage, said = (DAMAGED | WRONG)[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=said) as raised:
        read_folder(folder)
    assert str(folder) in str(raised.value)
    is_damaged = name in DAMAGED and name not in ("no file",)
    assert isinstance(raised.value, DamagedCheckpoint) == is_damaged


LLAMA_REFUSED = [
    (dict(hidden_act="gelu"), r"hidden_act = 'gelu': it must be one of 'silu', 'swish'"),
    (dict(attention_bias=True), r"attention_bias = True, mlp_bias = False: colossus has one option for both"),
    (dict(rope_scaling=dict(type="dynamic", factor=2.0)), r"rotary_scaling.rope_type: .*'dynamic'"),
    (dict(rope_scaling=dict(type="linear")), r"rotary_scaling.factor: is missing"),
    (dict(rope_parameters=dict(rope_type="yarn", factor=2.0, beta_fast=1)), r"rotary_scaling.*beta_fast"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), r"partial_rotary_factor"),
    (dict(rope_theta=0.5), r"rope_theta: must be greater than 1, got 0.5"),
    (
        dict(
            rope_scaling=dict(
                rope_type="llama3",
                factor=8.0,
                low_freq_factor=4.0,
                high_freq_factor=1.0,
                original_max_position_embeddings=64,
            )
        ),
        r"rotary_scaling: .*low_freq_factor = 4.0 is not below high_freq_factor = 1.0",
    ),
    (dict(rms_norm_eps=0), r"rms_norm_eps: must be greater than 0, got 0"),
    (dict(num_hidden_layers=10**9), r"says 1000000000 layers, the files have 12 tensors"),
    (dict(rope_scaling=[8]), r"rope_scaling = \[8\]: an object is needed"),
]


@pytest.mark.parametrize(("changed", "said"), LLAMA_REFUSED)
def test_what_colossus_has_not_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", LLAMA)
    _config(**changed)(folder)
    with pytest.raises(CheckpointError, match=said):
        read_folder(folder)


VALUES = st.none() | st.booleans() | st.integers(-1, 9) | st.floats(0, 2) | st.sampled_from(["gelu", "silu", "default"])
SCALINGS = (
    dict(rope_type="linear", factor=2.0),
    dict(type="llama3", factor=8, low_freq_factor=1.0, high_freq_factor=4.0),
    dict(rope_type="default", rope_theta=500.0),
)
CHANGES = st.dictionaries(st.sampled_from(["factor", "type"]), VALUES, max_size=1)
ROPE = st.builds(lambda scaling, changed: scaling | changed, st.sampled_from(SCALINGS), CHANGES)
#: mostly such as are read
ANYTHING = {
    **dict.fromkeys(("rope_scaling", "rope_parameters"), ROPE | VALUES),
    **dict.fromkeys(("image_size", "patch_size"), st.lists(st.integers(1, 9), min_size=2, max_size=2) | VALUES),
    "id2label": st.dictionaries(st.sampled_from("012"), st.just("a name")) | VALUES,
}


@pytest.mark.parametrize(
    "config", [GPT2, LLAMA, MIXTRAL, QWEN3, QWEN3_MOE, VIT], ids=lambda config: config["model_type"]
)
@given(data=st.data())
def test_any_config_is_refused_or_reads_as_what_it_writes(config: dict[str, Any], data: st.DataObject) -> None:
    """Whatever its keys say; no other error."""
    family = HF_FAMILIES.get(config["model_type"])
    keys = [*(key.theirs for key in family.keys), *family.required]
    more = ["rope_scaling", "rope_parameters"] if "rope_theta" in keys else ["id2label"]
    names = data.draw(st.lists(st.sampled_from([*more, *keys]), max_size=2, unique=True))
    changed = {key: data.draw(ANYTHING.get(key, VALUES), label=key) for key in names}
    try:
        family, spec = spec_of(Path("folder"), {**config, **changed}, {})
    except CheckpointError as error:
        event(str(error)[:40])
        return
    options = options_of(spec)
    assert not family.differences(options)
    written = json.loads(json.dumps({"model_type": config["model_type"], **family.to_config(options)}))
    assert options_of(spec_of(Path("folder"), written, {})[1]) == options


INDEXED: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "a file that is not there": (
        lambda names: names.update({WPE: "other.safetensors"}),
        r"other.safetensors: is missing",
    ),
    "a path": (
        lambda names: names.update({WPE: "../x.safetensors"}),
        r"names a file '../x.safetensors', which is no plai",
    ),
    "nothing": (lambda names: names.clear(), r"has no weight_map"),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_is_wrong(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2, files=3)
    assert len(read_folder(folder).manifest.files) == 3
    edit, said = INDEXED[name]
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    edit(body["weight_map"])
    index.write_text(json.dumps(body))
    with pytest.raises(DamagedCheckpoint, match=said):
        read_folder(folder)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"a pickle can run code.*safe_serialization=True"):
        read_folder(folder)
