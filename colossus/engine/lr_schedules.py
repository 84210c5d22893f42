"""Learning rates: shapes for `LearningRates`, each a factor of the peak, and the class that sets them. No torch.

Options for points in time are whole numbers of steps of the run, counted from its first step, or fractions of
``train.schedule_steps``.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, Field

from colossus.config import Config
from colossus.config.learning_rates import LearningRates
from colossus.config.section import FROM_LIST, Count, Positive, is_number

if TYPE_CHECKING:
    import torch


def _when(value: Any) -> Any:
    if (is_number(value) and value >= 1) or (isinstance(value, float) and 0 < value < 1):
        return value
    raise ValueError(f"must be steps, 1 or more, or a fraction of train.schedule_steps like 0.2, got {value!r}")


When = Annotated[Any, AfterValidator(_when)]


def constant(progress: float, min_ratio: float) -> float:
    """Keep the learning rate."""
    return 1.0


def cosine(progress: float, min_ratio: float) -> float:
    """Decrease along half a cosine (1608.03983) to ``min_ratio`` of the peak."""
    return min_ratio + (1.0 - min_ratio) * _half_cosine(progress)


def linear(progress: float, min_ratio: float) -> float:
    """Decrease in a straight line to ``min_ratio`` of the peak."""
    return 1.0 - (1.0 - min_ratio) * progress


def polynomial(progress: float, min_ratio: float, power: Positive = 1.0) -> float:
    """Decrease to ``min_ratio`` by the remaining part of the schedule to the ``power``."""
    return min_ratio + (1.0 - min_ratio) * (1.0 - progress) ** power


def wsd(
    progress: float,
    min_ratio: float,
    step: int,
    schedule_steps: int,
    warmup_steps: int,
    decay: When = 0.2,
    shape: Literal["linear", "cosine", "1-sqrt"] = "linear",
) -> float:
    """Keep the peak, then decrease to ``min_ratio`` in the last ``decay`` steps: warm-up, stable, decay (2404.06395).

    In the shape ``1-sqrt`` the factor is 1 less the root of the part of the decay that is over (2405.18392, section 4).
    """
    length = _in_steps(decay, schedule_steps)
    if warmup_steps + length > schedule_steps:
        raise ValueError(
            f"warmup_steps = {warmup_steps} and decay = {length} steps are more than train.schedule_steps = "
            f"{schedule_steps}; for a part of a run set that key to the length of the whole run"
        )
    done = min(1.0, max(0.0, (step - (schedule_steps - length)) / length))
    remaining = {"linear": 1.0 - done, "cosine": _half_cosine(done), "1-sqrt": 1.0 - math.sqrt(done)}[shape]
    return min_ratio + (1.0 - min_ratio) * remaining


def step(
    progress: float, min_ratio: float, step: int, schedule_steps: int, every: When, gamma: Positive = 0.1
) -> float:
    """Multiply by ``gamma`` every ``every`` steps, down to ``min_ratio``."""
    return max(min_ratio, gamma ** (step // _in_steps(every, schedule_steps)))


def multistep(
    progress: float,
    min_ratio: float,
    step: int,
    schedule_steps: int,
    milestones: Annotated[tuple[When, ...], FROM_LIST, Field(min_length=1)],
    gamma: Positive = 0.1,
) -> float:
    """Multiply by ``gamma`` at each of the ``milestones``, down to ``min_ratio``."""
    return max(
        min_ratio, gamma ** bisect_right(sorted(_in_steps(milestone, schedule_steps) for milestone in milestones), step)
    )


def inverse_sqrt(
    progress: float, min_ratio: float, step: int, warmup_steps: int, timescale: Count | None = None
) -> float:
    """Decrease with the root of the step (1706.03762, section 5.3), down to ``min_ratio``.

    Args:
        timescale: steps after which it has fallen to the root of 1/2; by default those of the warm-up.
    """
    scale = timescale or warmup_steps
    if not scale:
        raise ValueError("inverse_sqrt begins to fall where the warm-up ends: set warmup_steps, or timescale")
    return max(min_ratio, math.sqrt(scale / (step - warmup_steps + scale)))


def cosine_restarts(
    progress: float,
    min_ratio: float,
    step: int,
    schedule_steps: int,
    warmup_steps: int,
    cycles: Count = 1,
    mult: Count = 1,
) -> float:
    """Repeat half a cosine (SGDR, 1608.03983).

    ``cycles`` fill the steps after the warm-up, each ``mult`` times as long as the one before.
    """
    # in units that divide each cycle: a rounded fraction would end a cycle a step late
    steps = max(1, schedule_steps - warmup_steps)
    position, length = (step - warmup_steps) * sum(mult**cycle for cycle in range(cycles)), steps
    for _ in range(cycles - 1):
        if position < length:
            break
        position, length = position - length, length * mult
    return cosine(min(1.0, position / length), min_ratio)


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _in_steps(when: float, schedule_steps: int) -> int:
    return int(when) if when >= 1 else max(1, round(when * schedule_steps))


class LearningRate(LearningRates):
    """The learning rate of an optimizer's parameter groups.

    A group with an ``lr`` or an ``lr_scale`` of its own has that factor of the schedule's.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(config)
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            if "lr" in group:
                group.setdefault("lr_scale", float(group["lr"]) / config.optimizer.lr)

    def set(self, step: int) -> float:
        """Set the learning rate of a step, and return it."""
        lr = self.at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr
