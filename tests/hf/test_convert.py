"""``colossus checkpoint convert`` and `colossus.hf.save`: no tensor changes, and what cannot be is refused."""

from __future__ import annotations

import json
import os
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.hf_folders import GPT2, LLAMA, MIXTRAL, QWEN3_MOE, VIT, make_folder, random_tensors
from helpers.ranks import run_ranks
from helpers.training import BATCH, batch_of, config_of
from safetensors.torch import load_file
from torch import Tensor

import colossus
import colossus.hf
from colossus.checkpoint import CheckpointError, CheckpointReader, read_state_dict
from colossus.checkpoint.manifest import read_manifest
from colossus.cli.main import main
from colossus.config import ConfigError, load_config
from colossus.hf.family import family_of
from colossus.launch.resume import choose
from colossus.registry import MODELS
from colossus.state.model_state_dict import full_state_dict

Captured = pytest.CaptureFixture[str]
CONFIGS = {"gpt2": GPT2, "llama": LLAMA, "mixtral": MIXTRAL, "qwen3_moe": QWEN3_MOE, "vit": VIT}
TOKENIZER = b'{"version": "1.0"}'


def convert(*words: object) -> int:
    return main(["checkpoint", "convert", *map(str, words)])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def assert_same(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert mine[name].dtype == value.dtype
        assert torch.equal(mine[name], value), name


@pytest.mark.parametrize("kind", CONFIGS)
def test_there_and_back(kind: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hugging Face -> colossus -> Hugging Face, and back again: names, bytes, sizes, ids of tokens, the tokenizer."""
    monkeypatch.setattr("colossus.cli.convert._LEAST_SHARD", 1)
    source = make_folder(tmp_path / "source", CONFIGS[kind], files=3)
    (source / "tokenizer.json").write_bytes(TOKENIZER)
    ours, again, back, checkpoint = (tmp_path / name for name in ("ours", "again", "back", "a folder/checkpoint"))
    assert convert(source, ours, "--to", "colossus", "--max-shard-size", "500B") == 0
    assert convert(ours, back, "--to", "hf") == 0
    assert convert(back, checkpoint, "--to", "colossus") == 0
    assert convert(source, again, "--to", "hf", "--max-shard-size", "2KB") == 0
    assert "weights from" in capsys.readouterr().out
    assert_same(tensors_of(back), tensors_of(source))
    assert_same(tensors_of(again), tensors_of(source))
    assert_same(read_state_dict(checkpoint), read_state_dict(source))
    assert len(list(again.glob("*.safetensors"))) > 1
    assert {*os.listdir(back)} - {"generation_config.json"} == {"config.json", "model.safetensors", "tokenizer.json"}
    with CheckpointReader(ours) as reader:
        assert len(reader.manifest.files) > 2
        assert "tokenizer.json" in reader.manifest.files
        assert reader.manifest.is_weights_only
        assert reader.manifest.step == 0
        assert reader.manifest.config["model"]["type"] in ("GPT", "Llama", "ViT")
        reader.verify()
    specs = [colossus.hf.HFReader(folder).manifest.config["model"] for folder in (source, again, back)]
    assert specs[0] == specs[1] == specs[2]
    for folder in (back, again):
        config = json.loads((folder / "config.json").read_text())
        assert config["model_type"] == kind
        assert config["dtype"] == config["torch_dtype"] == "float32"
        assert config.get("eos_token_id") == CONFIGS[kind].get("eos_token_id")
        assert ("eos_token_id" in config) == (kind == "gpt2")
        assert config.get("id2label") == CONFIGS[kind].get("id2label")
        assert (folder / "tokenizer.json").read_bytes() == TOKENIZER
    if kind == "gpt2":
        assert json.loads((back / "generation_config.json").read_text())["eos_token_id"] == 3


def test_a_folder_is_looked_at_like_a_checkpoint(tmp_path: Path, capsys: Captured) -> None:
    source = make_folder(tmp_path / "source", dict(GPT2, transformers_version="5.0.0"), files=2)
    assert main(["checkpoint", "inspect", str(source)]) == 0
    out = capsys.readouterr().out
    assert "by transformers 5.0.0" in out
    assert "a folder of Hugging Face (gpt2)" in out
    assert any(line.split()[:4] == ["embedding.weight", "1", "11", "x"] for line in out.splitlines())
    assert convert(source, tmp_path / "ours", "--to", "colossus") == 0
    assert main(["checkpoint", "diff", str(source), str(tmp_path / "ours")]) == 0
    assert convert(source, tmp_path / "narrow", "--to", "hf", "--dtype", "bf16") == 0
    capsys.readouterr()
    assert main(["checkpoint", "diff", str(source), str(tmp_path / "narrow")]) == 3
    assert "dtypes: " in capsys.readouterr().out


def test_numbers_that_a_dtype_has_no_room_for(tmp_path: Path, capsys: Captured) -> None:
    tensors = random_tensors(GPT2)
    tensors["transformer.h.0.attn.c_attn.bias"][9] = -1e5
    tensors["transformer.wpe.weight"][0, 0] = torch.inf  # as it was
    source = make_folder(tmp_path / "source", GPT2, tensors)
    for to in ("hf", "colossus"):
        assert convert(source, tmp_path / to, "--to", to, "--dtype", "fp16") == 2
        message = capsys.readouterr().err
        assert "key.bias" in message
        assert "has numbers above 65504, the largest of float16: they would be infinity; use bf16" in message
        assert not (tmp_path / to).exists()
        assert convert(source, tmp_path / to, "--to", to, "--dtype", "bf16") == 0


def _train(rank: int, config: dict[str, Any], target: Path) -> dict[str, Tensor]:
    engine = colossus.initialize(config)
    engine.train_step(batch_of(0))
    engine.checkpoints.save(background=False).wait()
    colossus.hf.save(engine, target, dtype=torch.bfloat16, max_shard_bytes=3000)
    whole = full_state_dict(engine.model, engine.context)
    engine.close()
    return whole


def test_a_run_is_converted_and_saved(tmp_path: Path) -> None:
    """What ranks write together is what is converted out of their checkpoint, which has optimizer state, too."""
    llama_like = dict(positions="rotary", norm="rmsnorm", mlp="swiglu", bias=True, num_kv_heads=2)
    config = config_of(dict(tensor=2), 1, "fp32", model=llama_like, checkpoint=dict(dir=str(tmp_path / "run")))
    whole, _ = run_ranks(2, _train, config, tmp_path / "saved", with_context=False)
    assert convert(tmp_path / "run", tmp_path / "converted", "--to", "hf") == 0
    assert convert(tmp_path / "run", tmp_path / "narrow", "--to", "hf", "--dtype", "bf16") == 0
    assert convert(tmp_path / "run", tmp_path / "weights", "--to", "colossus") == 0
    assert_same(tensors_of(tmp_path / "saved"), tensors_of(tmp_path / "narrow"))
    assert_same(read_state_dict(tmp_path / "converted"), whole)
    assert_same(read_state_dict(tmp_path / "weights"), whole)
    with CheckpointReader(tmp_path / "weights") as reader:
        assert reader.manifest.step == 1
        assert not list(reader.manifest.names("optimizer"))
    spec = colossus.hf.HFReader(tmp_path / "saved").manifest.config["model"]
    assert spec["type"] == "Llama"
    assert spec["num_kv_heads"] == 2
    assert spec["bias"] is True


BESIDE = {
    name: f'{{"of": "{name}"}}'.encode()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "vocab.json", "merges.txt")
}


def _tuned(rank: int, root: Path, companions: Path) -> None:
    sizes = dict(model=dict(type="hf", path=str(companions)), train=dict(steps=2, global_batch_size=2), device="cpu")
    settings = dict(parallel=dict(data=2), **sizes)
    for resume in (None, "auto"):
        engine = colossus.initialize({**settings, "checkpoint": dict(dir=str(root / "run"), resume=resume)})
        assert (engine.checkpoints.resume() is not None) == (resume is not None)
        ids = torch.arange(6).view(1, 6)
        engine.train_step({"inputs": ids, "labels": ids})
        engine.checkpoints.save(background=False).wait()
        if resume is not None:
            colossus.hf.save(engine, root / "saved")
        engine.close()


def test_what_a_folder_says_of_tokens_stays_with_a_run(tmp_path: Path) -> None:
    """Through its checkpoints, a resume too, and out of them: ids of special tokens, files; no null."""
    companions = make_folder(tmp_path / "gpt2", dict(GPT2, bos_token_id=1, eos_token_id=[3, 4]))
    for name, data in BESIDE.items():
        (companions / name).write_bytes(data)
    run_ranks(2, _tuned, tmp_path, companions, with_context=False)
    assert convert(tmp_path / "run", tmp_path / "converted", "--to", "hf") == 0
    assert read_manifest(tmp_path / "run" / "step-00000002").tokenizer == "tokenizer.json"
    for name in ("saved", "converted"):
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == (1, [3, 4]), name
        assert "pad_token_id" not in config
        assert {file: (tmp_path / name / file).read_bytes() for file in BESIDE} == BESIDE
        generation = json.loads((tmp_path / name / "generation_config.json").read_text())
        assert generation == {"_from_model_config": True, "bos_token_id": 1, "eos_token_id": [3, 4]}


def _grown(rank: int, target: Path) -> tuple[int, int]:
    """Bytes that saving adds to this rank at most, and those of the largest tensor."""
    sizes = dict(hidden_size=256, num_layers=16, vocab_size=4096, num_heads=4)
    engine = colossus.initialize(config_of(dict(tensor=2), 1, "fp32", model=sizes))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    colossus.hf.save(engine, target)
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before), 4 * 4096 * 256


def test_no_rank_holds_the_model_while_it_is_saved(tmp_path: Path) -> None:
    for grown, largest in run_ranks(2, _grown, tmp_path / "hf", with_context=False):
        assert grown < 7 * largest  # theirs, ours, what is gathered of it, how it travels, and pages not given back yet
    assert (tmp_path / "hf" / "model.safetensors").stat().st_size > 12 * largest


# -- refused ----------------------------------------------------------------------------------------------


def test_what_cannot_be_converted(tmp_path: Path, capsys: Captured) -> None:
    source = make_folder(tmp_path / "source", GPT2)
    for words, code, message in (
        ((tmp_path / "nowhere", tmp_path / "x", "--to", "hf"), 2, "there is no such folder"),
        ((source, tmp_path / "x"), 2, "the following arguments are required: --to"),
        ((source, tmp_path / "x", "--to", "onnx"), 2, "invalid choice: 'onnx'"),
        ((source, tmp_path / "x", "--to", "hf", "--max-shard-size", "0"), 2, "'0' is no size of memory; write 80GB"),
        ((source, tmp_path / "x", "--to", "hf", "--max-shard-size", "5"), 2, "must be at least 1MB, such as 500MB"),
        (
            (source, tmp_path / "x", "--to", "hf", "--max-shard-size", "5 bananas"),
            2,
            "'5 bananas' is no size of memory",
        ),
        ((source, source, "--to", "hf"), 2, f"{source}: exists already"),
        ((source, source / "config.json" / "x", "--to", "hf"), 2, "cannot be written: Not a directory"),
    ):
        assert convert(*words) == code, words
        assert message in capsys.readouterr().err
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-1])
    assert convert(source, tmp_path / "x", "--to", "colossus") == 1
    assert "is truncated" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["source"]


WRITTEN = {
    "mixtral": dict(experts=dict(num=4)),
    "qwen3_moe": dict(experts=dict(num=4, ffn_size=8, every=2), qk_norm=True),
    "qwen3": dict(qk_norm=True),
    "mistral": dict(window=8),
    "no mistral, since attention_pattern = .'local', 'global'. .not .'local',..": dict(
        window=8, attention_pattern=("local", "global")
    ),
    "no llama, since sinks = True .not False.": dict(sinks=True),
    "no llama, since rotary_fraction = 0.5 .not 1.0.": dict(rotary_fraction=0.5),
    "no mixtral, since experts.bias_update = 0.1": dict(experts=dict(num=4, bias_update=0.1)),
    "no mixtral, since experts.ffn_size = 8 .not ffn_hidden_size = 384": dict(experts=dict(num=4, ffn_size=8)),
    "no llama, since experts = {..} .not None.": dict(experts=dict(num=4, shared=8)),
}


@pytest.mark.parametrize("outcome", WRITTEN)
def test_which_family_a_llama_is_of(outcome: str) -> None:
    options = MODELS.options("Llama")(**WRITTEN[outcome])
    if outcome.startswith("no"):
        with pytest.raises(CheckpointError, match=outcome):
            family_of("Llama", options)
    else:
        assert family_of("Llama", options).model_type == outcome


def _config(**model: Any) -> dict[str, Any]:
    return dict(model=model, train=dict(steps=1, global_batch_size=BATCH), device="cpu")


def test_nothing_goes_on_from_weights_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a process starts, and from an engine; but a run begins with them."""
    monkeypatch.chdir(tmp_path)
    assert convert(make_folder(tmp_path / "source", GPT2), "ours", "--to", "colossus") == 0
    config = load_config(_config(type="hf", path="source"))
    assert choose(config).find_weights() == Path("source")
    resumed = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"resume": "ours"})})
    with pytest.raises(
        ConfigError, match=r"checkpoint.resume = 'ours': ours has weights only.*checkpoint.weights=ours"
    ):
        choose(resumed)

    def load(rank: int) -> str:
        engine = colossus.initialize(_config(type="hf", path="source"))
        engine.checkpoints.load_weights("ours")
        with pytest.raises(CheckpointError) as raised:
            engine.checkpoints.load("ours")
        return str(raised.value)

    (message,) = run_ranks(1, load, with_context=False)
    assert "ours has weights only, no optimizer and no place in the data" in message
