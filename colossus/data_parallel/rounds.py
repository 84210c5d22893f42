"""Strategies of rounds: replicas make steps of their own, then take their average (local SGD), or an outer step by it.

SlowMo and DiLoCo make outer steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.pending import Pending
from colossus.comm.shared_memory import piece_bytes
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.data_parallel.options.strategy_options import AveragingOptions, DiLoCoOptions, SlowMoOptions
from colossus.data_parallel.parameter_vector import ParameterVector
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.replica_average import Distance
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts

#: the most chunks of an average that travel at once
_MAX_CHUNKS = 3


class Averaging(PerReplica):
    """The base of rounds: after ``period`` steps all replicas take their average, weighted by the tokens of each.

    Attributes:
        params: the stored parameters, first those that other pipeline stages share.
        anchor: for each of them the value with which all replicas began the round; None before the first round.
        momentum: for each of them the momentum of the outer step; None where there is none.
    """

    options: AveragingOptions
    #: whether `anchor` is a copy of the parameters at the beginning of a round
    keeps_anchor = False

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        tied = {id(store.stored(param)) for param, _ in parts.tied}
        self.params = sorted(self.trained, key=lambda param: id(param) not in tied)
        self.vector = ParameterVector([param.detach() for param in self.params], wide=True)
        #: dtype -> number of elements of tied parameters, which travel in chunks of their own: a collective's order of
        #: additions depends on an element's place in its buffer, and copies must stay equal to the last bit
        self._num_tied: dict[torch.dtype, int] = {}
        for param, dtype in zip(self.params, self.vector.dtypes, strict=True):
            if id(param) in tied:
                self._num_tied[dtype] = self._num_tied.get(dtype, 0) + param.numel()
        self._number_of = {param: number for number, param in enumerate(self.trained)}
        self._tokens_of_step: Tensor | None = None
        #: the tokens on which the replica has trained in this round
        self._tokens = torch.zeros((), dtype=torch.float64, device=parts.context.device)
        self.anchor: list[Tensor] | None = None
        self.momentum: list[Tensor] | None = None
        #: the distance of the replicas before the average of the step that runs
        self._distance_before: Distance | None = None

    def ends_round(self, step: int) -> bool:
        """Return whether a round ends with step ``step`` (from 0)."""
        return (step + 1) % self.options.period == 0

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        if self.keeps_anchor and self.anchor is None:
            self.anchor = self.vector.views(self._packed())

    def _packed(self) -> Tensor:
        """Return the parameters in a new buffer."""
        buffer = self.vector.empty()
        self.vector.pack(buffer)
        return buffer

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        numbers = super().replica_scalars(numbers)
        self._tokens_of_step = numbers[1]
        return numbers

    def after_update(self, optimizer: torch.optim.Optimizer, found_inf: Tensor | None) -> None:
        tokens = self._tokens_of_step
        assert tokens is not None
        self._tokens = self._tokens + (tokens if found_inf is None else torch.where(found_inf, 0.0, tokens))

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        if not self.ends_round(step):
            return
        if self.stop_agreement is not None:
            self.stop_agreement.enter(step + 1)  # all replicas wait for each other here, until `reduce_scalars`
        average = self._packed()
        if self._data_group.size > 1:
            total = self._tokens_of_all()
            weight = torch.where(total > 0, self._tokens / total, 1 / self._data_group.size)
            _sum_of_shares(self._chunks(average), weight, self._data_group)
            means = zip(self.params, self.vector.views(average), strict=True)
            self._distance_before = self._average.distance((self._number_of[param], mean) for param, mean in means)
        self.end_round(average)
        self.vector.unpack(average)
        self._tokens = torch.zeros_like(self._tokens)

    def _tokens_of_all(self) -> Tensor:
        return collectives.all_reduce(self._tokens.clone(), self._data_group, owned=True).wait()

    def _chunks(self, buffer: Tensor) -> Iterator[Tensor]:
        """Yield the numbers of a buffer in pieces that fit in one collective."""
        for part in self.vector.parts(buffer):
            num_tied = self._num_tied.get(part.dtype, 0)
            for piece in part.split([num_tied, part.numel() - num_tied]):
                if piece.numel():
                    yield from piece.split(piece_bytes() // part.itemsize)

    def end_round(self, average: Tensor) -> None:
        """Change ``average``, a buffer that is the same on all replicas, to the parameters of the next round."""

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Return the addend with the weights that the open round has so far, equal ones where no replica has trained.

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
        self._distance, self._distance_before = self._distance_before or self._distance, None
        return numbers

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": float(self._tokens)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._tokens = torch.full_like(self._tokens, state.get("tokens", 0.0))

    def parameter_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        state: dict[nn.Parameter, dict[str, Any]] = {}
        for name, values in (("anchor", self.anchor), ("momentum", self.momentum)):
            for param, value in zip(self.params, values or (), strict=False):
                state.setdefault(param, {})[name] = value
        return state

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        by_param = [state.get(param, {}) for param in self.params]
        self.anchor, self.momentum = (
            [of_param[name] for of_param in by_param] if all(name in of_param for of_param in by_param) else None
            for name in ("anchor", "momentum")
        )


class LocalSGD(Averaging):
    """Local SGD (1805.09767): x <- sum of (tokens_i / tokens) x_i after each ``period`` steps.

    Each replica's optimizer keeps its own state. For post-local SGD (1808.07217), resume a run of all_reduce from its
    checkpoint with this strategy.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(AveragingOptions(**options))


