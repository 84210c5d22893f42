"""Weights that are gathered, and whose gradients are reduced, in one collective: fewer calls, the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.context.groups import AxisGroup
from colossus.tensor_parallel.route import Route, by_output, by_rank


@dataclass(frozen=True)
class Member:
    """A weight with its route: one gather there, one reduce-scatter back."""

    weight: nn.Parameter
    route: Route

    @property
    def can_join(self) -> bool:
        return [step.operation for step in self.route.forward] == ["gather"]


@dataclass(eq=False)
class WeightGroup:
    """Weights that are used one after the other. All must be gathered over the same group.

    Attributes:
        used: as gathered and not asked for yet, with the version of the weight.
        gradients: made and not reduced yet.
    """

    members: Sequence[Member]
    used: dict[int, tuple[int, Tensor]] = field(default_factory=dict)
    gradients: dict[int, Tensor] = field(default_factory=dict)

    @property
    def group(self) -> AxisGroup:
        return self.members[0].route.forward[0].group

    def fetch(self, weight: Tensor) -> Tensor:
        """The weight as used; the first that is asked for brings the others."""
        held = self.used.pop(id(weight), None)
        if held is not None and held[0] == weight._version:
            return held[1]
        flat = torch.cat([member.weight.detach().reshape(-1) for member in self.members])
        gathered = collectives.all_gather(flat, self.group).wait().view(self.group.size, -1)
        parts = gathered.split([member.weight.numel() for member in self.members], dim=1)
        for member, part in zip(self.members, parts, strict=True):
            used = _assemble(member, part.unflatten(1, member.weight.shape))
            self.used[id(member.weight)] = member.weight._version, used
        return self.used.pop(id(weight))[1]

    def reduce(
        self, weight: Tensor, gradient: Tensor, accumulate_grad: Callable[[Tensor, Tensor], None]
    ) -> Pending | None:
        """The stored part of a gradient once those of all members are there; theirs are delivered then."""
        held = self.gradients.get(id(weight))
        self.gradients[id(weight)] = gradient if held is None else held.add_(gradient)
        wanted = [member for member in self.members if member.weight.requires_grad]
        if any(id(member.weight) not in self.gradients for member in wanted):
            return None
        stacked = [_disassemble(member, self.gradients.pop(id(member.weight)), self.group.size) for member in wanted]
        flat = torch.cat([part.flatten(1) for part in stacked], dim=1)

        def take(mine: Tensor) -> Tensor:
            own = None
            for member, part in zip(wanted, mine[0].split([m.weight.numel() for m in wanted]), strict=True):
                part = part.view(member.weight.shape)
                if member.weight is weight:
                    own = part
                else:
                    accumulate_grad(member.weight, part.clone())
            assert own is not None
            return own

        return collectives.reduce_scatter(flat, self.group).then(take)


def _assemble(member: Member, parts: Tensor) -> Tensor:
    """[rank, *stored] to the weight as used."""
    step = member.route.forward[0]
    if step.dim == 0:
        return by_output(parts.flatten(0, 1), step.rows or (parts.shape[1],), len(parts))
    return parts.movedim(0, step.dim).flatten(step.dim, step.dim + 1)


def _disassemble(member: Member, made: Tensor, ranks: int) -> Tensor:
    """A gradient as made to [rank, *stored]."""
    step = member.route.forward[0]
    if step.dim == 0:
        return by_rank(made, step.rows or (made.shape[0] // ranks,), ranks).unflatten(0, (ranks, -1))
    return made.unflatten(step.dim, (ranks, -1)).movedim(step.dim, 0)
