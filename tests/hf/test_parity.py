"""Models of transformers, read from their folders under a plan: logits, gradients, training; and written back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from helpers.long import but
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import is_key_bias
from helpers.transformers_models import CONFIGS, batch_for, by_our_names, in_float64, make_model, step_of
from safetensors.torch import load_file
from torch import Tensor

import colossus
import colossus.hf
from colossus import layers
from colossus.layers.model_parallel import model_parallel_of
from colossus.state.model_state_dict import full_state_dict

STEPS = 3
PLANS = plans("alone", "1d", "1d_sharded_4", "2d", "2.5d", "3d", "pipeline2", "pipeline2_1d", "zero3", "expert2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of each model, as transformers writes it: the odd ones in several files."""
    root = tmp_path_factory.mktemp("hf")
    for number, kind in enumerate(CONFIGS):
        make_model(kind).save_pretrained(root / kind, max_shard_size="20KB" if number % 2 else "1GB")
    assert len(list((root / "llama 3").glob("*.safetensors"))) > 2
    return root


def kinds_under(plan: dict[str, Any]) -> list[str]:
    """All; where experts are spread, those that have some."""
    return [kind for kind in CONFIGS if "expert" not in plan or kind in ("mixtral", "qwen3 moe", "gpt-oss")]


def config_of(path: Path, plan: dict[str, Any], precision: str = "fp64") -> dict[str, Any]:
    return dict(
        parallel=plan,
        model=dict(type="hf", path=str(path)),
        optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.1),
        train=dict(steps=STEPS, global_batch_size=8, precision=precision, clip_grad_norm=None),
        schedule=dict(microbatches=2),
        device="cpu",
    )


def body(rank: int, folders: Path, plan: dict[str, Any], written: Path) -> dict[str, Any]:
    """Of each model: what it was, logits where one rank can ask for them, and some steps."""
    results = {}
    for kind in kinds_under(plan):
        engine = colossus.initialize(config_of(folders / kind, plan))
        loaded = full_state_dict(engine.model, engine.context, aliases=False)
        logits = None
        if not ({"pipeline", "zero"} & plan.keys()):
            with torch.no_grad():
                axes = model_parallel_of(engine.context).regions.whole.batch
                parts = batch_for(kind)["inputs"].chunk(engine.context.size(axes) if axes else 1)
                at = engine.context.index(axes) if axes else 0
                logits = at, len(parts), layers.to_whole(engine.model.eval()(parts[at]))
        colossus.hf.save(engine, written / kind, max_shard_bytes=20_000)
        losses, gradients = [], {}
        index, count = engine.context.index("data"), engine.context.size("data")
        for step in range(STEPS):
            batch = batch_for(kind, step)
            batch = {name: value.chunk(count)[index] for name, value in batch.items()}
            losses.append(engine.train_step(batch).loss)
            if not step:
                gradients = full_state_dict(engine.model, engine.context, gradients=True)
        end = full_state_dict(engine.model, engine.context, aliases=False)
        results[kind] = loaded, logits, losses, gradients, end
        engine.close()
    return results


@pytest.fixture(scope="module")
def references(folders: Path) -> dict[str, Any]:
    """What transformers computes: the logits, loss and gradients of the first step, and weights after all."""
    results = {}
    for kind in CONFIGS:
        model = in_float64(make_model(kind))
        first = step_of(model, batch_for(kind), folders / kind)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        losses = []
        for step in range(STEPS):
            losses.append(step_of(model, batch_for(kind, step), folders / kind).loss)
            optimizer.step()
        results[kind] = first, losses, by_our_names(model.state_dict(), folders / kind)
    return results


def gap(mine: Tensor, other: Tensor) -> float:
    assert mine.shape == other.shape
    return ((mine - other).abs().max() / other.abs().max().clamp(min=1e-3)).item()


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"1d", "expert2"}, PLANS))
def test_models_of_transformers(plan: str, folders: Path, references: dict[str, Any], tmp_path: Path) -> None:
    world, parallel = PLANS[plan]
    for of_rank in run_ranks(world, body, folders, parallel, tmp_path, with_context=False):
        for kind, (loaded, logits, losses, gradients, end) in of_rank.items():
            first, wanted_losses, wanted_end = references[kind]
            exact = by_our_names(stored(folders / kind), folders / kind)
            assert loaded.keys() == exact.keys()
            assert all(torch.equal(loaded[name], value) for name, value in exact.items()), kind
            if logits is not None:
                at, count, mine = logits
                assert gap(mine, first.logits.chunk(count)[at]) < 1e-10, kind
            assert gap(torch.tensor(losses), torch.tensor(wanted_losses)) < 1e-10, kind
            assert gradients.keys() == first.gradients.keys()
            for name, wanted in first.gradients.items():
                assert gap(gradients[name], wanted) < 1e-9, f"{kind}, gradient of {name}"
            for name, wanted in wanted_end.items():
                assert is_key_bias(name) or gap(end[name], wanted) < 1e-9, f"{kind}, {name} after {STEPS} steps"
    for kind in kinds_under(parallel):
        assert_is_written(tmp_path / kind, folders / kind)


#: other implementations of experts know no float64
_LOADING: dict[str, Any] = dict(dtype="auto", experts_implementation="eager")


def assert_is_written(mine: Path, theirs: Path) -> None:
    """The same bytes, which transformers loads into the same model."""
    here, there = stored(mine), stored(theirs)
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], value) for name, value in there.items())
    (architecture,) = json.loads((mine / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, architecture)
    model, problems = model_class.from_pretrained(mine, **_LOADING, output_loading_info=True)
    assert not any(problems.values()), problems
    original = model_class.from_pretrained(theirs, **_LOADING)
    assert model.dtype == original.dtype == torch.float64
    kind = theirs.name
    with torch.no_grad():
        inputs = batch_for(kind)["inputs"]
        assert torch.equal(model.eval()(inputs).logits, original.eval()(inputs).logits)


@pytest.mark.long
def test_in_fp32_and_of_unchanged_transformers(tmp_path: Path) -> None:
    """Logits and gradients in float32; and in float64, of which transformers computes some things in float32."""

    def step_here(
        rank: int, path: Path, kind: str, precision: str, dtype: torch.dtype
    ) -> tuple[Tensor, dict[str, Tensor]]:
        engine = colossus.initialize(config_of(path, {}, precision))
        batch = batch_for(kind, dtype=dtype)
        with torch.no_grad():
            logits = layers.to_whole(engine.model.eval()(batch["inputs"]))
        engine.train_step(batch)
        return logits, full_state_dict(engine.model, engine.context, gradients=True)

    most = 1e-5  # what float32 rounds, the softmax of Gemma's capped scores, say
    for kind in CONFIGS:
        for precision, dtype in (("fp32", torch.float32), ("fp64", torch.float64)):
            model = make_model(kind, dtype)
            model.save_pretrained(tmp_path / kind)
            wanted = step_of(model, batch_for(kind, dtype=dtype), tmp_path / kind)
            ((logits, gradients),) = run_ranks(
                1, step_here, tmp_path / kind, kind, precision, dtype, with_context=False
            )
            assert logits.dtype == dtype
            assert gap(logits, wanted.logits) < most, f"{kind} in {precision}"
            for name, gradient in wanted.gradients.items():
                assert is_key_bias(name) or gap(gradients[name], gradient) < 3 * most, f"{kind} in {precision}, {name}"
