"""Optimizers of a run that goes on and is not the one that was saved: kinds, options, groups, dtypes, odd state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import contents
from helpers.ranks import run_ranks
from helpers.resumed import engine_of, load, save_after, saved, settings
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError


def test_another_optimizer_is_refused_on_all_ranks(tmp_path: Path) -> None:
    path = saved(tmp_path, world=2, parallel=dict(data=2))
    ranks = load(path, settings(tmp_path / "other", dict(tensor=2), optimizer=dict(type="SGD", momentum=0.9)), world=2)
    for _, told, refused in ranks:
        assert "was saved with the optimizer AdamW, this run has SGD" in refused
        assert "checkpoint.weights" in refused
        assert not told


def groups(engine: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in engine.optimizer.param_groups]


def after_a_step(engine: Any) -> tuple[float, list[dict[str, Any]]]:
    return engine.train_step(next(engine.loader)).lr, groups(engine)


def test_options_that_the_config_changes_are_the_configs(tmp_path: Path) -> None:
    """Another lr, another weight decay: those of now, told once by one rank. All else is as it was."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), optimizer=dict(betas=(0.8, 0.95)))
    config = settings(
        tmp_path / "other", dict(data=2), optimizer=dict(lr=5e-3, weight_decay=0.3, betas=(0.8, 0.95)),
        train=dict(steps=9),
    )  # fmt: skip
    ranks = load(path, config, after_a_step, world=2)
    for (lr, (group,)), _, refused in ranks:
        assert not refused
        assert lr == 5e-3
        assert (group["weight_decay"], tuple(group["betas"])) == (0.3, (0.8, 0.95))
    (first,) = ranks[0][1]
    assert "lr was 0.01 and is 0.005, weight_decay was 0.01 and is 0.3" in first
    assert not ranks[1][1]


class Factors(torch.optim.SGD):
    """Keeps the norm of each row of a matrix: no shape of a part can be known from that of the whole."""

    def step(self, closure: Any = None) -> None:
        super().step()
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() == 2:
                    self.state[param]["rows"] = param.detach().norm(dim=1)


def factors(named: Any) -> torch.optim.Optimizer:
    return Factors([param for _, param in named], lr=0.1)


def fails_to_save(rank: int, config: dict[str, Any], optimizer: Any = factors) -> str:
    engine = engine_of(config, optimizer=optimizer)
    engine.train_step(next(engine.loader))
    with pytest.raises(CheckpointError) as caught:
        engine.checkpoints.save().wait()
    engine.close()
    return str(caught.value)


def test_state_of_another_shape_needs_whole_parameters(tmp_path: Path) -> None:
    """It is saved and loaded under plans that keep the parameter whole, and refused in words by others: either way."""
    path = saved(tmp_path, world=2, parallel=dict(data=2), given=dict(optimizer=factors))
    assert contents(path).tensors["optimizer/up.weight/rows"].shape == (8,)
    ((seen, _, refused),) = load(
        path, settings(tmp_path / "one"), lambda engine: engine.optimizer.state[engine.model.up.weight]["rows"],
        optimizer=factors,
    )  # fmt: skip
    assert not refused
    assert torch.equal(seen, contents(path).tensors["optimizer/up.weight/rows"])
    for _, _, refused in load(path, settings(tmp_path / "two", dict(tensor=2)), world=2, optimizer=factors):
        assert "optimizer/up.weight/rows has shape (8,)" in refused
        assert "each rank stores a part of the parameter" in refused
    for message in run_ranks(2, fails_to_save, settings(tmp_path / "split", dict(tensor=2)), with_context=False):
        assert "optimizer/up.weight/rows has shape (4,)" in message


class Keeps(torch.optim.SGD):
    """Keeps something beside what SGD keeps."""

    def __init__(self, params: Any, keep: Callable[[Tensor], dict[Any, Any]]) -> None:
        super().__init__(params, lr=0.1)
        self.keep = keep

    def step(self, closure: Any = None) -> None:
        super().step()
        for param in self.param_groups[0]["params"]:
            self.state[param].update(self.keep(param))


def keeps(keep: Callable[[Tensor], dict[Any, Any]]) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda named: Keeps([param for _, param in named], keep)


UNSAVED: list[tuple[Callable[[Tensor], dict[Any, Any]], str]] = [
    (lambda param: {0: 1.0}, "state is kept under 0; a checkpoint needs names"),
    (lambda param: {"a/b": 1.0}, "state is kept under 'a/b'"),
    (lambda param: {"history": [torch.zeros_like(param)]}, "State of a split parameter must have its shape"),
    (lambda param: {"made by": object()}, "a builtins.object cannot be saved"),
]


def fail_to_save(rank: int, config: dict[str, Any]) -> list[str]:
    return [fails_to_save(rank, dict(config), keeps(keep)) for keep, _ in UNSAVED]


def test_state_that_cannot_be_saved_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for messages in run_ranks(2, fail_to_save, settings(tmp_path, dict(tensor=2)), with_context=False):
        for message, (_, said) in zip(messages, UNSAVED, strict=True):
            assert said in message


# -- dtypes ---------------------------------------------------------------------------------------------------


def dtypes(engine: Any) -> tuple[set[torch.dtype], set[torch.dtype], float]:
    state = [
        value.dtype
        for of_param in engine.optimizer.state.values()
        for name, value in of_param.items()
        if name != "step"
    ]
    loss = engine.train_step(next(engine.loader)).loss
    return {param.dtype for param in engine.model.parameters()}, set(state), loss


@pytest.mark.parametrize(
    ("then", "now", "params", "state", "tolerance"),
    [
        ("fp32", "fp64", torch.float64, torch.float64, 1e-5),
        (dict(params="bf16", optimizer="bf16"), "fp32", torch.float32, torch.float32, 0.1),
        pytest.param("bf16", "fp32", torch.float32, torch.float32, 0.1, marks=pytest.mark.long),
    ],
)
def test_state_has_the_dtype_of_its_parameter_again(
    tmp_path: Path, then: Any, now: str, params: torch.dtype, state: torch.dtype, tolerance: float
) -> None:
    """Precision may change on the way: the numbers are those that were saved, cast."""
    path = saved(tmp_path, train=dict(precision=then))
    (reference,) = run_ranks(1, save_after, 3, settings(tmp_path / "whole", train=dict(precision=then)),
                             with_context=False)  # fmt: skip
    for world, parallel in ((1, {}), (2, dict(data=2, zero=3))):
        config = settings(tmp_path / "other", parallel, train=dict(precision=now))
        for (of_params, of_state, loss), _, refused in load(path, config, dtypes, world=world):
            assert not refused
            assert of_params == {params}
            assert of_state == {state}
            assert abs(loss - reference[2]) <= tolerance * reference[2]
