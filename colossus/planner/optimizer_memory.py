"""What an optimizer keeps, and what its step needs on top: found out by steps of fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from colossus.config import Config
from colossus.engine.optimizers import make_optimizer
from colossus.engine.parameter_groups import ParameterGroups
from colossus.layout.parameter import StoredSpec, attach
from colossus.optim.logical_tensors import Holders
from colossus.planner.fake_rank import fake_rank
from colossus.planner.fake_tensors import counted_fake_tensors
from colossus.planner.parameter_facts import ParameterFacts
from colossus.planner.plan_axes import PlanAxes
from colossus.registry import TORCH_OPTIMIZERS

#: elements of the parameters of which it is seen what each costs
_FEW, _MORE = 1 << 10, 1 << 12


@dataclass(frozen=True)
class StoredParameter:
    """A parameter that a rank trains, as the rank stores it.

    Attributes:
        rows: the axes over which its rows are cut.
    """

    facts: ParameterFacts
    shape: tuple[int, ...]
    elements: int
    dtype: str
    rows: tuple[str, ...]


@dataclass(frozen=True)
class _ByElement:
    """Bytes of an optimizer that computes each element from this element alone: so many for each parameter and each of
    its elements.

    Attributes:
        state, update: (for each parameter, for each element), of its state, and of a step beyond it.
        is_at_once: whether a step needs what it needs for all parameters at the same time.
    """

    state: tuple[float, float]
    update: tuple[float, float]
    is_at_once: bool


class OptimizerMemory:
    """Of the optimizer of a config, under any plan of a layout.

    Args:
        groups: of its parameters, where the config has rules for them.
    """

    def __init__(self, config: Config, groups: ParameterGroups | None) -> None:
        self._section, self._groups = config.optimizer, groups
        self._is_by_element = not self._section.whole and self._section.type in TORCH_OPTIMIZERS
        #: (group, dtype) -> bytes
        self._by_element: dict[tuple[int, str], _ByElement] = {}
        self._known: dict[object, tuple[int, int]] = {}

    def bytes(self, config: Config, axes: PlanAxes, stored: Sequence[StoredParameter]) -> tuple[int, int]:
        """Of one rank of a plan: the state, and what a step needs beyond it.

        Args:
            config: of the plan.
            stored: what the rank trains, in the order of the model.

        Raises:
            ValueError: for an optimizer of whole parameters, in a process that has joined others.
        """
        if not stored:
            return 0, 0
        if self._is_by_element:
            return self._sum(config, stored)
        key = tuple(axes.grid.sizes.items()), tuple((one.facts.name, one.shape, one.dtype) for one in stored)
        if key not in self._known:
            self._known[key] = self._step_all(config, axes, stored)
        return self._known[key]

    # -- each element by itself ---------------------------------------------------------------------------

    def _sum(self, config: Config, stored: Sequence[StoredParameter]) -> tuple[int, int]:
        """Over parameters of the same cost together."""
        numbers: dict[tuple[int, str], list[int]] = {}
        for one in stored:
            numbers.setdefault((one.facts.kind.group, one.dtype), []).append(one.elements)
        state = update = 0.0
        for (group, dtype), elements in numbers.items():
            key = group, dtype
            if key not in self._by_element:
                name = next(one.facts.name for one in stored if (one.facts.kind.group, one.dtype) == key)
                self._by_element[key] = self._measure(config, name, dtype)
            cost = self._by_element[key]
            state += cost.state[0] * len(elements) + cost.state[1] * sum(elements)
            if cost.is_at_once:
                update += cost.update[0] * len(elements) + cost.update[1] * sum(elements)
            else:
                update = max(update, cost.update[0] + cost.update[1] * max(elements))
        return round(state), round(update)

    def _measure(self, config: Config, name: str, dtype: str) -> _ByElement:
        few, more = (self._step(config, name, dtype, [number]) for number in (_FEW, _MORE))
        both = self._step(config, name, dtype, [_FEW, _FEW])
        slopes = [(b - a) / (_MORE - _FEW) for a, b in zip(few, more, strict=True)]
        state, update = ((a - slope * _FEW, slope) for a, slope in zip(few, slopes, strict=True))
        return _ByElement(state, update, is_at_once=both[1] == 2 * few[1])

    def _step(self, config: Config, name: str, dtype: str, sizes: Sequence[int]) -> tuple[int, int]:
        """Bytes of the state of parameters of these sizes, and of a step beyond it."""
        with counted_fake_tensors() as fake:
            named = [(name, _parameter((size,), dtype)) for size in sizes]
            before = fake.mark()
            optimizer: Any = make_optimizer(None, config, named, None, self._groups)  # type: ignore[arg-type]
            optimizer.step()
            kept = [x for x in tree_leaves(list(optimizer.state.values())) if isinstance(x, torch.Tensor)]
            state = sum(x.untyped_storage().nbytes() for x in kept)
            return state, fake.peak - before - state

    # -- whole parameters ---------------------------------------------------------------------------------

    def _step_all(self, config: Config, axes: PlanAxes, stored: Sequence[StoredParameter]) -> tuple[int, int]:
        with fake_rank(config) as context, counted_fake_tensors() as fake:
            named, tables = [], set()
            for one in stored:
                param = _parameter(one.shape, one.dtype)
                spec = one.facts.spec
                attach(param, StoredSpec(spec, one.rows, axes.grid.sizes) if one.rows else spec)
                if one.facts.kind.is_table:
                    tables.add(id(param))
                named.append((spec.name, param))
            holders = Holders(context, (axis for axis in axes.summed if axis != "pipeline"), tables)
            before = fake.live
            optimizer: Any = make_optimizer(None, config, named, holders, self._groups)
            fake.mark()
            optimizer.step()
            peak = fake.peak
            gc.collect()  # what an optimizer's loops have left
            return fake.live - before, peak - fake.live


def _parameter(shape: Sequence[int], dtype: str) -> nn.Parameter:
    """With a gradient."""
    param = nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype)))
    param.grad = torch.empty_like(param)
    return param
