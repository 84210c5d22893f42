"""Options of the hooks that a config names: their ranges, and their requirements for a run. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from colossus.config import Config
from colossus.config.errors import brief
from colossus.config.plans import strategy_options
from colossus.config.section import Count, CountOrZero, Names, NotNegative, Positive, Section
from colossus.data_parallel.options.strategy_options import PerReplicaOptions
from colossus.registry import imported

Name = Annotated[str, Field(min_length=1)]


class HookOptions(Section):
    """Base of the options of hooks; each hook's class is constructed with its subclass."""

    def problems(self, config: Config) -> list[str]:
        """Return a line for each requirement of the hook that a run of this config on this machine does not meet."""
        return []


class MetricOptions(HookOptions):
    """Options of hooks that watch a number of each evaluation."""

    #: ``validation_loss``, ``validation_<name>`` of the model's ``eval_metrics``, or a number of another hook
    metric: Name = "validation_loss"
    #: whether the smallest or the largest number is the best
    mode: Literal["min", "max"] = "min"

    def problems(self, config: Config) -> list[str]:
        if config.train.eval_every:
            return []
        return [f"needs {self.metric!r} of evaluations, but train.eval_every = 0: set it"]


class EarlyStopOptions(MetricOptions):
    #: evaluations in a row without an improvement, after which the run stops
    patience: Count = 3
    #: smallest improvement that counts
    min_delta: NotNegative = 0.0


class BestCheckpointOptions(MetricOptions):
    #: number of best checkpoints that are kept
    keep: Count = 1

    def problems(self, config: Config) -> list[str]:
        section, problems = config.checkpoint, super().problems(config)
        if section.dir is not None and not section.every:
            problems.append(
                f"would save into checkpoint.dir = {section.dir!r}, which no run owns while checkpoint.every = 0: set "
                f"checkpoint.every, or remove checkpoint.dir"
            )
        return problems


class CSVOptions(HookOptions):
    #: path of the file; None: ``metrics.csv`` in the run folder
    path: Name | None = None


class TrackerOptions(HookOptions):
    """Options of hooks that pass rows to another package."""

    #: name of the package, which pip installs
    package: ClassVar[str]

    def problems(self, config: Config) -> list[str]:
        spec = importlib.util.find_spec(self.package)
        if spec is not None and spec.origin is not None:  # a folder of that name has no origin
            return []
        return [f"needs {self.package}, which is not installed: pip install {self.package}"]


class TensorBoardOptions(TrackerOptions):
    package = "tensorboard"

    #: folder of the files; None: ``tensorboard`` in the run folder
    log_dir: Name | None = None


class WandBOptions(TrackerOptions):
    package = "wandb"

    #: project; by default the variable WANDB_PROJECT, else the name of the config
    project: Name | None = None
    #: team or user
    entity: Name | None = None
    #: group of runs
    group: Name | None = None
    tags: Names = ()
    #: "offline" writes to the run folder, for `wandb sync`; by default that of the variable WANDB_MODE, else "online"
    mode: Literal["online", "offline", "disabled"] | None = None


class MLflowOptions(TrackerOptions):
    package = "mlflow"

    #: experiment; by default the variable MLFLOW_EXPERIMENT_NAME, else the name of the config
    experiment: Name | None = None
    #: a server or a database; by default the variable MLFLOW_TRACKING_URI, else MLflow's own default
    tracking_uri: Name | None = None


class HistogramsOptions(HookOptions):
    #: steps between histograms
    every: Count = 100
    #: number of bins of equal width, between the smallest and the largest number
    bins: Count = 64
    #: whether gradients are counted, after division and clipping
    gradients: bool = True
    #: whether parameters are counted, before the update
    weights: bool = True
    #: path of the file; None: ``histograms.jsonl`` in the run folder
    path: Name | None = None

    @model_validator(mode="after")
    def _has_any(self) -> HistogramsOptions:
        if not (self.gradients or self.weights):
            raise ValueError("gradients = False and weights = False leave nothing to count")
        return self


class ThroughputOptions(HookOptions):
    #: number of last steps
    window: Count = 20


def _function(value: Any) -> Any:
    function = imported(value) if isinstance(value, str) else value
    if function is not None and not callable(function):
        raise ValueError(f'must be a function, or "package.module:function", got {brief(value)}')
    return function


Function = Annotated[Callable[..., Any] | str | None, AfterValidator(_function)]


class CallbackOptions(HookOptions):
    """Functions, or ``"package.module:function"``, that are called like the methods of `colossus.engine.Hook`."""

    #: f(engine)
    on_train_start: Function = None
    #: f(engine)
    on_step_start: Function = None
    #: f(engine, result)
    on_step_end: Function = None
    #: f(engine, summary) -> further numbers of the evaluation, by name
    add_to_evaluation: Function = None
    #: f(engine, summary)
    on_eval_end: Function = None
    #: f(row) -> further numbers for the row of a step, by name; on the logging rank
    add_to_row: Function = None
    #: f(row), on the logging rank
    on_row: Function = None
    #: f(engine)
    on_save: Function = None
    #: f(engine, saved)
    on_checkpoint: Function = None
    #: f(engine)
    on_train_end: Function = None
    #: f(engine, error)
    on_exception: Function = None

    @model_validator(mode="after")
    def _calls_any(self) -> CallbackOptions:
        if all(getattr(self, name) is None for name in type(self).model_fields):
            raise ValueError(f"set a function for one of {', '.join(type(self).model_fields)}")
        return self


class AverageOptions(HookOptions):
    """Options of hooks that average the weights."""

    #: steps between two updates of the average
    every: Count = 1
    #: whether evaluations run a second time with the average: ``ema.validation_loss`` beside ``validation_loss``
    evaluate: bool = False

    def problems(self, config: Config) -> list[str]:
        problems = [no_average_under(str(config.parallel.strategy.type))] if has_weights_elsewhere(config) else []
        if self.evaluate and not config.train.eval_every:
            problems.append("evaluates the average beside the weights, but train.eval_every = 0: set it")
        return problems


def has_weights_elsewhere(config: Config) -> bool:
    """Return whether the weights of the run may be elsewhere than on the ranks: on other replicas, or on servers."""
    return isinstance(strategy_options(config), PerReplicaOptions)


def no_average_under(strategy: str) -> str:
    return (
        f"cannot average under {strategy}: each replica has weights of its own there, or servers have them; remove the "
        f"hook, or use a strategy with the same weights on all replicas (all_reduce, zero)"
    )


class EMAOptions(AverageOptions):
    """Options of the moving average: one of ``decay`` and ``half_life``."""

    #: weight of the old average at an update; 1 - decay is the weight of the new values
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: steps after which newer weights are half of the average: decay = 0.5 ** (every / half_life)
    half_life: Positive | None = None
    #: whether the decay is at most (1 + t) / (10 + t) after t updates, so that the first weights fade soon
    warmup: bool = False

    @model_validator(mode="after")
    def _one(self) -> EMAOptions:
        if (self.decay is None) == (self.half_life is None):
            number = "both" if self.decay is not None else "neither"
            raise ValueError(f"needs decay (for example 0.999) or half_life (in steps), but got {number}")
        return self

    @property
    def decay_of_update(self) -> float:
        if self.decay is not None:
            return self.decay
        assert self.half_life is not None
        return float(0.5 ** (self.every / self.half_life))


class SWAOptions(AverageOptions):
    #: first step whose weights are averaged
    start: CountOrZero
