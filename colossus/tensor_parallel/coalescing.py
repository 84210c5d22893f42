"""Which weights move together."""

from __future__ import annotations

from collections.abc import Callable, Container

from torch import Tensor

from colossus.context.precision import Precision
from colossus.tensor_parallel.move_plan import reduce_wgrad
from colossus.tensor_parallel.weight_group import GroupedWeight, WeightGroup


class Coalescing:
    """The groups of weights that are gathered in one collective, and whose gradients are reduced in one.

    Args:
        is_wanted: whether any are.
        accumulate: adds a gradient to that of a weight.
    """

    def __init__(self, is_wanted: bool, accumulate: Callable[[Tensor, Tensor], None], precision: Precision) -> None:
        self.is_wanted, self._accumulate, self._precision = is_wanted, accumulate, precision
        self._groups: dict[int, WeightGroup] = {}
        self._asked: set[int] = set()

    def is_coalesced(self, weight: Tensor) -> bool:
        """Whether `coalesce` was called for this weight."""
        return id(weight) in self._asked

    def coalesce(self, *members: GroupedWeight) -> None:
        """From here on move these weights together, where one collective can."""
        self._asked.update(id(member.weight) for member in members)
        if self.is_wanted and all(member.can_coalesce for member in members):
            groups = {member.plan.forward[0].group for member in members}
            dtypes = {member.weight.dtype for member in members}
            if len(groups) == len(dtypes) == 1:
                group = WeightGroup(members, self._precision)
                self._groups.update({id(member.weight): group for member in members})

    def group_of(self, weight: Tensor) -> WeightGroup | None:
        """The weights that this one moves with; none of them has hooks, which run in each's backward."""
        group = self._groups.get(id(weight))
        return None if group is None or group.has_hooks else group

    def flush(self, only: Container[int] | None) -> None:
        """Reduce gradients whose group has not become complete. Of weights in ``only``, by id; None: of all."""
        for group in dict.fromkeys(self._groups.values()):
            for member in group.members:
                if only is None or id(member.weight) in only:
                    gradient = group.gradients.pop(id(member.weight), None)
                    if gradient is not None:
                        total = reduce_wgrad(member.weight, gradient, member.plan, self._precision).wait()
                        self._accumulate(member.weight, total)

    def clear(self) -> None:
        """Free what is gathered, without reducing what is left."""
        for group in self._groups.values():
            group.gathered.clear()
            group.gradients.clear()
