"""The table of user models and plans: every cell equals plain torch, or is refused in the words that it should be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from helpers.ranks import run_ranks
from helpers.user_models.cases import BATCH, Kit, PlainKit, UserModel
from torch import Tensor

import colossus
from colossus.state.model_state_dict import full_state_dict

LR = 0.05
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Plan:
    world: int
    parallel: dict[str, Any]
    schedule: dict[str, Any]


def _plan(world: int, *, schedule: str | None = None, **parallel: Any) -> Plan:
    return Plan(world, parallel, dict(type=schedule, microbatches=2) if schedule else {})


def _tensor(mode: str, size: int, **more: Any) -> dict[str, Any]:
    return dict(mode=mode, size=size, **more)


PLANS = {
    "one process": _plan(1),
    "microbatches 2": Plan(1, {}, dict(microbatches=2)),
    "data 2": _plan(2, data=2),
    "data 2 zero 1": _plan(2, data=2, zero=1),
    "data 2 zero 3": _plan(2, data=2, zero=3),
    "data 2 expert 2": _plan(2, data=2, expert=2),
    "1d 2": _plan(2, tensor=_tensor("1d", 2)),
    "1d 4": _plan(4, tensor=_tensor("1d", 4)),
    "1d 2 sequence_sharded": _plan(2, tensor=_tensor("1d", 2, sequence_sharded=True)),
    "pipeline 2 1f1b": _plan(2, pipeline=2, schedule="1f1b"),
    "pipeline 2 zb-h1": _plan(2, pipeline=2, schedule="zb-h1"),
    "sequence 2": _plan(2, sequence=2),
    "sequence 4": _plan(4, sequence=4),
    "sequence 2 ulysses": _plan(2, sequence=dict(size=2, mode="ulysses")),
    "sequence 4 ulysses": _plan(4, sequence=dict(size=4, mode="ulysses")),
    "sequence 2 x 1d 2": _plan(4, sequence=2, tensor=_tensor("1d", 2)),
    "2d 4": _plan(4, tensor=_tensor("2d", 4)),
    "2.5d 4 (2,1,2)": _plan(4, tensor=_tensor("2.5d", 4, shape=(2, 1, 2))),
    "3d 4 (2,1,2)": _plan(4, tensor=_tensor("3d", 4, shape=(2, 1, 2))),
    "data 2 x 1d 2": _plan(4, data=2, tensor=_tensor("1d", 2)),
    "pipeline 2 x 1d 2 zb-h1": _plan(4, pipeline=2, tensor=_tensor("1d", 2), schedule="zb-h1"),
    "pipeline 2 x data 2 1f1b": _plan(4, pipeline=2, data=2, schedule="1f1b"),
    "2.5d 8": _plan(8, tensor=_tensor("2.5d", 8, depth=2)),
    "3d 8": _plan(8, tensor=_tensor("3d", 8)),
    "3d 8 (1,2,4)": _plan(8, tensor=_tensor("3d", 8, shape=(1, 2, 4))),
}


@dataclass
class Run:
    """Losses, gradients of each step, and weights at the start and the end: of full shapes, by logical name."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    start: dict[str, Tensor]
    end: dict[str, Tensor]


def train(model: UserModel, plan: Plan) -> Run:
    """On this rank of the plan."""
    config = dict(
        parallel=plan.parallel,
        schedule=plan.schedule,
        optimizer=dict(type="SGD", lr=LR),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3),
        comm=dict(timeout_seconds=20.0),
        device="cpu",
    )
    engine = colossus.initialize(config, model=lambda: model.make(Kit), loss_fn=model.loss)
    try:
        start = full_state_dict(engine.model, engine.context)
        part = BATCH // engine.context.size("data")
        first = engine.context.index("data") * part
        losses, gradients = [], []
        for step in range(model.steps):
            batch = _samples(model.batch(step), slice(first, first + part))
            with model.around():
                losses.append(engine.train_step(batch).loss)
            gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
        return Run(losses, gradients, start, full_state_dict(engine.model, engine.context))
    finally:
        engine.close()


def _samples(value: Any, which: slice) -> Any:
    if isinstance(value, dict):
        return {key: _samples(item, which) for key, item in value.items()}
    return value[which]


def train_plainly(model: UserModel, start: dict[str, Tensor], microbatches: int = 1) -> Run:
    """The oracle: plain torch, from these weights; of M microbatches the m-th has every M-th sample, from m on."""
    net = model.make(PlainKit).double()
    names = dict(net.named_parameters()).keys() | dict(net.named_buffers()).keys()
    net.load_state_dict({name: value for name, value in start.items() if name in names}, strict=False)
    missing = names - start.keys() - (dict(net.named_buffers()).keys() - net.state_dict().keys())
    assert not missing, f"{model.name}: the plain twin has {sorted(missing)}, ours not"
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=LR)
    losses, gradients = [], []
    for step in range(model.steps):
        optimizer.zero_grad()
        ends = []
        for first in range(microbatches):
            batch = _samples(model.batch(step), slice(first, None, microbatches))
            with model.around():
                total, count = model.loss(net(batch["inputs"]), batch)
                total.backward()
            ends.append((total.detach(), count))
        total, count = (sum(column) for column in zip(*ends, strict=True))
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter.grad /= count
        losses.append(float(total / count))
        gradients.append({name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None})
        optimizer.step()
    end = {name: value.detach().clone() for name, value in net.state_dict().items()}
    return Run(losses, gradients, start, end)


