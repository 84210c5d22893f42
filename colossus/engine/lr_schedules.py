"""Learning rates: shapes of `LearningRates`, each a part of the peak, and what sets an optimizer's. No torch.

Options that say when are whole numbers of steps of the run, counted from its first step, or fractions of
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
    raise ValueError(f"must be steps, 1 or more, or a fraction of train.schedule_steps, as 0.2, got {value!r}")


When = Annotated[Any, AfterValidator(_when)]
Below1 = Annotated[float, Field(ge=0, lt=1)]


def constant(progress: float, min_ratio: float) -> float:
    """The learning rate stays."""
    return 1.0


def cosine(progress: float, min_ratio: float) -> float:
    """The learning rate falls along half a cosine (1608.03983) to ``min_ratio`` of its peak."""
    return min_ratio + (1.0 - min_ratio) * _half_cosine(progress)


def linear(progress: float, min_ratio: float) -> float:
    """The learning rate falls in a straight line to ``min_ratio`` of its peak."""
    return 1.0 - (1.0 - min_ratio) * progress


def polynomial(progress: float, min_ratio: float, power: Positive = 1.0) -> float:
    """What is left of the steps, to the ``power``, is left of the way to ``min_ratio``."""
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
    """Warm-up, stable, decay (2404.06395): the learning rate stays, and falls to ``min_ratio`` in the last ``decay``
    steps, by 1 less the root of the part that is done in the shape ``1-sqrt`` (2405.18392, section 4).
    """
    length = _in_steps(decay, schedule_steps)
    if warmup_steps + length > schedule_steps:
        raise ValueError(
            f"warmup_steps = {warmup_steps} and decay = {length} steps are more than train.schedule_steps = "
            f"{schedule_steps}; for a part of a run set that to the length of the whole"
        )
    done = min(1.0, max(0.0, (step - (schedule_steps - length)) / length))
    left = {"linear": 1.0 - done, "cosine": _half_cosine(done), "1-sqrt": 1.0 - math.sqrt(done)}[shape]
    return min_ratio + (1.0 - min_ratio) * left


def step(
    progress: float, min_ratio: float, step: int, schedule_steps: int, every: When, gamma: Positive = 0.1
) -> float:
    """The learning rate is multiplied by ``gamma`` after ``every`` so many steps, down to ``min_ratio``."""
    return max(min_ratio, gamma ** (step // _in_steps(every, schedule_steps)))


def multistep(
    progress: float,
    min_ratio: float,
    step: int,
    schedule_steps: int,
    milestones: Annotated[tuple[When, ...], FROM_LIST, Field(min_length=1)],
    gamma: Positive = 0.1,
) -> float:
    """The learning rate is multiplied by ``gamma`` at each of the ``milestones``, down to ``min_ratio``."""
    return max(min_ratio, gamma ** bisect_right(sorted(_in_steps(each, schedule_steps) for each in milestones), step))


def inverse_sqrt(
    progress: float, min_ratio: float, step: int, warmup_steps: int, timescale: Count | None = None
) -> float:
    """The learning rate falls with the root of the step (1706.03762, section 5.3), down to ``min_ratio``.

    Args:
        timescale: steps after which it has fallen to the root of 1/2; by default those of the warm-up.
    """
    scale = timescale or warmup_steps
    if not scale:
        raise ValueError("inverse_sqrt begins to fall where the warm-up ends: give warmup_steps, or timescale")
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
    """Half a cosine, again and again (SGDR, 1608.03983): ``cycles`` fill the steps behind the warm-up, each ``mult``
    times as long as the one before.
    """
    # in units of which a cycle has a whole number: a fraction that is rounded would end a cycle a step late
    steps = max(1, schedule_steps - warmup_steps)
    left, length = (step - warmup_steps) * sum(mult**cycle for cycle in range(cycles)), steps
    for _ in range(cycles - 1):
        if left < length:
            break
        left, length = left - length, length * mult
    return cosine(min(1.0, left / length), min_ratio)


def one_cycle(
    progress: float,
    min_ratio: float,
    step: int,
    schedule_steps: int,
    warmup_steps: int,
    pct_start: Below1 = 0.3,
    anneal_strategy: Literal["cos", "linear"] = "cos",
    div_factor: Positive = 25.0,
    final_div_factor: Positive = 1e4,
) -> float:
    """Up to the peak and down again (1708.07120), as torch's ``OneCycleLR`` with ``total_steps`` of the schedule.

    Args:
        pct_start: fraction of the steps in which the learning rate rises.
        div_factor: of the peak to the first learning rate.
        final_div_factor: of the first to the last.
    """
    if warmup_steps or min_ratio:
        raise ValueError(
            "one_cycle has its own warm-up (pct_start, div_factor) and its own end (final_div_factor): leave "
            "warmup_steps and min_ratio out"
        )
    first, last, top = 1.0 / div_factor, schedule_steps - 1, pct_start * schedule_steps - 1
    step = min(step, last)
    start, end, done = first, 1.0, step / top if top else 1.0
    if step >= top:
        start, end, done = 1.0, first / final_div_factor, (step - top) / (last - top)
    return end + (start - end) * (_half_cosine(done) if anneal_strategy == "cos" else 1.0 - done)


def _half_cosine(done: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * done))


def _in_steps(when: float, schedule_steps: int) -> int:
    return int(when) if when >= 1 else max(1, round(when * schedule_steps))


class LearningRate(LearningRates):
    """Sets the learning rate of an optimizer's parameter groups.

    A group with an ``lr`` of its own, or an ``lr_scale``, has that share of the schedule's.
    """

    def __init__(self, config: Config, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(config)
        self._optimizer = optimizer
        for group in optimizer.param_groups:
            if "lr" in group:
                group.setdefault("lr_scale", float(group["lr"]) / config.optimizer.lr)

    def set(self, step: int) -> float:
        """Set that of step ``step``, and return it."""
        lr = self.at(step)
        for group in self._optimizer.param_groups:
            group["lr"] = lr * group.get("lr_scale", 1.0)
        return lr
