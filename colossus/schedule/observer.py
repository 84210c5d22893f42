"""Watching a step from inside."""

from __future__ import annotations

from typing import Any

from colossus.schedule.actions import Action


class StepObserver:
    """Base of what is called while a step runs on this rank: override what you need, and append it to
    ``engine.observers``. What is around steps is a `colossus.engine.fit.Hook`.

    Attributes:
        needs_samples: whether `before_forward` wants the samples.
    """

    needs_samples = False

    def before_forward(self, stage: int, microbatch: int, samples: Any) -> None:
        """A stage is about to run; it has ended before another one begins.

        Args:
            samples: this rank's shard of the microbatch, the same for all stages, with all tokens of its sequences;
                None unless ``needs_samples``.
        """

    def after_forward(self, stage: int, microbatch: int, output: Any) -> None:
        """A stage has run; of the last stage, the loss has not."""

    def after_action(self, action: Action, began: float, ended: float) -> None:
        """An action of the schedule is done; times in seconds of `time.perf_counter`."""

    def before_update(self) -> None:
        """Gradients are complete, divided and clipped; the optimizer has not stepped.

        Also in a step that it will skip because some of them are not finite.
        """
