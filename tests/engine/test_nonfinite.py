"""Gradients that are not finite: every rank raises or skips, all know where it began, and training goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.messages import Messages
from helpers.ranks import run_ranks
from helpers.strategies import LocalSteps
from helpers.training import BATCH, batch_of, config_of
from torch import Tensor, nn

import colossus
from colossus.data_parallel.update import _skipped_where
from colossus.engine.nonfinite import NonFiniteGradients
from colossus.engine.optimizers import torch_optimizer
from colossus.state.model_state_dict import full_state_dict

STEPS, BAD = 4, 1
#: rank, parameter
Place = tuple[int, str]


class Faulty:
    """An engine whose gradients can be made worse on one rank, before any sum."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.engine = colossus.initialize(config)
        self._bad: set[str] = set()
        computed = {stored: param for param, stored in self.engine.store._stored_as.items()}
        for name, stored in self.engine.model.named_parameters():
            param = computed.get(stored, stored)
            # before the hooks of the buckets; one on the gradient itself would not be deferred by zero-bubble schedules
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._spoil(param, name))

    def _spoil(self, param: nn.Parameter, name: str) -> None:
        if name in self._bad and param.grad is not None:
            param.grad.mul_(float("nan"))

    def step(self, step: int, places: Sequence[Place] = ()) -> Any:
        """Train on the batch of ``step``, with gradients that are not finite at these places."""
        index, count = self.engine.context.index("data"), self.engine.context.size("data")
        part = BATCH // count
        batch = {key: value[index * part : (index + 1) * part] for key, value in batch_of(step).items()}
        self._bad = {name for rank, name in places if rank == self.engine.context.rank}
        assert self._bad <= dict(self.engine.model.named_parameters()).keys()
        try:
            return self.engine.train_step(batch)
        finally:
            self._bad = set()

    def state(self) -> dict[str, Tensor]:
        """Weights of the whole model, and the optimizer's state of this rank."""
        tensors = full_state_dict(self.engine.model, self.engine.context)
        for number, param in enumerate(self.engine.model.parameters()):
            for key, value in self.engine.optimizer.state.get(param, {}).items():
                tensors[f"{number}.{key}"] = torch.as_tensor(value)
        return {name: value.detach().clone() for name, value in tensors.items()}

    def leave_out_update(self) -> Callable[[], None]:
        """Have the strategy update nothing. Returns what undoes that."""
        strategy = self.engine.strategy
        strategy.update = lambda optimizer: None  # type: ignore[method-assign]
        return lambda: vars(strategy).pop("update")


def settings(parallel: dict[str, Any], kind: str = "1f1b", **train: Any) -> dict[str, Any]:
    microbatches = 2 if parallel.get("pipeline", 1) > 1 else 1
    train = {"on_nonfinite": "skip", **train}
    schedule, rate = dict(type=kind, microbatches=microbatches), dict(type="cosine", warmup_steps=2)
    return config_of(parallel, STEPS, "fp64", schedule=schedule, train=train, lr_schedule=rate)


