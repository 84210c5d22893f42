"""Reading a model folder of Hugging Face: any box, little memory; what is wrong with one is told before it is used."""

from __future__ import annotations

import json
import resource
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_folders import GPT2, LLAMA, VIT, make_folder, random_tensors
from helpers.ranks import run_ranks
from safetensors.torch import load_file, save_file
from torch import Tensor

import colossus
from colossus.checkpoint import CheckpointError, DamagedCheckpoint, read_state_dict
from colossus.hf.folder import read_folder
from colossus.hf.reader import HFReader

CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "vit": VIT}


@pytest.mark.parametrize("kind", CONFIGS)
def test_any_box_of_any_parameter(kind: str, tmp_path: Path) -> None:
    """Against whole tensors of safetensors' own reader, by names written out here."""
    folder = make_folder(tmp_path / kind, CONFIGS[kind], files=3)
    files = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    with HFReader(folder) as reader:
        for name, there in _where(kind, files).items():
            key = f"model/{name}"
            assert torch.equal(reader.tensor(key), there), name
            for dtype in (torch.float32, torch.float64, torch.bfloat16):
                box = tuple((size // 3, size - size // 4) for size in there.shape)
                out = torch.full([stop - start for start, stop in box], 7.0, dtype=dtype)
                reader.read_box(key, box, out)
                assert torch.equal(out, there[tuple(slice(*span) for span in box)].to(dtype)), (name, dtype)
            empty = torch.empty([0, *there.shape[1:]])
            reader.read_box(key, ((1, 1), *((0, size) for size in there.shape[1:])), empty)
        assert reader.manifest.aliases == ({"head.weight": "embedding.weight"} if kind == "gpt2" else {})


def _where(kind: str, files: dict[str, Tensor]) -> dict[str, Tensor]:
    if kind == "gpt2":
        query, key, value = files["transformer.h.0.attn.c_attn.weight"].chunk(3, 1)
        return {
            "embedding.weight": files["transformer.wte.weight"],
            "blocks.0.attention.qkv.query.weight": query.T,
            "blocks.0.attention.qkv.key.weight": key.T,
            "blocks.0.attention.qkv.value.weight": value.T,
            "blocks.0.attention.qkv.value.bias": files["transformer.h.0.attn.c_attn.bias"][16:],
            "blocks.0.mlp.down.weight": files["transformer.h.0.mlp.c_proj.weight"].T,
            "norm.bias": files["transformer.ln_f.bias"],
        }
    if kind == "llama":
        return {
            "blocks.0.attention.qkv.key.weight": files["model.layers.0.self_attn.k_proj.weight"],
            "blocks.0.mlp.up.gate.weight": files["model.layers.0.mlp.gate_proj.weight"],
            "blocks.0.mlp.up.value.weight": files["model.layers.0.mlp.up_proj.weight"],
            "head.weight": files["lm_head.weight"],
        }
    return {
        "class_token.weight": files["vit.embeddings.cls_token"][0, 0],
        "positions.weight": files["vit.embeddings.position_embeddings"][0],
        "patches.weight": files["vit.embeddings.patch_embeddings.projection.weight"].flatten(1),
        "blocks.0.mlp_norm.weight": files["vit.encoder.layer.0.layernorm_after.weight"],
        "head.bias": files["classifier.bias"],
    }


def test_reading_needs_one_block_of_memory(tmp_path: Path) -> None:
    """Beside what is read into: also of a tensor that is transposed, fused and cast, and of a box of columns."""
    config = dict(GPT2, n_embd=1024, n_head=16, n_inner=8192, n_layer=2, vocab_size=32)
    folder = make_folder(tmp_path / "wide", config, random_tensors(config, torch.bfloat16))

    def grown(rank: int) -> dict[str, int]:
        found = {}
        with HFReader(folder) as reader:
            for name, dtype in (("attention.qkv.key", torch.bfloat16), ("mlp.up", torch.float32)):
                key = f"model/blocks.0.{name}.weight"
                rows, columns = reader.entry(key).shape
                for of, box in (("all", ((0, rows), (0, columns))), ("columns", ((0, rows), (columns // 2, columns)))):
                    out = torch.zeros([stop - start for start, stop in box], dtype=dtype)
                    reader.read_box(f"model/blocks.1.{name}.weight", box, out)  # what is made once
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    reader.read_box(key, box, out)
                    found[f"{name}, {of}"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                    found[f"{name}, {of}, itself"] = out.numel() * out.itemsize
        return found

    (found,) = run_ranks(1, grown, with_context=False)
    assert found["mlp.up, all, itself"] == 4 * 1024 * 8192
    for name, num_bytes in found.items():
        assert num_bytes <= 1.5e6 or name.endswith("itself"), found


# -- what is wrong ----------------------------------------------------------------------------------------

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
    "truncated": (_bytes(lambda data: data[:-10]), r"model.safetensors: is truncated: it has \d+ bytes, its header sa"),
    "truncated in its header": (_bytes(lambda data: data[:40]), r"is truncated: it has 40 bytes, its header alone"),
    "longer": (_bytes(lambda data: data + b"more"), r"is too long: it has"),
    "empty": (_bytes(lambda data: b""), r"is no safetensors file"),
    "a pickle": (_bytes(lambda data: b"\x80\x02}q\x00." * 9), r"is no safetensors file"),
    "a header of terabytes": (_bytes(lambda data: struct.pack("<Q", 1 << 40) + data[8:]), r"is no safetensors file"),
    "no JSON": (_bytes(lambda data: data.replace(b'"shape"', b'"sha:e')), r"its header cannot be understood"),
    "negative": (_header(lambda b: b[WPE].update(shape=[-6, -8])), r"cannot be understood \(TypeError: -6 where"),
    "outside": (
        _header(lambda b: b[WPE].update(data_offsets=[10**6, 10**6 + 192])),
        r"begins at byte \d+, what lies before it ends at",
    ),
    "overlapping": (_header(lambda b: b[WPE].update(data_offsets=[0, 192])), r"begins at byte"),
    "fewer bytes": (_header(lambda b: b[WPE].update(shape=[6, 9])), r"wpe.weight: F32 \[6, 9\] has 216 bytes, not"),
    "no dtype": (_header(lambda b: b[WPE].pop("dtype")), r"cannot be understood \(KeyError"),
    "no file": (lambda folder: (folder / "model.safetensors").unlink(), r"has neither model.safetensors nor model.saf"),
    "no config": (lambda folder: (folder / "config.json").unlink(), r"there is no config.json in it"),
    "config cut": (_bytes(lambda data: data[:9], "config.json"), r"config.json: cannot be read"),
    "config a list": (_bytes(lambda data: b"[]", "config.json"), r"holds a list where an object is expected"),
}
WRONG: dict[str, tuple[Damage, str]] = {
    "an unknown dtype": (_header(lambda b: b[WPE].update(dtype="F4")), r"has dtype 'F4'; those known are BF16, BOOL"),
    "missing": (
        _tensors(lambda t: t.pop(WPE)),
        r"not the GPT2LMHeadModel of its config.json: 1 missing: transformer.wp",
    ),
    "extra": (_tensors(lambda t: t.update(score=torch.ones(2))), r"1 not in a gpt2: score"),
    "another shape": (_config(n_positions=7), r"wpe.weight has shape \[6, 8\], config.json says \[7, 8\]"),
    "integers": (
        _tensors(lambda t: t.update({WPE: t[WPE].to(torch.int8)})),
        r"wpe.weight has dtype int8, which are no",
    ),
    "another model": (_config(model_type="mamba"), r"model_type = 'mamba': colossus reads gpt2, llama, vit"),
    "no model": (_config(model_type=None), r"model_type = None"),
    "quantised": (
        _config(quantization_config={"bits": 4}),
        r"quantization_config: colossus reads no quantised weights",
    ),
    "code of its own": (_config(auto_map={"AutoModel": "x.Y"}), r"auto_map: colossus reads no code of the model's own"),
    "an activation": (_config(activation_function="relu"), r"activation_function = 'relu': known are 'gelu_new'"),
    "scaled by layer": (
        _config(scale_attn_by_inverse_layer_idx=True),
        r"scale_attn_by_inverse_layer_idx = True: colos",
    ),
    "unscaled": (_config(scale_attn_weights=False), r"scale_attn_weights = False: colossus has True only"),
    "cross attention": (_config(add_cross_attention=True), r"add_cross_attention = True"),
    "two dropouts": (_config(resid_pdrop=0.1), r"resid_pdrop = 0.1, embd_pdrop = 0: colossus has one number"),
    "no size": (_config(n_embd="8"), r"n_embd = '8': a whole number"),
    "a tie that is none": (_config(tie_word_embeddings="no"), r"tie_word_embeddings = 'no': true or false"),
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
    (dict(hidden_act="gelu"), r"hidden_act = 'gelu': colossus has 'silu' only"),
    (dict(attention_bias=True), r"attention_bias = True, mlp_bias = False: colossus has biases in all"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), r"rope_scaling.rope_type = 'linear': colossus has 'default'"),
    (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e4)), r"rope_parameters.rope_type = 'yarn'"),
    (dict(rope_scaling=dict(rope_type="llama3", factor=8.0)), r"rope_scaling of type llama3: high_freq_factor, low"),
    (dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)), r"partial_rotary_factor"),
    (dict(rope_theta=0.5), r"rope_theta = 0.5: a number above 1"),
    (dict(rope_scaling=[8]), r"rope_scaling = \[8\]: an object is needed"),
]


@pytest.mark.parametrize(("changed", "said"), LLAMA_REFUSED)
def test_what_colossus_has_not_is_refused(changed: dict[str, Any], said: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "llama", LLAMA)
    _config(**changed)(folder)
    with pytest.raises(CheckpointError, match=said):
        read_folder(folder)


def test_rope_as_both_versions_write_it(tmp_path: Path) -> None:
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **scaling))
    older = dict(rope_theta=500.0, rope_scaling=dict(type="llama3", **scaling))
    new = dict(rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **scaling))
    plain = dict(rope_theta=500.0, rope_scaling=None)
    found = []
    for number, rope in enumerate((old, older, new, plain)):
        options = read_folder(make_folder(tmp_path / str(number), {**LLAMA, **rope})).options
        assert options.rotary_base == 500.0
        found.append(options.rotary_scaling)
    assert found[0] == found[1] == found[2] != found[3]
    assert found[3] is None
    assert found[0].model_dump() == dict(scaling, rope_type="llama3")


