"""`initialize(optimizer=...)`: what the function gets, which learning rates follow, and what is refused in words."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus
from colossus.layers import PipelineBlock
from colossus.layout.split_parameter import local_shape

WIDTH = 4


class Net(nn.Module):
    """Blocks of which the second has no parameters, and the third a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.act, self.out = nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1)
        self.out.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.act(self.hidden(x)))

    def pipeline_blocks(self) -> list[Any]:
        return [PipelineBlock(self.hidden, self.hidden), PipelineBlock(self.act, self.act), self.out]


NAMES = ["hidden.weight", "hidden.bias", "out.weight"]


def square(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(batch)


def numbers(step: int = 0) -> Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def settings(**more: Any) -> dict[str, Any]:
    return dict(train=dict(global_batch_size=8, precision="fp64", steps=4), device="cpu") | more


def engine_of(optimizer: Any, **more: Any) -> Any:
    return colossus.initialize(settings(**more), model=Net, loss_fn=square, optimizer=optimizer)


def sgd(named: Any, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(named, lr=lr)


# -- what it gets ---------------------------------------------------------------------------------------------


def test_a_function_gets_the_trainable_parameters_with_their_names() -> None:
    seen: list[Any] = []

    def make(named: Any) -> torch.optim.Optimizer:
        seen.extend(named)
        return torch.optim.AdamW(named, lr=1e-3)

    engine = engine_of(make)
    assert [name for name, _ in seen] == NAMES
    assert all(param is dict(engine.model.named_parameters())[name] for name, param in seen)
    assert type(engine.optimizer) is torch.optim.AdamW
    assert engine.optimizer.param_groups[0]["param_names"] == NAMES
    assert engine.train_step(numbers()).lr == 1e-3


def by_name(named_parameters: Any, lr: float, slow: float) -> torch.optim.Optimizer:
    fast = [(name, param) for name, param in named_parameters if name.startswith("out")]
    others = [(name, param) for name, param in named_parameters if not name.startswith("out")]
    return torch.optim.SGD([{"params": fast}, {"params": others, "lr": slow}], lr=lr)


def test_a_function_in_the_config_may_take_the_names_too() -> None:
    config = settings(optimizer=dict(type=by_name, lr=0.3, slow=0.1))
    engine = colossus.initialize(config, model=Net, loss_fn=square)
    assert [group["param_names"] for group in engine.optimizer.param_groups] == [["out.weight"], NAMES[:2]]
    engine.train_step(numbers())
    assert [group["lr"] for group in engine.optimizer.param_groups] == pytest.approx([0.3, 0.1])


# -- what is refused -------------------------------------------------------------------------------------------


def of_the_model(named: Any) -> torch.optim.Optimizer:
    """Holds other parameters, two of them frozen."""
    return torch.optim.SGD(Net().requires_grad_(False).parameters(), lr=0.1)


REFUSED: dict[str, tuple[Any, str]] = {
    "nothing": (lambda named: None, r"optimizer=: the function returned a NoneType; it must return a torch"),
    "others": (of_the_model, r"it has parameters that it did not get"),
    "an optimizer": (sgd([nn.Parameter(torch.zeros(1))]), r"optimizer= is a SGD; pass a function of the list"),
    "empty": (lambda named: sgd([]), r"no parameter on any rank"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_optimizer_of_these_parameters_is_refused(case: str) -> None:
    factory, words = REFUSED[case]
    with pytest.raises(ValueError, match=words):
        engine_of(factory)


# -- stages and shards -----------------------------------------------------------------------------------------


def stages(rank: int, factory: Any) -> tuple[list[list[str]], list[float], float]:
    """Of a pipeline whose middle stage has no parameters."""
    plan = dict(parallel=dict(pipeline=dict(size=3, split=[1, 1, 1])), schedule=dict(microbatches=2))
    engine = engine_of(factory, **plan, lr_schedule=dict(type="linear", warmup_steps=2))
    result = engine.train_step(numbers())
    groups = engine.optimizer.param_groups
    engine.close()
    return [group.get("param_names", []) for group in groups], [group["lr"] for group in groups], result.lr


def of_matrices(named: Any) -> torch.optim.Optimizer:
    """Nothing of it is on the first stage; on the last there is an empty group."""
    chosen = [param for name, param in named if name == "out.weight"]
    assert named
    return torch.optim.SGD([{"params": chosen}, {"params": [], "lr": 0.05}] if chosen else [], lr=0.2)


def test_a_stage_without_parameters_steps_with_the_others() -> None:
    found = run_ranks(3, stages, partial(torch.optim.SGD, lr=0.2), with_context=False)
    assert [names for names, *_ in found] == [[NAMES[:2]], [[]], [["out.weight"]]]
    assert {lr for *_, lr in found} == {0.1}
    # a stage of which nothing is chosen is as one without parameters
    found = run_ranks(3, stages, of_matrices, with_context=False)
    assert [rates for _, rates, _ in found] == [pytest.approx([0.1, 0.025])] * 3
    assert {lr for *_, lr in found} == {0.1}


def test_all_ranks_are_told_what_is_wrong_on_one() -> None:
    def make(named: Any) -> Any:
        return sgd(named) if named[0][0].startswith("hidden") else None

    with pytest.raises(RankError) as error:
        run_ranks(3, stages, make, with_context=False)
    assert str(error.value).count("the function returned a NoneType; it must return a torch.optim.Optimizer") == 3
    assert "(rank 2)" in str(error.value)


def stored(rank: int) -> tuple[list[tuple[str, tuple[int, ...]]], str]:
    """Under ZeRO-3: what a function is given, and what it is told when it holds what a constructor made."""
    seen: list[tuple[str, tuple[int, ...]]] = []
    plan = settings(parallel=dict(data=2, zero=3))

    def make(named: Any) -> torch.optim.Optimizer:
        seen.extend((name, tuple(local_shape(param))) for name, param in named)
        return sgd(named)

    engine = colossus.initialize(plan, model=Net, loss_fn=square, optimizer=make)
    engine.train_step(numbers()[rank * 4 : rank * 4 + 4])
    assert engine.optimizer.param_groups[0]["params"] == engine.strategy.trained
    engine.close()
    computed: list[Tensor] = []

    def remembers() -> nn.Module:
        net = Net()
        computed.extend(param for param in net.parameters() if param.requires_grad)
        return net

    try:
        colossus.initialize(plan, model=remembers, loss_fn=square, optimizer=lambda named: sgd(computed))
    except ValueError as error:
        return seen, str(error)
    return seen, "nothing"


def test_under_zero_a_function_gets_what_a_rank_stores() -> None:
    for seen, told in run_ranks(2, stored, with_context=False):
        assert [name for name, _ in seen] == NAMES
        assert seen[0][1] == (2, 4)
        assert "a tensor of shape (4, 4) from the constructor is in a place where it gets no values" in told


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = colossus.layers.Linear(WIDTH, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.up(x))


def muon(rank: int) -> list[str]:
    """Told of a matrix of which the rank holds a shard; one that it has whole is fine."""
    told = []
    for count in (2, 1):
        try:
            engine = colossus.initialize(
                settings(parallel=dict(tensor=2)), model=Split, loss_fn=square,
                optimizer=lambda named, count=count: torch.optim.Muon(named[2 - count :], lr=0.1),
            )  # fmt: skip
        except ValueError as error:
            told.append(str(error))
        else:
            engine.train_step(numbers())
            engine.close()
            told.append("trained")
    return told


def test_an_optimizer_of_whole_matrices_is_refused_on_shards() -> None:
    for told in run_ranks(2, muon, with_context=False):
        assert "Muon computes something else with parts of a parameter than with the whole" in told[0]
        assert "this rank stores a part of up.weight" in told[0]
        assert "dict(type=.., whole=True)" in told[0]
        assert told[1] == "trained"
