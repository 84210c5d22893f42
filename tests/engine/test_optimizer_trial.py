"""Whether an optimizer works element by element is tried: what passes, what is refused, what cannot be tried."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.resumed import Listener
from helpers.whole_optimizers import PlainLAMB
from torch import Tensor, nn

import colossus
from colossus.engine.optimizer_trial import _gaps, trial_problem
from colossus.registry import OPTIMIZERS, TORCH_OPTIMIZERS


class Lion(torch.optim.Optimizer):
    """Chen et al. (2302.06675): the sign of a mean."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    mean = self.state[param].setdefault("mean", torch.zeros_like(param))
                    param.sub_(mean.lerp(param.grad, 0.1).sign() * group["lr"])
                    mean.lerp_(param.grad, 0.01)


class Slow(torch.optim.Optimizer):
    """Steps by another optimizer that it holds, whose state is its own."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base, self.state = base, base.state

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class WithStart(Lion):
    """Has its state, of the parameters' shapes, from the start on."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, lr)
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["mean"] = torch.full_like(param, 0.5)


class NeedsClosure(Lion):
    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()


class FactorsWhatIsLarge(PlainLAMB):
    """As Adafactor of several packages, whose small matrices are not factored."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    is_large = param.dim() > 1 and min(param.shape) >= 128
                    param.sub_(param.grad / (param.grad.norm(dim=0) if is_large else 1.0) * group["lr"])


def hf_adafactor(params: Any) -> torch.optim.Optimizer:
    transformers = pytest.importorskip("transformers")
    return transformers.optimization.Adafactor(params, lr=1e-2, relative_step=False, scale_parameter=False)


def in_groups(params: Any) -> torch.optim.Optimizer:
    """Of one class that takes a norm in the second group alone, as those that have Muon and AdamW in one do."""

    class Mixed(PlainLAMB):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for param in group["params"]:
                    if param.grad is not None:
                        norm = param.grad.norm() if group["by_norm"] else 1.0
                        param.data.sub_(group["lr"] * param.grad / norm)

    matrix, vector = params
    return Mixed([dict(params=[vector], by_norm=False), dict(params=[matrix], by_norm=True)])


#: name -> what makes it of a matrix and a vector, and whether it is refused
CASES: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "LAMB": (PlainLAMB, True),
    "Adafactor of transformers": (hf_adafactor, True),
    "Muon of torch": (lambda params: torch.optim.Muon(params[:1], lr=0.1), True),
    "Adafactor of torch": (torch.optim.Adafactor, True),
    "another with LAMB in it": (lambda params: Slow(PlainLAMB(params)), True),
    "one group of two": (in_groups, True),
    "what is large alone": (FactorsWhatIsLarge, True),
    "Lion": (Lion, False),
    "another with Lion in it": (lambda params: Slow(Lion(params)), False),
    "state from the start on": (WithStart, False),
    "fused AdamW": (lambda params: torch.optim.AdamW(params, fused=True), False),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.rest("Adafactor of transformers")  # which takes its time to import
def test_parts_and_the_whole(case: str) -> None:
    make, is_refused = CASES[case]
    params = [nn.Parameter(torch.randn(6, 4)), nn.Parameter(torch.randn(6))]
    optimizer = make(params)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    before = copy.deepcopy((params, optimizer.state_dict())), torch.random.get_rng_state()
    problem = trial_problem(optimizer, held)
    assert (problem is not None) == is_refused, problem
    assert "than with the whole" in (problem or "than with the whole")
    # the run's own is as it was
    (values, state), generator = before
    assert all(torch.equal(one, other) for one, other in zip(params, values, strict=True))
    assert str(optimizer.state_dict()) == str(state)
    assert torch.equal(torch.random.get_rng_state(), generator)


@pytest.mark.parametrize("name", TORCH_OPTIMIZERS)
def test_torchs_by_name_work_element_by_element(name: str) -> None:
    """None of these is tried in a run."""
    param = nn.Parameter(torch.randn(6, 4))
    assert max(_gaps(OPTIMIZERS.get(name)([param], lr=0.1), param)) < 1e-12


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = colossus.layers.Linear(4, 6, split="column"), colossus.layers.Linear(6, 4, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def square(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return outputs.square().sum(), len(batch)


def told(rank: int) -> list[str]:
    """Of a class in the config and of a function, under plans that store parts, and one that stores all; what is logged
    of one that cannot be tried."""
    found, listener = [], Listener()
    logging.getLogger("colossus").addHandler(listener)
    for plan in (dict(tensor=2), dict(data=2, zero=3), dict(data=2)):
        for kind in (PlainLAMB, Lion):
            config: dict[str, Any] = dict(parallel=plan, train=dict(global_batch_size=4, steps=2), device="cpu")
            is_own = dict(optimizer=lambda named, kind=kind: kind([param for _, param in named]))
            try:
                engine = colossus.initialize(config, model=Net, loss_fn=square, **is_own)
                engine.close()
                engine = colossus.initialize(config | dict(optimizer=kind), model=Net, loss_fn=square)
                engine.train_step(torch.ones(4 // engine.context.size("data"), 4))
                engine.close()
                found.append("trained")
            except ValueError as error:
                found.append(str(error))
    config = dict(parallel=dict(tensor=2), train=dict(global_batch_size=4), optimizer=NeedsClosure, device="cpu")
    colossus.initialize(config, model=Net, loss_fn=square).close()
    return [*found, " ".join(listener.told)]


def test_under_a_plan_it_is_refused_on_all_ranks() -> None:
    ranks = run_ranks(2, told, with_context=False)
    for in_tensor, lion, in_zero, lion_in_zero, whole, lion_whole, _ in ranks:
        assert "PlainLAMB computes something else with parts" in in_tensor
        assert "this rank stores a part of up.weight" in in_tensor
        assert "PlainLAMB computes something else with parts" in in_zero
        assert "by its name (LAMB, LARS, Adafactor, Muon)" in in_zero
        assert [lion, lion_in_zero, whole, lion_whole] == ["trained"] * 4
    first, second = (of_rank[-1] for of_rank in ranks)
    assert "NeedsClosure could not be tried on parts of a parameter (TypeError: " in first
    assert not second
