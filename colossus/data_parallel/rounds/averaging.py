"""Rounds: every replica makes steps of its own, then all take the average (local SGD)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.pending import Pending
from colossus.comm.shared_memory import SLOT_BYTES
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.data_parallel.options.strategy_options import AveragingOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.replica_average import Distance
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts

#: chunks of an average that travel at once
_MOST = 3


class Averaging(PerReplica):
    """Base: after ``period`` steps all replicas take their average, weighted by the tokens that each trained on.

    Attributes:
        params: as they are stored, those first that other stages of a pipeline hold, too.
        anchor: of each of these the value that all replicas began the round with; None before the first round.
        momentum: of the outer step, of each; None where there is none.
    """

    options: AveragingOptions
    #: whether rounds begin with a copy of the parameters
    keeps_anchor = False

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        tied = {id(store.stored(param)) for param, _ in parts.tied}
        self.params = sorted(self.trained, key=lambda param: id(param) not in tied)
        self.vector = ParameterVector([param.detach() for param in self.params], wide=True)
        #: they travel in chunks of their own: the order in which a collective adds depends on where in its buffer a
        #: number is, and copies are to stay alike to the bit
        self._num_tied: dict[torch.dtype, int] = {}
        for param, dtype in zip(self.params, self.vector.dtypes, strict=True):
            if id(param) in tied:
                self._num_tied[dtype] = self._num_tied.get(dtype, 0) + param.numel()
        self._number_of = {param: number for number, param in enumerate(self.trained)}
        self._tokens_of_step: Tensor | None = None
        #: on which the replica has trained in this round
        self._tokens = torch.zeros((), dtype=torch.float64, device=parts.context.device)
        self.anchor: list[Tensor] | None = None
        self.momentum: list[Tensor] | None = None
        #: how far replicas were apart before the average of the step that runs
        self._apart: Distance | None = None

    def ends_round(self, step: int) -> bool:
        """Whether there is an average after step ``step`` (from 0)."""
        return (step + 1) % self.options.period == 0

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.keeps_anchor and self.anchor is None:
            self.anchor = self.vector.views(self._packed())

    def _packed(self) -> Tensor:
        """The parameters in a new buffer."""
        buffer = self.vector.empty()
        self.vector.pack(buffer)
        return buffer

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        numbers = super().replica_scalars(numbers)
        self._tokens_of_step = numbers[1]
        return numbers

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().step(optimizer, scale, before_update, found_inf, clip_value)
        trained = self._tokens_of_step
        assert trained is not None
        self._tokens = self._tokens + (trained if found_inf is None else torch.where(found_inf, 0.0, trained))
        self.after_update(optimizer)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Of each of a replica's own steps, before what follows it."""

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self.ends_round(step):
            return
        if self.stop_agreement is not None:
            self.stop_agreement.enter(step + 1)  # all wait for all here; `reduce_scalars` is the end of it
        total = self._tokens_of_all()
        weight = torch.where(total > 0, self._tokens / total, 1 / self._data_group.size)
        average = self._packed()
        _sum_of_shares(self._chunks(average), weight, self._data_group)
        if self._data_group.size > 1:
            means = zip(self.params, self.vector.views(average), strict=True)
            self._apart = self._average.distance((self._number_of[param], mean) for param, mean in means)
        self.end_round(average)
        self.vector.unpack(average)
        self._tokens = torch.zeros_like(self._tokens)

    def _tokens_of_all(self) -> Tensor:
        return collectives.all_reduce(self._tokens.clone(), self._data_group, owned=True).wait()

    def _chunks(self, buffer: Tensor) -> Iterator[Tensor]:
        """A buffer as numbers, in pieces of a size that one collective takes well."""
        for part in self.vector.parts(buffer):
            num_tied = self._num_tied.get(part.dtype, 0)
            for piece in part.split([num_tied, part.numel() - num_tied]):
                if piece.numel():
                    yield from piece.split(SLOT_BYTES // part.itemsize)

    def end_round(self, average: Tensor) -> None:
        """Change ``average``, a buffer of the vector that is the same on all replicas, to what they go on from."""

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Weighted as at the end of the round that is open; all alike where nobody has trained since the last.
        Collective over data."""
        shares, weight = super().average_addend()
        if self._data_group.size == 1:
            return shares, weight
        total = self._tokens_of_all()
        factor = float(torch.where(total > 0, self._tokens * self._data_group.size / total, 1.0))
        wide = [value.float() if value.dtype in LOW else value for value in shares]
        return [value if factor == 1.0 else value * factor for value in wide], weight

    # -- the step's numbers ---------------------------------------------------------------------------------

    def is_summed(self, step: int) -> bool:
        return self.ends_round(step) or super().is_summed(step)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        numbers = super().reduce_scalars(step, numbers)
        self._distance, self._apart = self._apart or self._distance, None
        return numbers

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": float(self._tokens)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens = torch.full_like(self._tokens, state.get("tokens", 0.0))

    def parameter_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for name, held in (("anchor", self.anchor), ("momentum", self.momentum)):
            for param, value in zip(self.params, held or (), strict=False):
                found.setdefault(param, {})[name] = value
        return found

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        held = [state.get(param, {}) for param in self.params]
        self.anchor, self.momentum = (
            [of_param[name] for of_param in held] if all(name in of_param for of_param in held) else None
            for name in ("anchor", "momentum")
        )


class LocalSGD(Averaging):
    """x <- sum of (tokens_i / tokens) x_i after each ``period`` steps; the optimizer's state is the replica's own
    (1805.09767).

    Post-local SGD (1808.07217) is a run with all_reduce that goes on from its checkpoint with this.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(AveragingOptions(**options))


def _sum_of_shares(chunks: Iterable[Tensor], weight: Tensor, group: AxisGroup) -> None:
    """Each chunk times this rank's weight, summed over the group in place: the same to the last bit on all ranks."""
    under_way: deque[tuple[Tensor, Pending]] = deque()

    def finish_one() -> None:
        chunk, pending = under_way.popleft()
        total = pending.wait()
        if total is not chunk:
            chunk.copy_(total)

    if group.size == 1:
        return
    for chunk in chunks:
        chunk.mul_(weight)
        under_way.append((chunk, collectives.all_reduce(chunk, group, owned=True)))
        if len(under_way) == _MOST:
            finish_one()
    while under_way:
        finish_one()
