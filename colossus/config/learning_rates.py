"""The learning rate as a function of the step, from ``lr_schedule``: a warm-up and a shape.

No torch, unless the schedule is a scheduler of torch.
"""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable
from typing import Any, SupportsFloat

from colossus.config.errors import brief
from colossus.config.schema import Config, LRSchedule
from colossus.registry import LR_SCHEDULES

#: most steps of a torch scheduler that a check runs; each takes some 10 us
_LOOK_AHEAD = 10_000


class LearningRates:
    """The learning rate of each step.

    A shape is called as f(progress, min_ratio, **options) and returns a factor of ``optimizer.lr``. The progress is 0
    after the warm-up and 1 at the end of the schedule. A shape also receives those of ``step`` (of the run, from 0),
    ``schedule_steps``, ``warmup_steps`` and ``lr`` that it has as arguments. A callable whose first argument is
    ``optimizer`` is no shape: it makes a scheduler of torch (`_TorchScheduler`).

    Args:
        config: config of the run.
    """

    def __init__(self, config: Config) -> None:
        schedule, self._peak = config.lr_schedule, config.optimizer.lr
        self._warmup_steps, self._end = schedule.warmup_steps, config.train.schedule_steps
        shape: Callable[..., Any] = _component(schedule)
        if makes_scheduler(shape):
            shape = _TorchScheduler(shape)
        names = _parameters(shape)
        place = {"schedule_steps": self._end, "warmup_steps": self._warmup_steps, "lr": self._peak}
        self._shape, self._takes_step = shape, "step" in names and "step" not in schedule.options
        self._min_ratio = schedule.min_ratio
        self._options = {name: value for name, value in place.items() if name in names} | schedule.options

    def at(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0: a linear warm-up, then the schedule's shape."""
        if step < self._warmup_steps:
            return self._peak * (step + 1) / self._warmup_steps
        return self._peak * self.part(step)

    def progress(self, step: int) -> float:
        """Return the part of the schedule after the warm-up that is over, 0 to 1."""
        return min(1.0, (step - self._warmup_steps) / max(1, self._end - self._warmup_steps))

    def part(self, step: int) -> Any:
        """Return the value of the shape at a step after the warm-up."""
        options = {"step": step, **self._options} if self._takes_step else self._options
        return self._shape(self.progress(step), self._min_ratio, **options)


def makes_scheduler(shape: Callable[..., Any]) -> bool:
    """Return whether it is a class of torch's schedulers, or a function that makes one."""
    return _parameters(shape)[:1] == ["optimizer"]


class _TorchScheduler:
    """A scheduler of torch as a shape.

    It runs ahead on an optimizer of one parameter, and its learning rates are stored. So it has no state to save, and a
    run resumes under any plan. Other options that it changes (momentum) are not used.

    Args:
        make: called as f(optimizer, **options).
    """

    def __init__(self, make: Callable[..., Any]) -> None:
        self._make = make
        self._optimizer: Any = None
        self._scheduler: Any = None
        #: learning rates of the steps after the warm-up
        self._rates = array("d")

    def __call__(
        self, progress: float, min_ratio: float, step: int, warmup_steps: int, lr: float, **options: Any
    ) -> float:
        if min_ratio:
            raise ValueError("min_ratio is for shapes: a scheduler of torch has an end of its own, such as eta_min")
        if self._scheduler is None:
            self._start(lr, options)
        while len(self._rates) <= step - warmup_steps:
            if self._rates:
                self._scheduler.step()
            self._rates.append(float(self._optimizer.param_groups[0]["lr"]))
        return self._rates[step - warmup_steps] / lr

    def _start(self, lr: float, options: dict[str, Any]) -> None:
        import torch

        class OneParameter(torch.optim.Optimizer):
            """An optimizer that does not run the constructor of its base, which imports torch._dynamo (1.6 s)."""

            def __init__(self) -> None:
                self.defaults = {"lr": lr, "momentum": 0.9}  # some schedulers refuse an optimizer without a momentum
                self.param_groups = [{"params": [torch.nn.Parameter(torch.zeros(()))], **self.defaults}]

            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                pass

        self._optimizer = OneParameter()
        scheduler = self._make(self._optimizer, **options)
        try:
            inspect.signature(scheduler.step).bind()
        except TypeError as error:
            raise ValueError(
                f"its step is called without arguments ({error}): a learning rate is a function of the step here, the "
                f"same on all ranks and after a resume; use a scheduler that counts steps"
            ) from None
        self._optimizer.step()  # torch warns of a scheduler that steps before
        self._scheduler = scheduler


# -- problems of a schedule ---------------------------------------------------------------------------------------


def learning_rate_problems(config: Config) -> list[str]:
    """Return the problems of the values of ``lr_schedule``, whose options are checked, at some steps.

    The steps are the first after the warm-up, one in the middle, and the last.
    """
    schedule, shape = config.lr_schedule, _component(config.lr_schedule)
    is_ours = str(getattr(shape, "__module__", "")).startswith("colossus.")
    rates, first = LearningRates(config), schedule.warmup_steps
    last = max(first, config.train.steps - 1)
    if makes_scheduler(shape):
        last = min(last, first + _LOOK_AHEAD)
    for step in (first, (first + last) // 2, last):
        behaviour = ""
        try:
            part = rates.part(step)
            if not isinstance(part, SupportsFloat) or not float(part) >= 0:
                behaviour = f"returns {brief(part)}"
        except Exception as error:
            if is_ours or makes_scheduler(shape):
                name = "" if is_ours else f"{getattr(shape, '__name__', shape)}: "
                return [f"lr_schedule: {name}{error}"]
            behaviour = f"raises {type(error).__name__}: {error}"
        if behaviour:
            return [
                f"lr_schedule.type: is called as f(progress, min_ratio, **options), with progress from 0 to 1, and "
                f"returns the learning rate as a part of optimizer.lr, 0 or more; at progress {rates.progress(step):g} "
                f"it {behaviour}"
            ]
    return []


def _component(schedule: LRSchedule) -> Any:
    return LR_SCHEDULES.get(schedule.type) if isinstance(schedule.type, str) else schedule.type


def _parameters(shape: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(shape).parameters)
    except (TypeError, ValueError):
        return []
