"""What an optimizer keeps, and what its step needs on top: found out by steps of fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from colossus.comm.accounting import Counter, count, sent
from colossus.config import Config
from colossus.context.grid import ONE_RANK
from colossus.context.parallel_context import ParallelContext
from colossus.engine.optimizers import make_optimizer
from colossus.engine.parameter_groups import ParameterGroups
from colossus.layout.layout import Layout
from colossus.layout.parameter import ParameterSpec, StoredSpec, attach
from colossus.optim.logical_tensors import Holders
from colossus.planner.collective import Collective
from colossus.planner.fake_rank import fake_rank
from colossus.planner.fake_tensors import counted_fake_tensors
from colossus.planner.parameter_facts import ParameterKind, dtype_name
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.sharded_units import StoredParameter
from colossus.registry import TORCH_OPTIMIZERS

#: elements of the parameters of which it is seen what each costs
_FEW, _MORE = 1 << 10, 1 << 12


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


@dataclass(frozen=True, eq=False)
class _Step:
    """Bytes of the state and of a step beyond it, and what was sent in it."""

    state: int
    update: int
    moved: Counter


class OptimizerMemory:
    """Of the optimizer of a config, under any plan.

    Args:
        groups: of its parameters, where the config has rules for them.
    """

    def __init__(self, config: Config, groups: ParameterGroups | None) -> None:
        self._section, self._groups = config.optimizer, groups
        self._is_by_element = not self._section.whole and self._section.type in TORCH_OPTIMIZERS
        #: (group, dtype) -> bytes
        self._by_element: dict[tuple[int, str], _ByElement] = {}
        #: of optimizers of whole parameters: of one parameter on one rank, and of all of a rank of a plan
        self._alone: dict[tuple[ParameterKind, str], _Step] = {}
        self._known: dict[object, _Step] = {}

    def bytes(
        self, config: Config, axes: PlanAxes, stored: Sequence[StoredParameter], *, exact: bool = True
    ) -> tuple[int, int]:
        """Of one rank of a plan: the state, and what a step needs beyond it.

        Args:
            config: of the plan.
            stored: what the rank trains, in the order of the model.
            exact: whether an optimizer that looks at whole parameters (Muon, LAMB, ..) makes a step as the first rank
                of the plan, which takes up to seconds; else each of its parameters makes one alone, once for all
                plans: as much state, but for what is whole on a rank (moments of Adafactor), and less for the step.

        Raises:
            ValueError: for an optimizer of whole parameters, if exact, in a process that has joined others.
        """
        if not stored:
            return 0, 0
        if self._is_by_element:
            return self._sum(config, stored)
        if not exact and not self._section.whole:
            return self._sum_of_alone(config, stored)
        step = self._step_all(config, axes, stored)
        return step.state, step.update

    def collectives(self, config: Config, axes: PlanAxes, stored: Sequence[StoredParameter]) -> tuple[Collective, ...]:
        """What a step of an optimizer that looks at whole parameters starts on the first rank of a plan. Others may
        send more or less: they own other parameters.

        Raises:
            ValueError: in a process that has joined others.
        """
        if not stored or self._is_by_element:
            return ()
        found: list[Collective] = []
        for (operation, name, dtype), tally in self._step_all(config, axes, stored).moved.entries.items():
            over = tuple(axis for axis in axes.grid.names if axis in name.split("x"))
            ranks = axes.size(over)
            held = tally.bytes / tally.calls / sent(operation.partition(" ")[0], ranks, 1.0)
            found += [Collective(operation, name, ranks, held, dtype_name(dtype), over)] * tally.calls
        return tuple(found)

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

    def _step_all(self, config: Config, axes: PlanAxes, stored: Sequence[StoredParameter]) -> _Step:
        """Of the first rank of a plan."""
        key = (*axes.grid.sizes.items(), *((one.facts.kind, one.dtype, one.rows) for one in stored))
        if key not in self._known:
            params = []
            for one in stored:
                spec = StoredSpec(one.facts.spec, one.rows, axes.grid.sizes) if one.rows else one.facts.spec
                params.append((spec, one.shape, one.dtype, one.facts.kind.is_table))
            with fake_rank(config) as context:
                self._known[key] = self._step_of(config, context, axes.summed, params)
        return self._known[key]

    def _sum_of_alone(self, config: Config, stored: Sequence[StoredParameter]) -> tuple[int, int]:
        """State as large as the rows that are stored."""
        state, update = 0.0, 0
        for one in stored:
            kind = one.facts.kind
            key = kind, one.dtype
            if key not in self._alone:
                self._alone[key] = self._step_alone(config, one)
            step = self._alone[key]
            state, update = state + step.state * one.elements / kind.elements, max(update, step.update)
        return round(state), update

    def _step_alone(self, config: Config, one: StoredParameter) -> _Step:
        """Of what a rank has of a parameter for compute, as if that were the parameter."""
        kind, given = one.facts.kind, one.facts.spec
        shards = tuple(
            replace(shard, shape=(rows, *kind.shape[1:]) if kind.shape else ())
            for shard, rows in zip(given.shards, kind.rows, strict=True)
        )
        spec = ParameterSpec(shards, Layout.whole(len(kind.shape)), given.description)
        spec.name, spec.is_stack = given.name, given.is_stack
        with ParallelContext(ONE_RANK) as context:
            return self._step_of(config, context, (), [(spec, kind.shape, one.dtype, kind.is_table)])

    def _step_of(
        self,
        config: Config,
        context: ParallelContext,
        axes: Iterable[str],
        params: Sequence[tuple[ParameterSpec, tuple[int, ...], str, bool]],
    ) -> _Step:
        """Of parameters with these specs, shapes and dtypes, some of them tables, whose gradients are summed over
        ``axes``."""
        with counted_fake_tensors() as fake:
            named, tables = [], set()
            for spec, shape, dtype, is_table in params:
                param = attach(_parameter(shape, dtype), spec)
                named.append((spec.name, param))
                if is_table:
                    tables.add(id(param))
            holders = Holders(context, (axis for axis in axes if axis != "pipeline"), tables)
            before = fake.live
            with _garbage_of_its_own(), count() as moved:
                optimizer: Any = make_optimizer(None, config, named, holders, self._groups)
                fake.mark()
                optimizer.step()
                peak = fake.peak
                gc.collect()  # what an optimizer's loops have left
                return _Step(fake.live - before, peak - fake.live, moved)


@contextmanager
def _garbage_of_its_own() -> Iterator[None]:
    """Inside, what was there before is not looked at when garbage is collected, which takes most of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _parameter(shape: Sequence[int], dtype: str) -> nn.Parameter:
    """With a gradient."""
    param = nn.Parameter(torch.empty(shape, dtype=getattr(torch, dtype)))
    param.grad = torch.empty_like(param)
    return param
