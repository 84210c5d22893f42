"""Rounds: every replica makes steps of its own, then all take the average (local SGD), or make a step by it (SlowMo,
DiLoCo).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.pending import Pending
from colossus.comm.shared_memory import SLOT_BYTES
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.data_parallel.options.strategy_options import AveragingOptions, DiLoCoOptions, SlowMoOptions
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

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        trained = self._tokens_of_step
        assert trained is not None
        self._tokens = self._tokens + (trained if found_inf is None else torch.where(found_inf, 0.0, trained))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self.ends_round(step):
            return
        if self.stop_agreement is not None:
            self.stop_agreement.enter(step + 1)  # all wait for all here; `reduce_scalars` is the end of it
        average = self._packed()
        if self._data_group.size > 1:
            total = self._tokens_of_all()
            weight = torch.where(total > 0, self._tokens / total, 1 / self._data_group.size)
            _sum_of_shares(self._chunks(average), weight, self._data_group)
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
        Collective over data.
        """
        shares, weight = super().average_addend()
        if self._data_group.size == 1:
            return shares, weight
        total = self._tokens_of_all()
        factor = float(torch.where(total > 0, self._tokens * self._data_group.size / total, 1.0))
        wide = [value.float() if value.dtype in LOW else value for value in shares]
        return [value if factor == 1.0 else value * factor for value in wide], weight

    def is_summed(self, step: int) -> bool:
        return self.ends_round(step) or super().is_summed(step)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        numbers = super().reduce_scalars(step, numbers)
        self._distance, self._apart = self._apart or self._distance, None
        return numbers

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


class OuterStep(Averaging):
    """Base: what a round has changed is the gradient of an outer SGD, of which all replicas make the same step."""

    keeps_anchor = True
    #: anchor, momentum and rates are; the tokens of the first then weigh the part of the round that all have in common
    state_is_alike = True

    @torch.no_grad()
    def outer_step(
        self, average: Tensor, *, lr: float, momentum: float, nesterov: bool, inner_lr: Sequence[float] | None = None
    ) -> None:
        """SGD on the anchor, with the gradient ``(anchor - average) / inner_lr`` and the rate ``lr * inner_lr``.

        With an inner rate that is slow momentum (1910.00643, algorithm 1), without one the outer step of DiLoCo
        (2311.08105).

        Args:
            average: bytes of the vector; overwritten with what the anchor is then.
            inner_lr: of each parameter, the mean over the round. Where it is 0 nothing has moved.
        """
        anchor, gradient = self.anchor, self.vector.views(average)
        assert anchor is not None
        if not anchor:
            return
        if self.momentum is None and momentum:
            self.momentum = [torch.zeros_like(value) for value in anchor]
        torch._foreach_neg_(gradient)
        torch._foreach_add_(gradient, anchor)
        if inner_lr is not None:
            torch._foreach_mul_(gradient, [1 / rate if rate else 0.0 for rate in inner_lr])
        if (buffer := self.momentum) is not None:
            torch._foreach_mul_(buffer, momentum)
            torch._foreach_add_(buffer, gradient)
            if nesterov:
                torch._foreach_add_(gradient, buffer, alpha=momentum)
            else:
                torch._foreach_copy_(gradient, buffer)
        rates = [lr] * len(anchor) if inner_lr is None else [lr * rate for rate in inner_lr]
        torch._foreach_mul_(gradient, rates)
        torch._foreach_sub_(anchor, gradient)
        torch._foreach_copy_(self.vector.views(average), anchor)


class SlowMo(OuterStep):
    """u <- beta u + (x_0 - x) / gamma, x_0 <- x_0 - alpha gamma u, with x the replicas' average at the end of a round.

    Momentum of whole rounds, over local SGD (1910.00643). gamma is the optimizer's learning rate, of each parameter
    group the mean over the round. Each replica's optimizer keeps its own state ("maintain" in section 2 of the paper).
    """

    options: SlowMoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SlowMoOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: of each parameter the sum of the learning rates of the round's steps
        self._lr_sums: dict[nn.Parameter, float] = {}
        self._num_steps = 0

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        super().after_update(optimizer, found_inf)
        self._num_steps += 1
        for group in optimizer.param_groups:
            lr = float(group["lr"])
            for param in group["params"]:
                self._lr_sums[param] = self._lr_sums.get(param, 0.0) + lr

    def end_round(self, average: Tensor) -> None:
        options = self.options
        rates = [self._lr_sums.get(param, 0.0) / max(1, self._num_steps) for param in self.params]
        self.outer_step(average, lr=options.slow_lr, momentum=options.slow_momentum, nesterov=False, inner_lr=rates)
        self._lr_sums.clear()
        self._num_steps = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_steps": self._num_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_steps = state.get("num_steps", 0)

    def parameter_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found = super().parameter_state()
        for param, total in self._lr_sums.items():
            found.setdefault(param, {})["lr_sum"] = total
        return found

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        super().load_parameter_state(state)
        self._lr_sums = {param: held["lr_sum"] for param, held in state.items() if "lr_sum" in held}


class DiLoCo(OuterStep):
    """An outer optimizer steps by what a round of the replicas' own steps has changed (2311.08105): its gradient is
    what the parameters were when the round began minus the replicas' average at its end.
    """

    options: DiLoCoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DiLoCoOptions(**options))

    def end_round(self, average: Tensor) -> None:
        options = self.options
        self.outer_step(average, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.nesterov)


def _sum_of_shares(chunks: Iterable[Tensor], weight: Tensor, group: AxisGroup) -> None:
    """Each chunk times this rank's weight, summed over the group in place: the same to the last bit on all ranks."""
    under_way: deque[tuple[Tensor, Pending]] = deque()

    def finish_one() -> None:
        chunk, pending = under_way.popleft()
        total = pending.wait()
        if total is not chunk:
            chunk.copy_(total)

    for chunk in chunks:
        under_way.append((chunk, collectives.all_reduce(chunk.mul_(weight), group, owned=True)))
        if len(under_way) == _MOST:
            finish_one()
    while under_way:
        finish_one()