class OuterStep(Averaging):
    """The base of outer steps: the change of a round is the gradient of an outer SGD, the same on all replicas."""

    keeps_anchor = True
    #: anchor, momentum and rates are the same; the first replica's tokens then weigh the part of the round so far
    state_is_alike = True

    @torch.no_grad()
    def outer_step(
        self, average: Tensor, *, lr: float, momentum: float, nesterov: bool, inner_lr: Sequence[float] | None = None
    ) -> None:
        """Make a step of SGD on the anchor, with the gradient ``(anchor - average) / inner_lr``.

        Its rate is ``lr * inner_lr``. With ``inner_lr`` this is slow momentum (1910.00643, algorithm 1), without it the
        outer step of DiLoCo (2311.08105).

        Args:
            average: a buffer of the vector, which is overwritten with the new anchor.
            lr: the outer rate.
            momentum: the momentum of the outer SGD.
            nesterov: whether the momentum is Nesterov's.
            inner_lr: for each parameter, the mean of its inner rate over the round; one with 0 has not moved.
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

    This is momentum of whole rounds, over local SGD (1910.00643). gamma is the learning rate of the parameter's group,
    as a mean over the round. Each replica's optimizer keeps its own state ("maintain" in section 2 of the paper).
    """

    options: SlowMoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SlowMoOptions(**options))

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        #: parameter -> sum of its learning rates over the steps of the round
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
        state = super().parameter_state()
        for param, total in self._lr_sums.items():
            state.setdefault(param, {})["lr_sum"] = total
        return state

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        super().load_parameter_state(state)
        self._lr_sums = {param: entries["lr_sum"] for param, entries in state.items() if "lr_sum" in entries}


class DiLoCo(OuterStep):
    """DiLoCo (2311.08105), an outer optimizer that makes one step for each round of the replicas' own steps.

    Its gradient is the parameters at the beginning of the round minus the replicas' average at its end.
    """

    options: DiLoCoOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(DiLoCoOptions(**options))

    def end_round(self, average: Tensor) -> None:
        options = self.options
        self.outer_step(average, lr=options.outer_lr, momentum=options.outer_momentum, nesterov=options.nesterov)


def _sum_of_shares(chunks: Iterable[Tensor], weight: Tensor, group: AxisGroup) -> None:
    """Sum each chunk times this rank's weight over the group, in place; all ranks get the same bits."""
    under_way: deque[tuple[Tensor, Pending]] = deque()

    def finish_one() -> None:
        chunk, pending = under_way.popleft()
        total = pending.wait()
        if total is not chunk:
            chunk.copy_(total)

    for chunk in chunks:
        under_way.append((chunk, collectives.all_reduce(chunk.mul_(weight), group, owned=True)))
        if len(under_way) == _MAX_CHUNKS:
            finish_one()
    while under_way:
        finish_one()
