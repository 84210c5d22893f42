"""A loss far above those before it ends the step in an error: the run goes back, and leaves batches out.

As PaLM was trained (2204.02311, section 5.1): from a checkpoint before the spike, without the batches around it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import NamedTuple

from colossus.config.watches import LossSpikes
from colossus.data_parallel.strategy import Strategy
from colossus.engine.results import StepResult


class Rollback(NamedTuple):
    """How a run goes on that goes back.

    Attributes:
        until: steps done in the newest save that it may go on from.
        skip_batches: that are left out behind that save; None: those up to the one of step ``until + 1``.
    """

    until: int
    skip_batches: int | None = 0


class LossSpike(RuntimeError):
    """The loss of a step is a spike. Raised on all ranks.

    Attributes:
        rollback: how the launcher is to go on; None where the run is to end.
    """

    def __init__(self, message: str, rollback: Rollback | None) -> None:
        super().__init__(message)
        self.rollback = rollback


def require_one_loss(strategy: Strategy) -> None:
    """Raises a ValueError under an inexact strategy."""
    if not strategy.exact:
        raise ValueError(
            "train.on_spike: under an inexact strategy each replica has a loss of its own, and none waits to hear "
            "those of the others; leave it out"
        )


class SpikeWatch:
    """Compares the loss of each step with the median of those before it. What it has seen is not saved: behind a
    restart as many losses are seen first.

    Where the median is not above 0, as of a log-density, nothing is judged. On an accelerator nothing waits for a loss:
    it is looked at after the next step.

    Args:
        section: ``train.on_spike``.

    Raises:
        ValueError: under an inexact strategy, where each replica has a loss of its own.
    """

    def __init__(self, section: LossSpikes, strategy: Strategy) -> None:
        require_one_loss(strategy)
        self._section = section
        self._losses: deque[float] = deque(maxlen=section.window)
        self._pending: StepResult | None = None

    def after_step(self, result: StepResult) -> None:
        """Raises `LossSpike`, on all ranks."""
        pending, self._pending = self._pending, result
        if pending is not None:
            self._look(pending)
        if not result.send_to_host():
            self._pending = None
            self._look(result)

    def _look(self, result: StepResult) -> None:
        section, loss = self._section, result.loss
        if not math.isfinite(loss):  # which train.on_nonfinite knows of
            return
        median = statistics.median(self._losses) if len(self._losses) == section.window else math.inf
        if loss <= section.factor * median or median <= 0:
            self._losses.append(loss)
            return
        rollback = Rollback(result.step - 1, section.skip_batches) if section.action == "rollback" else None
        raise LossSpike(
            f"the loss of step {result.step} is {loss:.6g}, more than {section.factor:g} times {median:.6g}, the "
            f"median of the {section.window} steps before (train.on_spike)",
            rollback,
        )
