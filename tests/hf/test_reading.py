"""Reading a model folder of Hugging Face: any box, little memory, what older versions wrote, into another model."""

from __future__ import annotations

import io
import resource
from pathlib import Path

import pytest
import torch
from helpers.hf_folders import GPT2, LLAMA, MIXTRAL, QWEN3_MOE, VIT, make_folder, random_tensors
from helpers.ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor

import colossus
from colossus.checkpoint import CheckpointError, read_state_dict
from colossus.config import load_config
from colossus.engine.initialize import make_engine
from colossus.hf.hf_folder import options_of, read_folder
from colossus.hf.hf_reader import HFReader
from colossus.monitor.display import Display
from colossus.state.model_state_dict import full_state_dict

CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "vit": VIT}


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
    if kind == "mixtral":
        experts = "model.layers.0.block_sparse_moe.experts"
        return {
            "blocks.0.mlp.router.weight": files["model.layers.0.block_sparse_moe.gate.weight"],
            "blocks.0.mlp.experts.gate": torch.stack([files[f"{experts}.{n}.w1.weight"] for n in range(3)]),
            "blocks.0.mlp.experts.down": torch.stack([files[f"{experts}.{n}.w2.weight"] for n in range(3)]),
        }
    if kind == "qwen3_moe":
        experts = "model.layers.1.mlp.experts"
        return {
            "blocks.0.mlp.up.gate.weight": files["model.layers.0.mlp.gate_proj.weight"],
            "blocks.1.mlp.experts.up": torch.stack([files[f"{experts}.{n}.up_proj.weight"] for n in range(3)]),
            "blocks.1.attention.k_norm.weight": files["model.layers.1.self_attn.k_norm.weight"],
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
        sizes = {}
        with HFReader(folder) as reader:
            for name, dtype in (("attention.qkv.key", torch.bfloat16), ("mlp.up", torch.float32)):
                key = f"model/blocks.0.{name}.weight"
                rows, columns = reader.entry(key).shape
                for of, box in (("all", ((0, rows), (0, columns))), ("columns", ((0, rows), (columns // 2, columns)))):
                    out = torch.zeros([stop - start for start, stop in box], dtype=dtype)
                    reader.read_box(f"model/blocks.1.{name}.weight", box, out)  # what is made once
                    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
                    reader.read_box(key, box, out)
                    sizes[f"{name}, {of}"] = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
                    sizes[f"{name}, {of}, itself"] = out.numel() * out.itemsize
        return sizes

    (memory,) = run_ranks(1, grown, with_context=False)
    assert memory["mlp.up, all, itself"] == 4 * 1024 * 8192
    for name, num_bytes in memory.items():
        assert num_bytes <= 1.5e6 or name.endswith("itself"), memory


def test_rope_as_both_versions_write_it(tmp_path: Path) -> None:
    scaling = dict(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    old = dict(rope_theta=500.0, rope_scaling=dict(rope_type="llama3", **scaling))
    older = dict(rope_theta=500.0, rope_scaling=dict(type="llama3", **scaling))
    new = dict(rope_parameters=dict(rope_type="llama3", rope_theta=500.0, **scaling))
    plain = dict(rope_theta=500.0, rope_scaling=None)
    scalings = []
    for number, rope in enumerate((old, older, new, plain)):
        folder = read_folder(make_folder(tmp_path / str(number), {**LLAMA, **rope}))
        options = options_of(folder.manifest.config["model"])
        assert options.rotary_base == 500.0
        scalings.append(options.rotary_scaling)
    assert scalings[0] == scalings[1] == scalings[2] != scalings[3]
    assert scalings[3] is None
    assert scalings[0].keys == dict(scaling, rope_type="llama3")


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
        state = read_state_dict(other)
        assert state.keys() == whole.keys()
        assert all(torch.equal(state[name], value) for name, value in whole.items())
    assert whole["head.weight"] is whole["embedding.weight"]


def test_the_weights_of_a_folder_go_into_a_model_that_differs(tmp_path: Path) -> None:
    """By the same rules as those of a checkpoint: what is missing, or of another shape, is told."""
    tensors = {name: value for name, value in random_tensors(VIT).items() if not name.startswith("classifier")}
    folder = make_folder(tmp_path / "vit", VIT, tensors)

    def load(rank: int) -> list[str]:
        messages = []
        train = dict(train=dict(steps=1, global_batch_size=2), device="cpu")
        config = dict(model=dict(type="hf", path=str(folder), num_classes=7), **train)
        with pytest.raises(CheckpointError) as raised:
            colossus.initialize(config)
        messages.append(str(raised.value))
        engine = make_engine(load_config(config))
        messages.append(str(engine.checkpoints.load_weights(folder, strict=False)))
        with pytest.raises(CheckpointError) as raised:
            engine.checkpoints.load(folder)
        messages.append(str(raised.value))
        return messages

    ((strict, loaded, resumed),) = run_ranks(1, load, with_context=False)
    assert "checkpoint.weights: " in strict
    assert "2 missing there: head.bias, head.weight" in strict
    assert loaded == "2 missing there: head.bias, head.weight"
    assert "a model folder of Hugging Face is for checkpoint.weights" in resumed


def test_a_shorter_model_takes_the_first_positions(tmp_path: Path) -> None:
    """Of learned ones, under any plan, whether or not all has to fit; other tables must."""
    folder = make_folder(tmp_path / "gpt2", GPT2)
    saved = read_state_dict(folder)

    def load(rank: int) -> str:
        train = dict(train=dict(steps=1, global_batch_size=2), device="cpu", parallel=dict(tensor=2))
        engine = colossus.initialize(dict(model=dict(type="hf", path=str(folder), seq_len=4), **train))
        for name, value in full_state_dict(engine.model, engine.context).items():
            assert torch.equal(value, saved[name][:4] if name == "positions.weight" else saved[name]), name
        match = engine.checkpoints.weights_match
        assert match is not None
        assert match.is_complete
        assert match.resized == {"positions.weight": (6, 4)}
        heading = Display(tmp_path, io.StringIO()).heading(engine)[-1]
        engine.close()
        with pytest.raises(CheckpointError, match=r"embedding.weight \(11, 8\) there, \(10, 8\) here"):
            colossus.initialize(dict(model=dict(type="hf", path=str(folder), vocab_size=10), **train))
        return heading

    for heading in run_ranks(2, load, with_context=False):
        assert heading.endswith(f"from {folder}, the first 4 rows of positions.weight")
