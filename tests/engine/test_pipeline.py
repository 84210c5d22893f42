"""Every schedule trains as one process does: gradients, tied weights, norm, weights; any number of microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import Trace, assert_same_numbers, assert_same_run, batch_of, config_of, relative, run_plan

import colossus
from colossus.checkpoint.state_dict import full_state_dict, load_full_state_dict
from colossus.schedule.actions import Action, Actions
from colossus.schedule.runtime.executor import Executor, StepTotals

#: the second step has what the first has left: weights, sums under way, state of links
STEPS, BATCH, LAYERS = 2, 12, 6
MODEL = dict(num_layers=LAYERS)
EXACT = dict(loss=1e-10, norm=1e-10, parameter=1e-9)
KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")
#: ranks, microbatches: one, fewer than ranks, no multiple of them, many
COUNTS = [(2, 1), (2, 3), (4, 1), (4, 3), (4, 6)]


def config(parallel: dict[str, Any], kind: str = "1f1b", microbatches: int = 1, **more: Any) -> dict[str, Any]:
    settings: dict[str, Any] = dict(
        schedule=dict(type=kind, microbatches=microbatches), model=MODEL, train=dict(global_batch_size=BATCH)
    )
    for key, value in more.items():
        settings[key] = {**settings.get(key, {}), **value}
    return config_of(parallel, STEPS, "fp64", **settings)


@cache
def reference(**model: Any) -> Trace:
    return run_plan(1, config({}, model=model), STEPS)[0]


def assert_parity(world: int, settings: dict[str, Any], **model: Any) -> None:
    traces = run_plan(world, settings, STEPS)
    for trace in traces:
        assert trace.losses == traces[0].losses, "ranks report different losses"
        assert_same_run(trace, reference(**model), **EXACT)
        assert_same_numbers(trace, reference(**model))


def schedules() -> Iterator[Any]:
    """Every schedule with every count; by default all for one of them, and what says most for the others."""
    for kind in KINDS:
        for count in COUNTS:
            few = (
                (kind == "1f1b" and count not in ((4, 1), (4, 3), (4, 6)))
                or (kind not in ("gpipe", "1f1b") and count == (4, 6))
                or (kind, *count) in (("gpipe", 2, 3), ("zb-v", 2, 1))
            )
            yield pytest.param(kind, *count, marks=() if few else pytest.mark.long)


@pytest.mark.rest("1f1b-2-1", "1f1b-4-6", "zb-v-2-1", "zb-v-4-3", "zb-v-4-6", "interleaved-4-6")
@pytest.mark.parametrize(("kind", "ranks", "microbatches"), list(schedules()))
def test_every_schedule_is_the_one_process_run(kind: str, ranks: int, microbatches: int) -> None:
    assert_parity(ranks, config(dict(pipeline=ranks), kind, microbatches))


def products() -> Iterator[Any]:
    """(ranks, parallel, schedule): with data, each tensor mode, and what weights may do in a step."""
    weights = dict(weights="step", gathered="keep")
    cases = {
        "data": (4, dict(data=2, pipeline=2), "interleaved"),
        "1d sequence sharded": (4, dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True)), "1f1b"),
        "1d": (4, dict(pipeline=2, tensor=dict(size=2)), "zb-h1"),
        "2d step": (8, dict(pipeline=2, tensor=dict(mode="2d", size=4, **weights)), "zb-h1"),
        "2d v": (8, dict(pipeline=2, tensor=dict(mode="2d", size=4)), "zb-v"),
        "2.5d": (4, dict(pipeline=2, tensor=dict(mode="2.5d", size=2, depth=2)), "1f1b"),
        "3d": (8, dict(pipeline=2, tensor=dict(mode="3d", shape=(2, 1, 2))), "interleaved"),
        "3d step": (8, dict(pipeline=2, tensor=dict(mode="3d", shape=(2, 1, 2), **weights)), "zb-v"),
        "outside": (4, dict(data=2, pipeline=2, rank_order=("data", "tensor", "sequence", "pipeline")), "1f1b"),
    }
    for name, case in cases.items():
        few = name in ("data", "1d sequence sharded", "2.5d")
        yield pytest.param(*case, id=name, marks=() if few else pytest.mark.long)


@pytest.mark.rest("1d", "data", "2.5d")
@pytest.mark.parametrize(("world", "parallel", "kind"), list(products()))
def test_products_with_data_and_tensor_parallelism(world: int, parallel: dict[str, Any], kind: str) -> None:
    # samples of a microbatch must divide over data ranks and the axes that split a batch
    settings = config(parallel, kind, 3, model=dict(num_heads=4), train=dict(global_batch_size=24))
    traces = run_plan(world, settings, STEPS)
    for trace in traces:
        assert_same_run(trace, _alone_24(), **EXACT)
        assert_same_numbers(trace, _alone_24())


@cache
def _alone_24() -> Trace:
    return run_plan(1, config({}, train=dict(global_batch_size=24)), STEPS)[0]


VARIANTS: dict[str, dict[str, Any]] = {
    "untied": dict(tie_embeddings=False),
    "full checkpoint": dict(activation_checkpoint="full"),
    "selective checkpoint": dict(activation_checkpoint="selective"),
    "loss terms": dict(label_smoothing=0.1, z_loss=1e-2),
}


@pytest.mark.rest("selective checkpoint-zb-v", "full checkpoint-zb-v", "loss terms-zb-v")
@pytest.mark.parametrize("kind", [pytest.param("1f1b", marks=pytest.mark.long), "zb-v"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_of_the_model(name: str, kind: str) -> None:
    assert_parity(2, config(dict(pipeline=2), kind, 4, model=VARIANTS[name]), **VARIANTS[name])


@pytest.mark.parametrize("kind", ["zb-h1", *long("1f1b", "interleaved")])
def test_without_shared_memory(kind: str) -> None:
    """Through c10d, where receives are posted ahead of the actions that need them."""
    assert_parity(4, config(dict(pipeline=4), kind, 6, comm=dict(shared_memory=False)))


def test_any_split_is_the_same_run() -> None:
    settings = config(dict(pipeline=dict(size=4, split=[1, 2, 2, 3])), "1f1b", 4)
    traces = run_plan(4, settings, STEPS)
    for trace in traces:
        assert_same_run(trace, reference(), **EXACT)


def test_a_broken_sum_of_tied_gradients_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("colossus.gradients.reduction.TiedGradients.sum", lambda self: None)
    with pytest.raises(AssertionError, match="step 2"):
        assert_parity(2, config(dict(pipeline=2), "1f1b", 4))


def test_a_tied_weight_counted_twice_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    from colossus.engine import initialize

    real = initialize.GradientNorm
    monkeypatch.setattr(initialize, "GradientNorm", lambda params, context, elsewhere: real(params, context))
    with pytest.raises(AssertionError, match="step 2"):
        assert_parity(2, config(dict(pipeline=2), "1f1b", 4))


# -- what ranks hold ------------------------------------------------------------------------------------------


def _watched_peaks(rank: int, settings: dict[str, Any]) -> int:
    peaks: list[int] = []
    real = Executor.run

    def run(self: Executor, *args: Any) -> StepTotals:
        totals = real(self, *args)
        peaks.append(totals.peak_in_flight)
        return totals

    Executor.run = run  # type: ignore[method-assign]
    engine = colossus.initialize(settings)
    engine.train_step(batch_of(0, settings["model"], BATCH))
    engine.close()
    return peaks[0]


@pytest.mark.parametrize(("ranks", "microbatches"), [(4, 6), pytest.param(4, 3, marks=pytest.mark.long)])
def test_activations_in_flight_of_1f1b(ranks: int, microbatches: int) -> None:
    settings = config(dict(pipeline=ranks), "1f1b", microbatches)
    peaks = run_ranks(ranks, _watched_peaks, settings, with_context=False)
    assert peaks == [min(ranks - rank, microbatches) for rank in range(ranks)]


def _saved_microbatches(rank: int, settings: dict[str, Any]) -> int:
    """The most microbatches of which anything is kept for backward, by the saved tensors themselves."""
    engine = colossus.initialize(settings)
    alive: dict[int, int] = {}
    most = 0

    class Saved:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal most
            self.tensor, self.microbatch = tensor, engine.context.rng.microbatch
            alive[self.microbatch] = alive.get(self.microbatch, 0) + 1
            most = max(most, sum(count > 0 for count in alive.values()))

        def __del__(self) -> None:
            alive[self.microbatch] -= 1

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        engine.train_step(batch_of(0, settings["model"], BATCH))
    assert not any(alive.values())
    engine.close()
    return most


def test_saved_tensors_in_flight_of_1f1b() -> None:
    settings = config(dict(pipeline=4), "1f1b", 6)
    assert run_ranks(4, _saved_microbatches, settings, with_context=False) == [4, 3, 2, 1]


def _numbers_held(rank: int, settings: dict[str, Any]) -> tuple[int, list[str]]:
    engine = colossus.initialize(settings)
    names = list(dict(engine.model.named_parameters()))
    total = sum(parameter.numel() for parameter in engine.model.parameters())
    engine.close()
    return total, names


def test_a_rank_holds_its_stage_only_and_the_tied_weight_by_its_first_name() -> None:
    (first, first_names), (second, second_names) = run_ranks(
        2, _numbers_held, config(dict(pipeline=2)), with_context=False
    )
    # the state dict has the tied weight under both of its names, and both stages hold it
    assert first + second == sum(value.numel() for value in reference().start.values())
    assert set(first_names) & set(second_names) == {"embedding.weight"}


# -- evaluation, state ----------------------------------------------------------------------------------------


def _evaluate(rank: int, settings: dict[str, Any], sizes: list[int]) -> list[tuple[float, int]]:
    engine = colossus.initialize(settings)
    out = []
    for step, size in enumerate(sizes):
        engine.train_step(batch_of(step, settings["model"], BATCH))
        result = engine.eval_step(batch_of(50 + step, settings["model"], size))
        out.append((result.loss, result.tokens))
    assert engine.model.training
    engine.close()
    return out


@pytest.mark.parametrize("kind", [pytest.param("1f1b", marks=pytest.mark.long), "zb-v"])
def test_evaluation_between_steps_on_batches_of_any_size(kind: str) -> None:
    sizes = [BATCH, 5, 1, 9]
    wanted = _run_one(_evaluate, config({}), sizes)
    for got in run_ranks(4, _evaluate, config(dict(pipeline=4), kind, 6), sizes, with_context=False):
        for (loss, tokens), (other, count) in zip(got, wanted, strict=True):
            assert relative(loss, other) < 1e-10
            assert tokens == count


def _run_one(body: Any, *args: Any) -> Any:
    return run_ranks(1, body, *args, with_context=False)[0]


def _load_and_step(rank: int, settings: dict[str, Any], state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    engine = colossus.initialize(settings)
    load_full_state_dict(engine.model, state, engine.context)
    back = full_state_dict(engine.model, engine.context)
    assert list(back) == list(state)
    assert all(torch.equal(back[name], state[name]) for name in state)
    with pytest.raises(ValueError, match=r"missing \['head.nothing'\]|not in the model \['head.nothing'\]"):
        load_full_state_dict(engine.model, {**state, "head.nothing": torch.zeros(1)}, engine.context)
    engine.close()
    return back


def test_state_of_one_plan_loads_under_any_other() -> None:
    state = run_plan(2, config(dict(pipeline=2), "zb-v", 2), STEPS)[0].end
    for world, plan, kind in ((1, {}, "1f1b"), (4, dict(pipeline=4), "1f1b"), (4, dict(pipeline=2, data=2), "zb-v")):
        run_ranks(world, _load_and_step, config(plan, kind), state, with_context=False)


# -- a user's own schedule --------------------------------------------------------------------------------------


def test_a_users_own_schedule_runs() -> None:
    """One that runs its backwards in another order than its forwards."""

    def backwards_last_first(stages: int, microbatches: int) -> Actions:
        out: Actions = []
        for stage in range(stages):
            forwards = [Action("forward", stage, index) for index in range(microbatches)]
            backwards = [Action("backward", stage, index) for index in reversed(range(microbatches))]
            out.append([*forwards, *backwards])
        return out

    for more in ({}, dict(comm=dict(shared_memory=False))):
        settings = config(dict(pipeline=4), "1f1b", 3, **more)
        settings["schedule"]["type"] = backwards_last_first
        assert_parity(4, settings)
