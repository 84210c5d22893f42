"""Rounds: every replica makes steps of its own, then all take the average (local SGD)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.data_parallel.options.averaging_options import AveragingOptions, LocalSGDOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.data_parallel.replica_average import Distance
from colossus.data_parallel.rounds.fragments import Fragment, fragment_numbers
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.gradients.reduction import ModelParts
from colossus.layout.parameter import full_model_order, spec_of

#: chunks of an average that travel at once
_MOST = 3


class Averaging(PerReplica):
    """Base: after ``period`` steps all replicas take their average, weighted by the tokens that each trained on."""

    options: AveragingOptions
    #: parts of the model that are averaged in turn
    num_fragments = 1
    #: whether rounds begin with a copy of the parameters
    keeps_anchor = False

    def setup(self, store: ParameterStore, parts: ModelParts) -> None:
        super().setup(store, parts)
        numbers = fragment_numbers(list(full_model_order(parts.model)), self.num_fragments)
        tied = {id(store.stored(param)) for param, _ in parts.tied}
        held: list[list[nn.Parameter]] = [[] for _ in range(self.num_fragments)]
        for param in store.trainable():
            held[numbers[spec_of(param).name]].append(param)
        self.fragments = [Fragment(params, tied, parts.context.device) for params in held]
        self._number_of = {param: number for number, param in enumerate(self.trained)}
        self._fragment_of = {param: at for at, each in enumerate(self.fragments) for param in each.params}
        self._tokens: Tensor | None = None
        #: how far replicas were apart before the average of the step that runs
        self._apart: Distance | None = None

    def due(self, step: int) -> list[Fragment]:
        """What is averaged after step ``step`` (from 0)."""
        period, count = self.options.period, len(self.fragments)
        return [
            fragment
            for number, fragment in enumerate(self.fragments)
            if (step + 1 - (number + 1) * period // count) % period == 0
        ]

    # -- a step -------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        super().begin_step(step)
        for fragment in self.fragments if self.keeps_anchor else ():
            if fragment.anchor is None:
                fragment.anchor = fragment.vector.views(fragment.packed())

    def replica_scalars(self, numbers: Tensor) -> Tensor:
        numbers = super().replica_scalars(numbers)
        self._tokens = numbers[1]
        return numbers

    def replica_count(self, numbers: Tensor) -> Tensor | None:
        return self._tokens

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        scale: Tensor,
        before_update: Callable[[], None],
        found_inf: Tensor | None = None,
        clip_value: float | None = None,
    ) -> None:
        super().step(optimizer, scale, before_update, found_inf, clip_value)
        assert self._tokens is not None
        trained = self._tokens if found_inf is None else torch.where(found_inf, 0.0, self._tokens)
        for fragment in self.fragments:
            fragment.tokens = fragment.tokens + trained
        self.after_update(optimizer)

    def after_update(self, optimizer: torch.optim.Optimizer) -> None:
        """Of each of a replica's own steps, before what follows it."""

    @torch.no_grad()
    def after_step(self, step: int) -> None:
        due = self.due(step)
        if due and self.stop_agreement is not None:
            self.stop_agreement.enter(step + 1)  # all wait for all here; `reduce_scalars` is the end of it
        for fragment in due:
            weight = self._weight(fragment)
            average = fragment.packed()
            _sum_of_shares(fragment.chunks(average), weight, self._data_group)
            if self._data_group.size > 1:
                means = zip(fragment.params, fragment.vector.views(average), strict=True)
                self._apart = self._average.distance((self._number_of[param], mean) for param, mean in means)
            self.end_round(fragment, average)
            fragment.vector.unpack(average)
            fragment.forget_tokens()

    def _weight(self, fragment: Fragment) -> Tensor:
        """Of this replica in an average: float64 scalar, 1 in sum over all."""
        total = collectives.all_reduce(fragment.tokens.clone(), self._data_group, owned=True).wait()
        return torch.where(total > 0, fragment.tokens / total, 1 / self._data_group.size)

    def end_round(self, fragment: Fragment, average: Tensor) -> None:
        """Change ``average``, a buffer of the fragment's vector that is the same on all replicas, to what they go on
        from."""

    def average_addend(self) -> tuple[list[Tensor], float]:
        """Weighted as at the end of the round that is open, of each fragment by its own tokens; all alike where nobody
        has trained since the last. Collective over data."""
        shares, weight = super().average_addend()
        if self._data_group.size == 1:
            return shares, weight
        tokens = torch.stack([fragment.tokens for fragment in self.fragments])
        total = collectives.all_reduce(tokens.clone(), self._data_group, owned=True).wait()
        factors = torch.where(total > 0, tokens * self._data_group.size / total, 1.0).tolist()
        weighted = []
        for param, value in zip(self.trained, shares, strict=True):
            value, factor = value.float() if value.dtype in LOW else value, factors[self._fragment_of[param]]
            weighted.append(value if factor == 1.0 else value * factor)
        return weighted, weight

    # -- the step's numbers ---------------------------------------------------------------------------------

    def is_summed(self, step: int) -> bool:
        return bool(self.due(step)) or super().is_summed(step)

    def reduce_scalars(self, step: int, numbers: Tensor) -> Tensor:
        numbers = super().reduce_scalars(step, numbers)
        self._distance, self._apart = self._apart or self._distance, None
        return numbers

    # -- state ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"tokens": [float(fragment.tokens) for fragment in self.fragments]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        tokens = state.get("tokens", ())
        for number, fragment in enumerate(self.fragments):
            fragment.forget_tokens()
            fragment.tokens += tokens[number] if len(tokens) == len(self.fragments) else 0.0

    def parameter_state(self) -> dict[nn.Parameter, dict[str, Any]]:
        found: dict[nn.Parameter, dict[str, Any]] = {}
        for fragment in self.fragments:
            for name, held in (("anchor", fragment.anchor), ("momentum", fragment.momentum)):
                for param, value in zip(fragment.params, held or (), strict=False):
                    found.setdefault(param, {})[name] = value
        return found

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        for fragment in self.fragments:
            fragment.anchor = _of_all(fragment.params, state, "anchor")
            fragment.momentum = _of_all(fragment.params, state, "momentum")


class LocalSGD(Averaging):
    """x <- sum of (tokens_i / tokens) x_i after each ``period`` steps; the optimizer's state is the replica's own
    (1805.09767).

    Post-local SGD (1808.07217) is a run with all_reduce that goes on from its checkpoint with this.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(LocalSGDOptions(**options))


def _of_all(
    params: Iterable[nn.Parameter], state: Mapping[nn.Parameter, Mapping[str, Any]], name: str
) -> list[Tensor] | None:
    held = [state.get(param, {}) for param in params]
    return [of_param[name] for of_param in held] if all(name in of_param for of_param in held) else None


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
