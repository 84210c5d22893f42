"""A collective of a step as a planner knows it. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.comm import accounting


@dataclass(frozen=True)
class Collective:
    """One that a rank starts.

    Attributes:
        operation, axes, dtype: as `colossus.comm.accounting` counts them.
        ranks: of its group.
        held: bytes that a rank holds before.
        mesh_axes: over which its ranks lie, of the plan's grid; none where they are on one host.
    """

    operation: str
    axes: str
    ranks: int
    held: float
    dtype: str
    mesh_axes: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Bytes that this rank sends."""
        return accounting.sent(self.operation.partition(" ")[0], self.ranks, self.held)