INDEXED: dict[str, tuple[Callable[[dict[str, str]], Any], str]] = {
    "a file that is not there": (
        lambda names: names.update({WPE: "other.safetensors"}),
        r"other.safetensors: is missing",
    ),
    "a path": (
        lambda names: names.update({WPE: "../x.safetensors"}),
        r"names a file '../x.safetensors', which is no plai",
    ),
    "another file": (
        lambda names: names.update({WPE: next(file for file in names.values() if file != names[WPE])}),
        r"says that transformer.wpe.weight is in model-0000\d-of-00003.safetensors, where it is not",
    ),
    "nothing": (lambda names: names.clear(), r"has no weight_map"),
}


@pytest.mark.parametrize("name", INDEXED)
def test_an_index_that_is_wrong(name: str, tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2, files=3)
    assert len(read_folder(folder).files) == 3
    edit, said = INDEXED[name]
    index = folder / "model.safetensors.index.json"
    body = json.loads(index.read_text())
    edit(body["weight_map"])
    index.write_text(json.dumps(body))
    with pytest.raises(DamagedCheckpoint, match=said):
        read_folder(folder)


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2, files=2)
    first, second = sorted(folder.glob("*.safetensors"))
    save_file({**load_file(second), **load_file(first)}, second)
    with pytest.raises(DamagedCheckpoint, match=r"is in model-00001-of-00002.safetensors and in model-00002"):
        read_folder(folder)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"a pickle can run code.*safe_serialization=True"):
        read_folder(folder)