def _same(mine: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert mine.keys() == other.keys()
    for name, value in other.items():
        assert torch.equal(mine[name], value), name


def _skip_and_raise(rank: int, parallel: dict[str, Any], kind: str, places: list[Place]) -> Any:
    """One step has bad gradients: skipped, it is as if it had never updated anything; then the same, raised."""
    config = settings(parallel, kind)
    with Messages() as messages:
        faulty = Faulty(config)
        results = [faulty.step(step, places if step == BAD else ()) for step in range(STEPS)]
    assert [result.skipped for result in results] == [step == BAD for step in range(STEPS)]
    assert [result.num_skipped for result in results] == [0, 1, 1, 1]
    assert all(result.grad_norm < 1e6 for step, result in enumerate(results) if step != BAD)
    skipped = faulty.state()
    faulty.engine.close()

    plain = Faulty(settings(parallel, kind))
    for step in range(STEPS):
        undo = plain.leave_out_update() if step == BAD else lambda: None
        result = plain.step(step)
        undo()
        # what was lost is the update: data, schedule and random numbers went on
        assert (result.lr, result.loss) == (results[step].lr, results[step].loss)
    _same(skipped, plain.state())
    plain.engine.close()

    config["train"]["on_nonfinite"] = "raise"
    faulty = Faulty(config)
    faulty.step(0)
    before = faulty.state()
    with pytest.raises(NonFiniteGradients) as raised:
        faulty.step(BAD, places)
    assert raised.value.step == BAD + 1
    _same(faulty.state(), before)
    faulty.step(2)  # a loop that caught it goes on
    assert faulty.engine.completed_steps == 3
    faulty.engine.close()
    return messages.lines, str(raised.value)


UP, NORM, TIED = "blocks.0.mlp.up.weight", "blocks.1.mlp_norm.weight", "embedding.weight"
PIPELINE = dict(data=2, pipeline=2)
#: ranks, parallel, schedule, places of bad gradients: named are they, the last in the model's order first
CASES: dict[str, tuple[int, dict[str, Any], str, list[Place]]] = {
    # the head's part of the embedding's gradient: rank 3 has it, and ranks 0, 1 and 2 get it by the sums
    "1f1b": (4, PIPELINE, "1f1b", [(3, NORM), (0, UP), (3, TIED)]),
    "zb-h1": (4, PIPELINE, "zb-h1", [(1, UP), (1, "positions.weight")]),
    "1d": (4, dict(data=2, tensor=dict(size=2)), "1f1b", [(2, UP)]),
    # whole on every rank, the same gradient without a sum: the norm counts that of rank 0, but sees all
    "not counted": (2, dict(tensor=dict(size=2)), "1f1b", [(1, NORM)]),
    "zero": (2, dict(data=2, zero=3), "1f1b", [(1, UP)]),
}


@pytest.mark.parametrize("name", but(("1d", "zb-h1"), CASES))
def test_all_ranks_skip_together(name: str) -> None:
    world, parallel, kind, places = CASES[name]
    results = run_ranks(world, _skip_and_raise, parallel, kind, places, with_context=False)
    what = f"step 2: the gradient of {', '.join(name for _, name in places)} is not finite, the loss is finite"
    assert results[0][0] == [f"{what}: the step is skipped (1 in a row, train.max_skips = 10)"]
    assert not any(lines for lines, _ in results[1:])
    (words,) = {words for _, words in results}
    assert words.startswith(f"{what}. The step changed nothing. train.on_nonfinite")


def _bad_loss(rank: int) -> str:
    faulty = Faulty(settings(dict(data=2, pipeline=2), on_nonfinite="raise"))
    loss_fn = faulty.engine._stages.loss_fn
    faulty.step(0)
    if rank == 3:
        faulty.engine._stages.loss_fn = lambda out, batch: (
            loss_fn(out, batch)[0] * float("inf"),
            loss_fn(out, batch)[1],
        )
    with pytest.raises(NonFiniteGradients) as raised:
        faulty.step(1)
    faulty.engine.close()
    return str(raised.value)


def test_a_loss_that_is_not_finite_is_told_on_all_ranks() -> None:
    (words,) = set(run_ranks(4, _bad_loss, with_context=False))
    assert words.startswith("step 2: the gradient of norm.bias, norm.weight, ")
    assert "is not finite, the loss is inf. The step changed nothing" in words


# -- several in a row -----------------------------------------------------------------------------------------


def test_too_many_in_a_row() -> None:
    faulty = Faulty(settings({}, max_skips=2))
    bad = [(0, "norm.bias")]
    with Messages() as messages:
        for step, places in enumerate(([], bad, bad, [], bad, bad)):
            faulty.step(step % STEPS, places)
        with pytest.raises(NonFiniteGradients, match=r"is step 3 of that kind in a row, and train\.max_skips = 2; "):
            faulty.step(3, bad)
    assert [line.partition("skipped ")[2] for line in messages.lines] == [
        f"({number} in a row, train.max_skips = 2)" for number in (1, 2, 1, 2)
    ]
    faulty.engine.close()


# -- other strategies -----------------------------------------------------------------------------------------


def _local_steps(rank: int) -> tuple[list[str], list[bool]]:
    """Replica 1 skips its second step; both take part in the averages."""
    faulty = Faulty(settings(dict(data=2, strategy=dict(type=LocalSteps, every=2))))
    with Messages() as messages:
        results = [faulty.step(step, [(1, "norm.bias")] if step == BAD else ()) for step in range(STEPS)]
    weights = torch.cat([param.detach().flatten() for param in faulty.engine.model.parameters()])
    assert weights.isfinite().all()
    faulty.engine.close()

    plain = Faulty(settings(dict(data=2, strategy=dict(type=LocalSteps, every=2))))
    for step in range(STEPS):
        undo = plain.leave_out_update() if (rank, step) == (1, BAD) else lambda: None
        plain.step(step)
        undo()
    assert torch.equal(weights, torch.cat([param.detach().flatten() for param in plain.engine.model.parameters()]))
    plain.engine.close()
    return messages.lines, [result.skipped for result in results]


def test_a_replica_skips_alone_under_an_inexact_strategy() -> None:
    (lines0, skipped0), (lines1, skipped1) = run_ranks(2, _local_steps, with_context=False)
    assert (lines0, skipped0) == ([], [False] * STEPS)
    assert skipped1 == [False, True, False, False]
    (line,) = lines1
    assert "norm.bias is not finite" in line


# -- on an accelerator ----------------------------------------------------------------------------------------


def late(faulty: Faulty) -> None:
    """The watch's numbers come as from an accelerator."""
    watch: Any = faulty.engine.run.gradient_watch
    watch._is_late, add = True, watch._flags.add
    watch._flags.add = lambda flags, numbers: max(1, add(flags, numbers))


def test_where_nothing_waits_the_report_is_one_step_late() -> None:
    bad = [(0, "blocks.0.mlp.up.bias")]
    faulty = Faulty(settings({}))
    late(faulty)
    with Messages() as messages:
        results = [faulty.step(0), faulty.step(1, bad)]
        assert not messages.lines
        results += [faulty.step(2), faulty.step(3, bad)]  # the last of train.steps is waited for
    assert [result.skipped for result in results] == [False, True, False, True]
    assert [result.num_skipped for result in results] == [0, 1, 1, 2]
    message = "the gradient of blocks.0.mlp.up.bias is not finite, the loss is finite: the step is skipped (1 in a row"
    assert [line[: 8 + len(message)] for line in messages.lines] == [f"step 2: {message}", f"step 4: {message}"]


BIAS = "blocks.0.mlp.up.bias"
RAISED = dict(on_nonfinite="raise")
#: ranks, plan, steps (from 0) with gradients that are not finite, more of ``train``, whether each step is saved
LOOPS: dict[str, tuple[int, dict[str, Any], list[int], dict[str, Any], bool]] = {
    "raised": (1, {}, [1], RAISED, False),
    "the last": (2, dict(data=2), [STEPS - 1], RAISED, False),
    "two in a row, fp16": (1, {}, [1, 2], RAISED | dict(precision="fp16", loss_scale=dict(init=2.0**-15)), False),
    "too many": (2, dict(data=2, zero=2), [0, 1, 2], dict(max_skips=1), False),
    "pipeline": (2, dict(pipeline=2), [0, 2], RAISED, False),
    "saved": (2, dict(data=2), [0, 2], RAISED, True),
    "saved, skipped": (1, {}, [1, 2], dict(max_skips=5), True),
}


def _loop(rank: int, is_late: bool, folder: Path, name: str) -> tuple[list[int], list[Any], dict[str, Tensor]]:
    """A loop that catches what is raised and goes on: the steps that were told of, what was saved, and the end."""
    _, parallel, bad, train, saves = LOOPS[name]
    config = settings(parallel, **train) | dict(checkpoint=dict(dir=str(folder), every=1, background=False))
    faulty, steps = Faulty(config), []
    engine = faulty.engine
    if is_late:
        late(faulty)
    saved = []
    for step in range(STEPS):
        places = [(rank, BIAS)] if step in bad and BIAS in dict(engine.model.named_parameters()) else ()
        try:
            faulty.step(step, places)
            if saves:
                engine.checkpoints.after_step()
                train_state = engine.run.gradient_watch.state_dict()
                saved.append((engine.completed_steps, train_state))
        except NonFiniteGradients as error:
            steps.append(error.step)
    assert engine.completed_steps == STEPS
    state = faulty.state() | {"skipped": torch.as_tensor(engine.run.gradient_watch.state_dict()["num_skipped"])}
    engine.close()
    return steps, saved, state


@pytest.mark.rest("pipeline", "too many", "saved, skipped", "the last")
@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_that_catches_it_trains_the_same_on_an_accelerator(name: str, tmp_path: Path) -> None:
    """The step counts, its batch and the next are used once, and a save says what is known on a CPU."""
    world, _, bad, _, _ = LOOPS[name]
    at_once, late = (
        run_ranks(world, _loop, is_late, tmp_path / str(is_late), name, with_context=False) for is_late in (False, True)
    )
    for mine, wanted in zip(late, at_once, strict=True):
        assert mine[:2] == wanted[:2]
        _same(mine[2], wanted[2])
        assert mine[2]["skipped"] == len(bad)


@pytest.mark.parametrize(
    "make", [partial(torch_optimizer, "AdamW"), partial(torch_optimizer, "SGD", momentum=0.9)], ids=["adamw", "sgd"]
)
def test_a_fused_optimizer_leaves_a_step_out_by_itself(make: Callable[..., torch.optim.Optimizer]) -> None:
    """As it does on an accelerator: torch's fused kernels on the CPU take the same attributes."""
    param = nn.Parameter(torch.arange(5.0))
    optimizer = make([param], lr=0.1)
    param.grad = torch.ones(5)
    optimizer.step()
    before = {key: value.clone() for key, value in [("param", param.detach()), *optimizer.state[param].items()]}
    for is_infinite, changes in ((True, False), (False, True)):
        with _skipped_where(optimizer, torch.tensor(is_infinite)):
            optimizer.step()
        after = {"param": param.detach(), **optimizer.state[param]}
        assert all(torch.equal(after[key], value) is not changes for key, value in before.items())
    assert not hasattr(optimizer, "found_inf")
