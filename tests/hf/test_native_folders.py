"""Folders of models in transformers' own code, written again: config, generation, tokenizer."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.launching import environment
from helpers.ranks import run_ranks

import colossus

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="scripts/test installs transformers")
SIZES: dict[str, Any] = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2)
TOKENIZER = {"tokenizer.json": '{"model": {}}', "tokenizer_config.json": '{"eos_token": "<e>"}', "notes.txt": "theirs"}


def test_packages_are_attributes_of_the_package() -> None:
    body = "import sys, colossus; assert 'torch' not in sys.modules; colossus.hf.__all__; "
    body += "print(colossus.checkpoint.__name__, hasattr(colossus, 'nothing'), 'hf' in dir(colossus))"
    done = subprocess.run([sys.executable, "-c", body], env=environment(), capture_output=True, text=True)
    assert done.stdout == "colossus.checkpoint False True\n", done.stderr


def save(rank: int, source: Path, target: Path, how: str) -> None:
    from transformers import AutoModelForCausalLM

    def make() -> Any:
        model = AutoModelForCausalLM.from_pretrained(source)
        if how == "changed":
            model.generation_config.top_k = 7
        return model

    config: dict[str, Any] = dict(parallel=dict(tensor=2), train=dict(global_batch_size=2), device="cpu")
    config["optimizer"] = dict(type="SGD", lr=0.1)
    if how == "config":
        config["model"] = dict(type="hf", path=str(source), native=True)
        engine = colossus.initialize(config)
    else:
        engine = colossus.initialize(
            config, model=colossus.parallelize(make), loss_fn=lambda outputs, batch: (outputs.logits.sum(), 1)
        )
    assert engine.model.config.use_cache is False
    colossus.hf.save(engine, target)
    assert rank or "tokenizer.json" in engine.checkpoints.assets.files, "checkpoints have it, too"
    engine.close()


def same_config(folder: Path) -> dict[str, Any]:
    """What ``config.json`` says but for what names classes, versions and dtypes of weights."""
    said = json.loads((folder / "config.json").read_text())
    return {key: said.get(key) for key in ("use_cache", "model_type", "tie_word_embeddings", "_name_or_path")}


@pytest.mark.parametrize("how", ["config", pytest.param("changed", marks=pytest.mark.long)])
def test_what_lies_beside_weights_is_written_again(how: str, tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    source, target = tmp_path / "in", tmp_path / "out"
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=11, use_cache=True, **SIZES))
    theirs.generation_config = GenerationConfig(top_k=3, temperature=0.5, do_sample=True)
    theirs.save_pretrained(source)
    for name, text in TOKENIZER.items():
        (source / name).write_text(text)
    run_ranks(2, save, source, target, how, with_context=False)
    written = {file.name for file in target.iterdir()}
    assert written == {"config.json", "generation_config.json", "model.safetensors", *TOKENIZER} - {"notes.txt"}
    assert all((target / name).read_text() == TOKENIZER[name] for name in TOKENIZER if name != "notes.txt")
    assert same_config(target) == same_config(source)
    assert same_config(target)["use_cache"] is True
    again = GenerationConfig.from_pretrained(target)
    assert (again.top_k, again.temperature, again.do_sample) == (7 if how == "changed" else 3, 0.5, True)
    back = AutoModelForCausalLM.from_pretrained(target)
    assert all(torch.equal(mine, value) for mine, value in zip(back.parameters(), theirs.parameters(), strict=True))