def test_old_files_have_more_and_less(tmp_path: Path) -> None:
    """Masks, frequencies and a copy of the tied head are no parameters; a tied table may be there as the head only."""
    tensors = random_tensors(GPT2)
    whole = read_state_dict(make_folder(tmp_path / "whole", GPT2, tensors))
    masks = {"h.0.attn.bias": torch.ones(1, 1, 6, 6), "h.0.attn.masked_bias": torch.tensor(-1e4)}
    bare = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    table = tensors["transformer.wte.weight"]
    old = make_folder(tmp_path / "old", GPT2, {**bare, **masks, "lm_head.weight": table.clone()})
    as_head = {name: value for name, value in tensors.items() if name != "transformer.wte.weight"}
    head = make_folder(tmp_path / "head", GPT2, {**as_head, "lm_head.weight": table})
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    read_folder(make_folder(tmp_path / "llama", LLAMA, {**random_tensors(LLAMA), **frequencies}))
    for other in (old, head):
        found = read_state_dict(other)
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], value) for name, value in whole.items())
    assert whole["head.weight"] is whole["embedding.weight"]


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "gpt2", GPT2)
    with HFReader(folder) as reader:
        _bytes(lambda data: data[:-200])(folder)
        with pytest.raises(DamagedCheckpoint, match=r"has \d+ bytes, it had \d+ when it was opened"):
            reader.verify()
        with pytest.raises(CheckpointError, match=r"cannot be read: the file ends early"):
            [reader.tensor(f"model/{name}") for name in reader.manifest.names("model")]
        with pytest.raises(CheckpointError, match=r"has no tensor 'model/norm.wieght'; there are model/norm.weight"):
            reader.tensor("model/norm.wieght")


def test_the_weights_of_a_folder_go_into_a_model_that_differs(tmp_path: Path) -> None:
    """By the same rules as those of a checkpoint: what is missing, or of another shape, is told."""
    tensors = {name: value for name, value in random_tensors(VIT).items() if not name.startswith("classifier")}
    folder = make_folder(tmp_path / "vit", VIT, tensors)

    def load(rank: int) -> list[str]:
        told = []
        train = dict(train=dict(steps=1, global_batch_size=2), device="cpu")
        engine = colossus.initialize(dict(model=dict(type="hf", path=str(folder), num_classes=7), **train))
        with pytest.raises(CheckpointError) as raised:
            engine.checkpoints.resume()
        told.append(str(raised.value))
        told.append(str(engine.checkpoints.load_weights(folder, strict=False)))
        with pytest.raises(CheckpointError) as raised:
            engine.checkpoints.load(folder)
        told.append(str(raised.value))
        return told

    ((strict, loaded, resumed),) = run_ranks(1, load, with_context=False)
    assert "checkpoint.weights: " in strict
    assert "2 missing there: head.bias, head.weight" in strict
    assert loaded == "2 missing there: head.bias, head.weight"
    assert "a model folder of Hugging Face checkpoint.weights takes the weights" in resumed
