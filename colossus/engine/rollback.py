"""The order of a run to go back. No torch."""

from __future__ import annotations

from typing import NamedTuple


class Rollback(NamedTuple):
    """An order to go back.

    Attributes:
        until: steps done in the newest save that the run may resume from; later ones are removed with the branch that
            it leaves.
        skip_batches: batches after that save that are left out; None: those up to the one of step ``until + 1``.
        time: the time of the launcher's decision, in seconds since the epoch, which is saved, so that batches are left
            out once; 0 before it.
    """

    until: int
    skip_batches: int | None = 0
    time: float = 0.0
