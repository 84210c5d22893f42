"""The gradient norm of each parameter group of the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.engine.gradients.gradient_norm import GradientNorm
from colossus.layout.parameter import spec_of


class GroupNorms:
    """To which parameter group of the optimizer each entry of a `GradientNorm` belongs.

    A group is known by its ``name``, or by its number where it has none. Ranks need not have the same ones, nor need a
    group have a parameter on each (stages of a pipeline): all count for all groups that any rank has.

    Args:
        group: the ranks that sum the numbers of a step.
    """

    def __init__(self, norm: GradientNorm, optimizer: torch.optim.Optimizer, group: AxisGroup) -> None:
        self._norm, self._optimizer, self._group = norm, optimizer, group
        self._names: tuple[str, ...] = ()
        self._sizes: list[int] | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of all groups. Collective at first, and after parameters have been added to the optimizer."""
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            own = tuple(str(group.get("name", number)) for number, group in enumerate(groups))
            self._names = tuple(dict.fromkeys(name for names in all_gather_object(own, self._group) for name in names))
            self._index = self._index_of_entries(own)
            self._sizes = sizes
        return self._names

    def _index_of_entries(self, own: tuple[str, ...]) -> Tensor:
        """[entries] the number of each one's group; behind the last where the optimizer does not have it."""
        by_id: dict[int, int] = {}
        by_name: dict[str, int] = {}  # a strategy may give the optimizer other objects, of the same names
        for name, group in zip(own, self._optimizer.param_groups, strict=True):
            number = self._names.index(name)
            for param in group["params"]:
                by_id[id(param)] = number
                if spec_of(param).name:
                    by_name[spec_of(param).name] = number
        none = len(self._names)
        params = self._norm.params
        index = [by_id.get(id(param), by_name.get(spec_of(param).name, none)) for param in params]
        return torch.tensor(index, dtype=torch.int64, device=params[0].device if params else None)

    def sum_squares(self, squares: Tensor) -> Tensor:
        """Of each group the sum of what `GradientNorm.local_squares` gave for its entries: float64 [groups]."""
        num_groups = len(self.names)
        sums = torch.zeros(num_groups + 1, dtype=squares.dtype, device=squares.device)
        return sums.index_add_(0, self._index.to(squares.device), squares)[:num_groups]
