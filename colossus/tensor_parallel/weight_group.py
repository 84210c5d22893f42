"""Weights that are gathered, and whose gradients are reduced, in one collective: fewer calls, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.context.groups import AxisGroup
from colossus.context.precision import Precision
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.move_plan import MovePlan, to_output_major, to_rank_major


@dataclass(frozen=True)
class GroupedWeight:
    """A weight with its plan: one gather in forward, one reduce-scatter of its gradient."""

    weight: nn.Parameter
    plan: MovePlan

    @property
    def can_coalesce(self) -> bool:
        """Whether the weight is moved by one all-gather, as a group of weights can be."""
        return [move.operation for move in self.plan.forward] == ["gather"]


@dataclass(eq=False)
class WeightGroup:
    """Weights that are needed one after the other. All must be gathered over the same group.

    Attributes:
        gathered: by id, weights that were gathered and not taken yet, with the version each had.
        gradients: by id, gradients that are not reduced yet.
    """

    members: Sequence[GroupedWeight]
    precision: Precision
    gathered: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def group(self) -> AxisGroup:
        return self.members[0].plan.forward[0].group

    @property
    def has_hooks(self) -> bool:
        """Whether a hook waits for the gradient of one of them."""
        return any(member.weight._backward_hooks for member in self.members)

    def gather(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """The gathered weight in ``dtype``; asking for the first one gathers all."""
        version, gathered = self.gathered.pop(id(weight), (None, None))
        if gathered is not None and version == weight._version and gathered.dtype == dtype:
            return gathered
        flat = torch.cat([member.weight.detach().to(dtype).reshape(-1) for member in self.members])
        shards = collectives.all_gather(flat, self.group).wait().view(self.group.size, -1)
        by_member = shards.split([member.weight.numel() for member in self.members], dim=1)
        for member, stacked in zip(self.members, by_member, strict=True):
            gathered = _unstack(member, stacked.unflatten(1, member.weight.shape))
            self.gathered[id(member.weight)] = member.weight._version, gathered
        return self.gathered.pop(id(weight))[1]

    def reduce(
        self, weight: Tensor, gradient: Tensor, accumulate_grad: Callable[[Tensor, Tensor], None]
    ) -> Pending | None:
        """The rank's shard of a gradient once the gradients of all members are there, else None.

        The shards of the other members are then given to ``accumulate_grad(weight, shard)``.
        """
        dtype = gradient_dtype(weight)
        gradient, earlier = gradient.to(dtype), self.gradients.get(id(weight))
        self.gradients[id(weight)] = gradient if earlier is None else earlier.add_(gradient)
        wanted = [member for member in self.members if member.weight.requires_grad]
        if any(id(member.weight) not in self.gradients for member in wanted):
            return None
        stacked = [_stack(member, self.gradients.pop(id(member.weight)), self.group.size) for member in wanted]
        flat = torch.cat([shards.flatten(1) for shards in stacked], dim=1).to(self.precision.reduce_dtype(dtype))

        def accumulate_others(reduced: Tensor) -> Tensor:
            own, reduced = None, reduced.to(dtype)
            for member, values in zip(wanted, reduced[0].split([m.weight.numel() for m in wanted]), strict=True):
                shard = values.view(member.weight.shape)
                if member.weight is weight:
                    own = shard
                else:
                    accumulate_grad(member.weight, shard.clone())
            assert own is not None
            return own

        return collectives.reduce_scatter(flat, self.group).then(accumulate_others)


def _unstack(member: GroupedWeight, shards: Tensor) -> Tensor:
    """[rank, *stored shape] to the gathered weight."""
    move = member.plan.forward[0]
    if move.dim == 0:
        return to_output_major(shards.flatten(0, 1), move.rows or (shards.shape[1],), len(shards))
    return shards.movedim(0, move.dim).flatten(move.dim, move.dim + 1)


def _stack(member: GroupedWeight, gradient: Tensor, ranks: int) -> Tensor:
    """A gradient of the gathered weight to [rank, *stored shape]."""
    move = member.plan.forward[0]
    if move.dim == 0:
        return to_rank_major(gradient, move.rows or (gradient.shape[0] // ranks,), ranks).unflatten(0, (ranks, -1))
    return gradient.unflatten(move.dim, (ranks, -1)).movedim(move.dim, 0)
