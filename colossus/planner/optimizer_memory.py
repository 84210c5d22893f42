"""The memory of an optimizer: its state, and what its step needs on top, measured by steps on fake tensors."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from colossus.comm.accounting import Counter, count, sent
from colossus.config import Config
from colossus.engine.optimizers import make_optimizer
from colossus.engine.parameter_groups import ParameterGroups
from colossus.layout.parameter import StoredSpec, attach
from colossus.optim.logical_tensors import Holders
from colossus.planner.fake_rank import fake_rank
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors
from colossus.planner.rank_parameters import RankParameters
from colossus.planner.step_traffic import Collective
from colossus.registry import TORCH_OPTIMIZERS

#: sizes of two parameters, from whose memory the bytes of a parameter and of an element follow
_FEW, _MORE = 1 << 10, 1 << 12


@dataclass(frozen=True)
class _ByElement:
    """Bytes of an optimizer that works elementwise: a number for each parameter, and one for each element.

    Attributes:
        state: (for a parameter, for an element) bytes of the state.
        update: the same for the bytes that a step needs beyond the state.
        is_at_once: whether a step needs these bytes for all parameters at the same time.
    """

    state: tuple[float, float]
    update: tuple[float, float]
    is_at_once: bool


@dataclass(frozen=True, eq=False)
class _Step:
    """Bytes of the state, bytes that a step needs beyond it, and the collectives of the step."""

    state: int
    update: int
    moved: Counter


class OptimizerMemory:
    """The memory and the collectives of a config's optimizer, under any plan.

    Args:
        config: the config.
        groups: groups of its parameters, if the config has rules for them.
    """

    def __init__(self, config: Config, groups: ParameterGroups | None) -> None:
        self._section, self._groups = config.optimizer, groups
        self._is_by_element = not self._section.whole and self._section.type in TORCH_OPTIMIZERS
        #: bytes by (group, dtype)
        self._by_element: dict[tuple[int, torch.dtype], _ByElement] = {}
        #: steps of an optimizer of whole parameters, and the first of them with the elements that its rank stores
        self._steps: dict[object, _Step] = {}
        self._first: tuple[_Step, int] | None = None

    def bytes(self, rank: RankParameters, *, exact: bool = True) -> tuple[int, int]:
        """Return the bytes of the state on one rank of a plan, and those that a step needs beyond it.

        Args:
            rank: the rank.
            exact: whether an optimizer of whole parameters (Muon, LAMB, ..) runs a step as the first rank of the plan,
                which can take seconds. Otherwise the bytes for each element are those of the first rank that was asked
                for.

        Raises:
            ValueError: an optimizer of whole parameters is to be exact, and torch.distributed is initialized.
        """
        if self._is_by_element:
            return self._sum(rank)
        if not exact:
            return self._scaled(rank)
        step = self._step_all(rank)
        return step.state, step.update

    def collectives(self, rank: RankParameters) -> tuple[Collective, ...]:
        """Return the collectives of an optimizer of whole parameters on the first rank of a plan.

        Other ranks own other parameters, and may send more or less.

        Raises:
            ValueError: torch.distributed is initialized.
        """
        if self._is_by_element:
            return ()
        collectives: list[Collective] = []
        for (operation, name, _), tally in self._step_all(rank).moved.entries.items():
            over = tuple(axis for axis in rank.axes.grid.names if axis in name.split("x"))
            ranks = rank.axes.size(over)
            nbytes = tally.bytes / tally.calls / sent(operation.partition(" ")[0], ranks, 1.0)
            collectives += [Collective(operation, name, ranks, nbytes, over)] * tally.calls
        return tuple(collectives)

    # -- each element by itself ---------------------------------------------------------------------------

    def _sum(self, rank: RankParameters) -> tuple[int, int]:
        """Sum the bytes of an elementwise optimizer over the parameters of a rank."""
        #: a parameter, the number, the elements and the most elements of one, by group and dtype
        sums: dict[tuple[int, torch.dtype], tuple[str, int, int, int]] = {}
        for param, stored, equal in rank.counts:
            if param.kind.form.is_trainable:
                key = param.kind.group, stored.dtype
                name, number, elements, most = sums.get(key, (param.name, 0, 0, 0))
                sums[key] = name, number + equal, elements + equal * stored.elements, max(most, stored.elements)
        state = update = 0.0
        for key, (name, number, elements, most) in sums.items():
            if key not in self._by_element:
                self._by_element[key] = self._measure(rank.config, name, key[1])
            cost = self._by_element[key]
            state += cost.state[0] * number + cost.state[1] * elements
            if cost.is_at_once:
                update += cost.update[0] * number + cost.update[1] * elements
            else:
                update = max(update, cost.update[0] + cost.update[1] * most)
        return round(state), round(update)

    def _measure(self, config: Config, name: str, dtype: torch.dtype) -> _ByElement:
        """Measure an elementwise optimizer by steps of a small and a larger parameter, and of two small ones."""
        few, more, both = (self._step(config, name, dtype, sizes) for sizes in ([_FEW], [_MORE], [_FEW, _FEW]))
        state, update = (
            (a - (b - a) / (_MORE - _FEW) * _FEW, (b - a) / (_MORE - _FEW))
            for a, b in ((few.state, more.state), (few.update, more.update))
        )
        return _ByElement(state, update, is_at_once=both.update == 2 * few.update)

    def _step(self, config: Config, name: str, dtype: torch.dtype, sizes: Sequence[int]) -> _Step:
        """Run a step for parameters of these sizes."""
        with counted_fake_tensors() as fake:
            return self._run(config, fake, [(name, _parameter((size,), dtype)) for size in sizes])

    # -- whole parameters ---------------------------------------------------------------------------------

    def _step_all(self, rank: RankParameters) -> _Step:
        """Run a step for all parameters of the first rank of a plan."""
        sizes, trained = rank.axes.grid.sizes, rank.trained
        if not trained:
            return _Step(0, 0, Counter())
        key = (*sizes.items(), *((param.kind, stored.dtype, stored.rows) for param, stored in trained))
        if key not in self._steps:
            with fake_rank(rank.config) as context, counted_fake_tensors() as fake:
                named, tables = [], set()
                for param, stored in trained:
                    spec = StoredSpec(param.spec, stored.rows, sizes) if stored.rows else param.spec
                    parameter = attach(_parameter(stored.shape, stored.dtype), spec)
                    named.append((spec.name, parameter))
                    if param.kind.is_table:
                        tables.add(id(parameter))
                holders = Holders(context, (axis for axis in rank.axes.summed if axis != "pipeline"), tables)
                self._steps[key] = self._run(rank.config, fake, named, holders)
        return self._steps[key]

    def _scaled(self, rank: RankParameters) -> tuple[int, int]:
        """Scale the first step to the stored elements of a rank."""
        elements = sum(stored.elements for _, stored in rank.trained)
        if not elements:
            return 0, 0
        if self._first is None:
            self._first = self._step_all(rank), elements
        step, number = self._first
        return round(step.state * elements / number), round(step.update * elements / number)

    def _run(
        self,
        config: Config,
        fake: CountedFakeTensors,
        named: Sequence[tuple[str, nn.Parameter]],
        holders: Holders | None = None,
    ) -> _Step:
        """Run a step of a new optimizer; one of whole parameters has holders."""
        before = fake.live
        with _frozen_garbage(), count() as moved:
            optimizer: Any = make_optimizer(None, config, named, holders, self._groups)  # type: ignore[arg-type]
            fake.mark()
            optimizer.step()
            peak = fake.peak
            gc.collect()  # reference cycles of the optimizer
            return _Step(fake.live - before, peak - fake.live, moved)


@contextmanager
def _frozen_garbage() -> Iterator[None]:
    """Let the garbage collector skip all older objects inside the context: a pass over them takes most of a second."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _parameter(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """Return a parameter with a gradient."""
    param = nn.Parameter(torch.empty(shape, dtype=dtype))
    param.grad = torch.empty_like(param)
    return param
