"""Loss spikes: a loss far above those before it raises, so that the run goes back and leaves batches out.

PaLM was trained in this way (2204.02311, section 5.1): from a checkpoint before the spike, without the batches around
it.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

from colossus.comm.late import Late
from colossus.config.training import LossSpikes
from colossus.data_parallel.strategy import Strategy
from colossus.engine.results import StepResult
from colossus.engine.rollback import Rollback


class LossSpike(RuntimeError):
    """The loss of a step is a spike. Raised on all ranks.

    Attributes:
        rollback: how the launcher continues; None if the run should end.
    """

    def __init__(self, message: str, rollback: Rollback | None) -> None:
        super().__init__(message)
        self.rollback = rollback


def require_one_loss(strategy: Strategy) -> None:
    """Raise ValueError under an inexact strategy."""
    if not strategy.exact:
        raise ValueError(
            "train.on_spike: under an inexact strategy each replica has a loss of its own, and none waits for those of "
            "the others; remove this key"
        )


class SpikeWatch:
    """The comparison of the loss of each step with the median of those before it.

    The losses are not saved: after a restart as many steps pass before one is judged. If the median is not above 0 (a
    log-density), nothing is judged. On an accelerator nothing waits for a loss: it is judged after the next step.

    Args:
        section: ``train.on_spike``.
        strategy: the data-parallel strategy.

    Raises:
        ValueError: under an inexact strategy, in which each replica has a loss of its own.
    """

    def __init__(self, section: LossSpikes, strategy: Strategy) -> None:
        require_one_loss(strategy)
        self._section = section
        self._losses: deque[float] = deque(maxlen=section.window)
        self._results: Late[StepResult, None] = Late()

    def after_step(self, result: StepResult) -> None:
        """Raise `LossSpike` on all ranks if a loss is one."""
        for due, _ in self._results.push(result, None):
            self._judge(due)

    def _judge(self, result: StepResult) -> None:
        section, loss = self._section, result.loss
        if not math.isfinite(loss):  # train.on_nonfinite reports it
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
