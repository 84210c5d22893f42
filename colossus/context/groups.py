"""A process group over one axis or a tuple of axes."""

from __future__ import annotations

from dataclasses import dataclass

from torch import distributed as dist


@dataclass(frozen=True, eq=False)
class AxisGroup:
    """The ranks that differ from this one only along ``axes``.

    Attributes:
        axes: atomic axes, outermost first; they order the ranks of the group.
        ranks: global ranks in group order.
        index: position of this rank in ``ranks``.
        process_group: None when the group has one rank; collectives over it are then the identity.
    """

    axes: tuple[str, ...]
    ranks: tuple[int, ...]
    index: int
    process_group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def name(self) -> str:
        """The c10d name, which the functional collectives take."""
        assert self.process_group is not None
        return self.process_group.group_name

    def neighbour(self, offset: int = 1) -> int:
        """Global rank ``offset`` places further round the group."""
        return self.ranks[(self.index + offset) % self.size]

    def __str__(self) -> str:
        return "x".join(self.axes) if self.axes else "self"
