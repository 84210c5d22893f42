"""The gradient norm of each parameter group of the optimizer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.host_transfer import send_to
from colossus.layout.parameter import spec_of


class GroupNorms:
    """To which parameter group of the optimizer each entry of a `GradientNorm` belongs.

    A group is known by its ``name``, or by its number where it has none. Ranks need not have the same ones, nor need a
    group have a parameter on each (stages of a pipeline): all count for all groups that have one on any rank.

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
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._sizes:
            self._names = self._agree_on_names()
            self._index = self._index_of_entries()
            self._sizes = sizes
        return self._names

    def _own(self) -> list[tuple[int, str, list[nn.Parameter]]]:
        """Number, name and parameters of this rank's groups, without those that are empty here."""
        groups = enumerate(self._optimizer.param_groups)
        own = [(number, str(group.get("name", number)), group["params"]) for number, group in groups]
        return [one for one in own if any(param.numel() for param in one[2])]

    def _agree_on_names(self) -> tuple[str, ...]:
        """In the order of their numbers, where ranks agree on these."""
        number_of: dict[str, int] = {}
        for of_rank in all_gather_object([(number, name) for number, name, _ in self._own()], self._group):
            for number, name in of_rank:
                number_of[name] = min(number, number_of.get(name, number))
        return tuple(sorted(number_of, key=number_of.__getitem__))

    def _index_of_entries(self) -> Tensor:
        """[entries] the place of each one's group among the names; behind the last where the optimizer lacks it."""
        by_id: dict[int, int] = {}
        by_name: dict[str, int] = {}  # a strategy may give the optimizer other objects, of the same names
        for _, name, params in self._own():
            for param in params:
                by_id[id(param)] = by_name[spec_of(param).name] = self._names.index(name)
        none = len(self._names)
        entries = self._norm.params
        index = [by_id.get(id(param), by_name.get(spec_of(param).name, none)) for param in entries]
        return torch.tensor(index, dtype=torch.int64)

    def sum_squares(self, squares: Tensor) -> Tensor:
        """Of each group the sum of what `GradientNorm.local_squares` gave for its entries: float64 [groups]."""
        num_groups = len(self.names)
        if self._index.device != squares.device:
            self._index = send_to(squares.device, self._index)
        sums = torch.zeros(num_groups + 1, dtype=squares.dtype, device=squares.device)
        return sums.index_add_(0, self._index, squares)[:num_groups]