def difference(mine: Run, twin: Run) -> str:
    """What differs, in words; empty for nothing."""
    for name, value in twin.start.items():
        if not torch.equal(mine.start[name], value):
            return f"{name} starts differently"
    for step in range(len(twin.losses)):
        if not abs(mine.losses[step] - twin.losses[step]) <= TOLERANCE * max(1.0, abs(twin.losses[step])):
            return f"loss of step {step + 1}: {mine.losses[step]!r}, plain torch {twin.losses[step]!r}"
        words = _first_gap(f"gradient of step {step + 1}", mine.gradients[step], twin.gradients[step])
        if words:
            return words
    return _first_gap("at the end", mine.end, {name: x for name, x in twin.end.items() if name in mine.end})


def _first_gap(what: str, mine: dict[str, Tensor], other: dict[str, Tensor]) -> str:
    if mine.keys() != other.keys():
        return f"{what}: {sorted(mine.keys() ^ other.keys())} on one side only"
    for name, value in other.items():
        gap, size = ((x.abs().max().item() if x.numel() else 0.0) for x in (mine[name] - value, value))
        if not gap <= TOLERANCE * max(1.0, size):
            return f"{what}: {name} differs by {gap:.2g}"
    return ""


def _cell(model: UserModel, plan: Plan, twin: Run | None) -> tuple[str, str]:
    """How the cell ends on this rank: equal, wrong, or the type of an exception; and words."""
    try:
        run = train(model, plan)
        words = difference(run, twin) if twin is not None else ""
    except Exception as error:
        return type(error).__name__, "\n".join([str(error), *getattr(error, "__notes__", ())])
    return ("wrong", words) if words else ("equal", "")


def twins(models: Sequence[UserModel], microbatches: int = 1) -> dict[str, Run]:
    """The oracle of each model that one process can run, from the initial values that it has there."""

    possible = [model for model in models if model.refusal_under("one process") is None]

    def body(rank: int) -> dict[str, Run]:
        return {
            model.name: train_plainly(model, train(model, PLANS["one process"]).start, microbatches)
            for model in possible
        }

    return run_ranks(1, body, with_context=False)[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Cell:
    """One model under one plan.

    Attributes:
        outcome: ``equal``; ``refused`` or ``differs`` as it should; or what is not as it should be.
        words: of the located_error, or of the difference.
    """

    model: str
    plan: str
    outcome: str
    words: str

    @property
    def holds(self) -> bool:
        return self.outcome in ("equal", "refused", "differs")


def fill(models: Sequence[UserModel], plans: Sequence[str], oracle: dict[str, Run]) -> Iterator[Cell]:
    """The cells of these models and plans.

    A plan's cells share one group of ranks, but for those of a pipeline that are refused: there the ranks of other
    stages are left waiting, and the group is of no use afterwards.
    """
    for plan in plans:
        alone = [model for model in models if PLANS[plan].parallel.get("pipeline") and model.refusal_under(plan)]
        together = [model for model in models if model not in alone]
        for chosen in (together, *([model] for model in alone)):

            def body(rank: int, chosen: Sequence[UserModel] = chosen) -> list[tuple[str, str]]:
                return [_cell(model, PLANS[plan], oracle.get(model.name)) for model in chosen]

            ranks = run_ranks(PLANS[plan].world, body, with_context=False) if chosen else []
            for index, model in enumerate(chosen):
                yield judge(model, plan, [ends[index] for ends in ranks])


def judge(model: UserModel, plan: str, ends: Sequence[tuple[str, str]]) -> Cell:
    """One cell from how it ended on all ranks. Where one refuses, its neighbours may only lose their connection."""
    expected = model.refusal_under(plan)
    kinds = {kind for kind, _ in ends}
    refusals = [words for kind, words in ends if kind == "ValueError"]
    by_design = model.difference_under(plan)
    if kinds == {"equal"}:
        outcome = "equal" if expected is None and by_design is None else f"equal, not {expected or by_design!r}"
        return Cell(model.name, plan, outcome, "")
    if "wrong" in kinds:
        words = next(words for kind, words in ends if kind == "wrong")
        return Cell(model.name, plan, "wrong" if by_design is None else "differs", words)
    if refusals:
        refusal = refusals[0]
        is_expected = expected is not None and expected in refusal
        return Cell(model.name, plan, "refused" if is_expected else "refused in other words", refusal)
    return Cell(model.name, plan, "failed", next(f"{kind}: {words}" for kind, words in ends if kind != "equal"))
