"""What the engine asks of a data-parallel strategy."""

from __future__ import annotations

from typing import Protocol


class Strategy(Protocol):
    """What the data axis does with gradients, overlapped with backward where it can.

    Built once for an engine, with the model, its context, ``bucket_mb`` and the parameters of each pipeline stage (see
    `AllReduce`). In each step, for the stages of this rank in the order of their reductions: `arm`, the stage's last
    backward, `start`; then `finish` once.

    Attributes:
        exact: whether replicas stay equal, and the numbers of a step are those of the global batch.
    """

    exact: bool

    def arm(self, stage: int) -> None:
        """The backward that follows is a stage's last of the step: what it completes may be reduced at once."""

    def start(self, stage: int) -> None:
        """Start the reductions of a stage that have not been started, without waiting for any."""

    def finish(self) -> None:
        """Wait until every gradient is reduced."""

    def abandon(self) -> None:
        """Forget a step that failed, without a collective."""
