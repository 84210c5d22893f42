"""A predicted collective of a step. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.comm import accounting


@dataclass(frozen=True)
class Collective:
    """A collective that a rank starts.

    Attributes:
        operation, axes, dtype: the names under which `colossus.comm.accounting` counts it.
        ranks: size of its group.
        input_bytes: bytes of a rank's input.
        mesh_axes: axes of the plan's grid along which its ranks lie; empty if they share a host.
    """

    operation: str
    axes: str
    ranks: int
    input_bytes: float
    dtype: str
    mesh_axes: tuple[str, ...]

    @property
    def sent(self) -> float:
        """Return the bytes that a rank sends."""
        return accounting.sent(self.operation.partition(" ")[0], self.ranks, self.input_bytes)
