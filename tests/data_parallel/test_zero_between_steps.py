"""ZeRO and what a user's code does around steps, and to parameters: as without it, or refused in words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus.engine.engine import Engine
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

STEPS = 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.scale = nn.Parameter(torch.full((6,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Blocks; a gate that one data rank uses, and complex numbers that none does."""

    #: the data rank that uses the gate, or None for all
    gated_on: int | None = None
    rank = 0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), Block()])
        self.gate = nn.Linear(6, 6)
        self.phases = nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.gated_on in (None, self.rank):
            x = x + self.gate(x)
        return self.head(x)


class Leaking(Block):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), self.scale


class Returned(Net):
    """Uses a parameter that has left its block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Leaking()])

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.blocks[0](x)
        return self.head(x * scale)


def batch(engine: Engine, step: int) -> tuple[Tensor, Tensor]:
    index, size = engine.context.index("data"), engine.context.size("data")
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    x = x.chunk(size)[index]
    return x, x[:, :4].clone()


def squared(outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
    return (outputs - batch[1]).square().sum(), len(outputs)


def start(parallel: dict[str, Any], model: type[nn.Module] = Net) -> Engine:
    return colossus.initialize(
        dict(
            parallel=parallel,
            optimizer=dict(type="SGD", lr=0.1, momentum=0.9),
            train=dict(global_batch_size=8, precision="fp64", seed=1, steps=STEPS),
            device="cpu",
        ),
        model=model,
        loss_fn=squared,
    )


# -- what a user does between steps ---------------------------------------------------------------------------


def backward_of_a_call(engine: Engine) -> None:
    engine.model(batch(engine, 7)[0]).square().sum().backward()


def write_to_data(engine: Engine) -> None:
    engine.evaluate_again = engine.eval_step(batch(engine, 8)).loss  # type: ignore[attr-defined]
    for param in engine.model.parameters():
        param.data.mul_(0.9)


def load_after_a_call(engine: Engine) -> None:
    engine.model(batch(engine, 7)[0])
    state = full_state_dict(engine.model, engine.context)
    load_full_state_dict(engine.model, {name: value * 0.9 for name, value in state.items()}, engine.context)


def halve_gradients(engine: Engine) -> None:
    """Once: hooks on what the modules hold between steps."""
    if not hasattr(engine, "hooked"):
        engine.hooked = [param.register_hook(lambda grad: grad * 0.5) for param in engine.model.parameters()]  # type: ignore[attr-defined]


def use_the_gate_on_one_rank(engine: Engine) -> None:
    Net.gated_on, Net.rank = 0, engine.context.index("data")


HABITS: list[Callable[[Engine], None]] = [
    backward_of_a_call, write_to_data, load_after_a_call, halve_gradients, use_the_gate_on_one_rank,
]  # fmt: skip


def run(parallel: dict[str, Any], habit: Callable[[Engine], None]) -> tuple[list[float], dict[str, Tensor]]:
    Net.gated_on = None
    engine = start(parallel)
    losses = []
    for step in range(STEPS):
        habit(engine)
        losses.append(engine.train_step(batch(engine, step)).loss)
        losses.append(engine.eval_step(batch(engine, 9)).loss)
    state = full_state_dict(engine.model, engine.context)
    engine.close()
    return losses, state


PLANS = [
    dict(data=2, zero=1),
    dict(data=2, zero=2),
    dict(data=2, zero=3),
    dict(data=2, zero=3, tensor=dict(weights="microbatch")),
]


def _differences(rank: int) -> list[str]:
    lines = []
    for habit in HABITS:
        losses, state = run(dict(data=2), habit)
        for parallel in PLANS:
            mine, own_state = run(parallel, habit)
            if mine != pytest.approx(losses, rel=1e-10):
                lines.append(f"{habit.__name__} under {parallel}: losses {mine}, not {losses}")
            for name, value in state.items():
                if not torch.allclose(own_state[name], value, rtol=1e-9, atol=1e-11):
                    lines.append(f"{habit.__name__} under {parallel}: {name}")
    return lines


@pytest.mark.long
def test_habits_around_steps_are_those_without_zero() -> None:
    for lines in run_ranks(2, _differences, with_context=False):
        assert lines == []


def _refused(rank: int) -> str:
    engine = start(dict(data=2, zero=3), Returned)
    with pytest.raises(ValueError, match="has freed it") as caught:
        engine.train_step(batch(engine, 0))
    return str(caught.value)


def test_a_parameter_that_is_used_outside_of_its_block_is_refused() -> None:
    """Its memory is freed: to read it would end the process."""
    for words in run_ranks(2, _refused, with_context=False):
        assert "blocks.0.scale" in words
        assert "block(x)" in words


def _copied(rank: int) -> None:
    for parallel in PLANS:
        engine = start(parallel)
        for habit in (write_to_data, backward_of_a_call):
            engine.train_step(batch(engine, 0))
            habit(engine)
            wanted, copied = full_state_dict(engine.model, engine.context), copy.deepcopy(engine.model)
            engine.train_step(batch(engine, 1))
            state = full_state_dict(copied, engine.context)
            assert all(torch.equal(state[name], value) for name, value in wanted.items()), (parallel, habit)
            with pytest.raises(ValueError, match=r"a copy of a model under parallel\.zero cannot be called"):
                copied(batch(engine, 0)[0])
        engine.close()


def test_a_copy_has_the_whole_parameters_of_its_moment() -> None:
    """Of plain modules, too, whose parameters a rank stores in rows; called it is refused, since nothing gathers it."""
    run_ranks(2, _copied, with_context=False)
