"""Models that write to their input in place: the caller's batch, the loss and other ranks never see it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus

WIDTH, SAMPLES = 6, 12


class Written(nn.Sequential):
    """Its first block writes."""

    def __init__(self) -> None:
        super().__init__(First(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class First(nn.Module):
    def forward(self, inputs: Any) -> Tensor:
        x: Tensor = inputs["x"]
        x -= 0.25
        x[:, 0] = 0.5
        return x


def to_target(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (y - batch["target"]).square().sum(), y.shape[0]


def to_input(y: Tensor, batch: Any) -> tuple[Tensor, int]:
    return (y - batch["inputs"]["x"]).square().sum(), y.shape[0]


def batch_of(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    x, target = (torch.randn(SAMPLES, WIDTH, generator=generator, dtype=dtype) for _ in range(2))
    return {"inputs": {"x": x}, "target": target}


def _train(rank: int, parallel: dict[str, Any], schedule: dict[str, Any], loss: Any, model: Any, dtype: Any) -> Any:
    settings = dict(
        parallel=parallel,
        schedule=schedule,
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=model, loss_fn=loss)
    batch = batch_of(dtype)
    before = batch["inputs"]["x"].clone()
    count, index = engine.context.size("data"), engine.context.index("data")
    own = {"inputs": {"x": batch["inputs"]["x"].chunk(count)[index]}, "target": batch["target"].chunk(count)[index]}
    numbers = [engine.eval_step(own).loss]
    for _ in range(3):  # the same tensors again, as a loop over a small set of them does
        result = engine.train_step(own)
        numbers += [result.loss, result.grad_norm]
    engine.close()
    assert torch.equal(batch["inputs"]["x"], before)
    return numbers


PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "microbatches": (1, {}, dict(microbatches=3)),
    "data": (2, dict(data=2), {}),
    "1f1b": (2, dict(pipeline=2), dict(type="1f1b", microbatches=3)),
    "zb-v": (2, dict(pipeline=2), dict(type="zb-v", microbatches=3)),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_is_the_one_process_run(name: str, dtype: torch.dtype) -> None:
    world, parallel, schedule = PLANS[name]
    alone = run_ranks(1, _train, {}, {}, to_target, Written, dtype, with_context=False)[0]
    for numbers in run_ranks(world, _train, parallel, schedule, to_target, Written, dtype, with_context=False):
        assert numbers == pytest.approx(alone, rel=1e-10)


class Passing(nn.Sequential):
    """Its first block passes the input on, and a later one writes to it."""

    def __init__(self) -> None:
        super().__init__(Kept(), Kept(), Kept(writes=True), Last())


class Kept(nn.Module):
    def __init__(self, writes: bool = False) -> None:
        super().__init__()
        self.linear, self.writes = nn.Linear(WIDTH, WIDTH), writes

    def forward(self, value: Any) -> Any:
        y = self.linear(value.get("y", value["x"]).clone())
        if self.writes:
            value["x"][:, 1:].mul_(2.0)
        return {"x": value["x"].view(-1, WIDTH), "y": y}


class Last(nn.Module):
    def forward(self, value: Any) -> Tensor:
        return value["y"] * value["x"]


def _refused(rank: int, parallel: dict[str, Any], schedule: str, model: Any, mode: Any) -> None:
    """By a step, and by an evaluation before any step."""
    settings = dict(
        parallel=parallel,
        schedule=dict(type=schedule, microbatches=3),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=5.0),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=model, loss_fn=to_input)
    count, index = engine.context.size("data"), engine.context.index("data")
    own = {key: {"x": value["x"].chunk(count)[index]} for key, value in batch_of().items() if key == "inputs"}
    if mode is None:
        engine.train_step(own)
    else:
        with mode():
            engine.eval_step(own)


REFUSED: dict[str, dict[str, Any]] = {
    "alone": {},
    "tensor": dict(tensor=2),
    "data": dict(data=2),
    "pipeline": dict(pipeline=2),
    "zb-v": dict(pipeline=2),
}


@pytest.mark.rest(
    "tensor-Written-no_grad",
    "tensor-Passing-no_grad",
    "data-Written-no_grad",
    "data-Passing-no_grad",
    "pipeline-Written-no_grad",
    "pipeline-Passing-no_grad",
    "zb-v-Passing-no_grad",
)
@pytest.mark.parametrize("mode", [None, torch.no_grad])
@pytest.mark.parametrize("model", [Written, Passing])
@pytest.mark.parametrize("name", ["alone", "tensor", "data", "pipeline", "zb-v"])
def test_a_loss_that_reads_what_the_model_writes_is_refused(name: str, model: Any, mode: Any) -> None:
    """In torch it would see the written values, which under a pipeline are on another rank."""
    words = r"the model writes to its input in place \(inputs\['x'\], float64\[\d+, 6\]\), and the loss function reads"
    world, schedule = 1 if name == "alone" else 2, name if name == "zb-v" else "1f1b"
    with pytest.raises(RankError, match=words):
        run_ranks(world, _refused, REFUSED[name], schedule, model, mode, with_context=False, timeout=30)


def _reads(rank: int) -> list[float]:
    """A loss that reads the input of a model that does not write to it, on another rank of a pipeline."""
    settings = dict(
        parallel=dict(pipeline=2),
        schedule=dict(microbatches=3),
        train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1),
        comm=dict(timeout_seconds=5.0),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=Reading, loss_fn=to_input)
    with torch.inference_mode():  # nothing is known of writes there
        losses = [engine.eval_step(batch_of()).loss]
    losses += [engine.train_step(batch_of()).loss for _ in range(2)]
    losses.append(engine.eval_step(batch_of()).loss)
    engine.close()
    return losses


def test_a_loss_may_read_an_input_that_nobody_writes() -> None:
    first, second = run_ranks(2, _reads, with_context=False, timeout=30)
    assert first == second
    assert len(set(first)) == 3


class Reading(nn.Sequential):
    """Writes nothing."""

    def __init__(self) -> None:
        super().__init__(Copied(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


class Copied(First):
    def forward(self, inputs: Any) -> Tensor:
        return super().forward({"x": inputs["x"].clone()})


def _copies(rank: int) -> list[bool]:
    """Whether the model is called with the caller's own memory, by step."""
    settings = dict(train=dict(global_batch_size=SAMPLES, precision="fp64", seed=1), device="cpu")
    engine = colossus.initialize(settings, model=Reading, loss_fn=to_input)
    seen: list[int] = []
    engine.model.register_forward_pre_hook(lambda _, args: seen.append(args[0]["x"].data_ptr()))
    batch = batch_of()
    for _ in range(3):
        engine.train_step(batch)
    return [address == batch["inputs"]["x"].data_ptr() for address in seen]


def test_nothing_is_copied_after_the_first_step_of_a_model_that_writes_nothing() -> None:
    assert run_ranks(1, _copies, with_context=False)[0] == [False, True, True]
