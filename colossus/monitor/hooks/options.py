"""Options of the hooks that a config names: their ranges, and what a run must have for them. No torch."""

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
    """Options of a hook: those of each are a subclass, which its class is made with."""

    def problems(self, config: Config) -> list[str]:
        """One line for each thing that the hook needs and a run of this config on this machine has not."""
        return []


class MetricOptions(HookOptions):
    """Of hooks that look at a number of each evaluation."""

    #: ``validation_loss``, ``validation_<name>`` of the model's ``eval_metrics``, or what another hook adds
    metric: Name = "validation_loss"
    #: whether the smallest or the largest number is the best
    mode: Literal["min", "max"] = "min"

    def problems(self, config: Config) -> list[str]:
        if config.train.eval_every:
            return []
        return [f"looks at {self.metric!r} of evaluations, and train.eval_every = 0 evaluates never: set it"]


class EarlyStopOptions(MetricOptions):
    #: evaluations in a row that may be no better than the best one
    patience: Count = 3
    #: by how much a number must be better to count as better
    min_delta: NotNegative = 0.0


class BestCheckpointOptions(MetricOptions):
    #: how many of the best are kept
    keep: Count = 1

    def problems(self, config: Config) -> list[str]:
        section, found = config.checkpoint, super().problems(config)
        if section.dir is not None and not section.every:
            found.append(
                f"would save into checkpoint.dir = {section.dir!r}, which no run has for itself while "
                f"checkpoint.every = 0: set checkpoint.every, or leave checkpoint.dir out"
            )
        return found


class CSVOptions(HookOptions):
    #: of the file; None: ``metrics.csv`` in the run folder
    path: Name | None = None


class TrackerOptions(HookOptions):
    """Of hooks that pass rows to another package."""

    #: what is imported, and installed by pip
    package: ClassVar[str]

    def problems(self, config: Config) -> list[str]:
        found = importlib.util.find_spec(self.package)
        if found is not None and found.origin is not None:  # a folder of that name has none
            return []
        return [f"needs {self.package}, which is not installed: pip install {self.package}"]


class TensorBoardOptions(TrackerOptions):
    package = "tensorboard"

    #: None: ``tensorboard`` in the run folder
    log_dir: Name | None = None


class WandBOptions(TrackerOptions):
    package = "wandb"

    #: by default that of the variable WANDB_PROJECT, else the name of the config
    project: Name | None = None
    #: team or user
    entity: Name | None = None
    #: of runs that belong together
    group: Name | None = None
    tags: Names = ()
    #: "offline" writes to the run folder, for `wandb sync`; by default that of the variable WANDB_MODE, else "online"
    mode: Literal["online", "offline", "disabled"] | None = None


class MLflowOptions(TrackerOptions):
    package = "mlflow"

    #: by default that of the variable MLFLOW_EXPERIMENT_NAME, else the name of the config
    experiment: Name | None = None
    #: a server or a database; by default that of the variable MLFLOW_TRACKING_URI, else what MLflow takes
    tracking_uri: Name | None = None


class HistogramsOptions(HookOptions):
    #: steps between them
    every: Count = 100
    #: of equal width, between the smallest and the largest number
    bins: Count = 64
    #: as the optimizer sees them: divided, and clipped
    gradients: bool = True
    #: those that these gradients are of: before the update
    weights: bool = True
    #: of the file; None: ``histograms.jsonl`` in the run folder
    path: Name | None = None

    @model_validator(mode="after")
    def _has_any(self) -> HistogramsOptions:
        if not (self.gradients or self.weights):
            raise ValueError("gradients = False and weights = False leave nothing to count")
        return self


class ThroughputOptions(HookOptions):
    #: steps
    window: Count = 20


def _function(value: Any) -> Any:
    found = imported(value) if isinstance(value, str) else value
    if found is not None and not callable(found):
        raise ValueError(f'must be a function, or "package.module:function", got {brief(value)}')
    return found


Function = Annotated[Callable[..., Any] | str | None, AfterValidator(_function)]


class CallbackOptions(HookOptions):
    """Functions, or ``"package.module:function"``, that are called as the methods of `colossus.engine.Hook` are."""

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
            raise ValueError(f"give a function for one of {', '.join(type(self).model_fields)}")
        return self


class AverageOptions(HookOptions):
    """Of hooks that keep an average of the weights."""

    #: steps between two updates of the average
    every: Count = 1
    #: whether evaluations measure the average, too, a second time over the same data: ``ema.validation_loss`` beside
    #: ``validation_loss``
    evaluate: bool = False

    def problems(self, config: Config) -> list[str]:
        found = [no_average_under(str(config.parallel.strategy.type))] if has_weights_elsewhere(config) else []
        if self.evaluate and not config.train.eval_every:
            found.append("evaluates the average beside the weights, and train.eval_every = 0 evaluates never: set it")
        return found


def has_weights_elsewhere(config: Config) -> bool:
    """Whether what a rank stores after a step may not be the weights of the run."""
    return isinstance(strategy_options(config), PerReplicaOptions)


def no_average_under(strategy: str) -> str:
    return (
        f"cannot average under {strategy}: each replica has weights of its own there, or servers have them; leave the "
        f"hook out, or take a strategy that keeps the same weights on all replicas (all_reduce, zero)"
    )


class EMAOptions(AverageOptions):
    """One of ``decay`` and ``half_life``."""

    #: what is left of the average at an update; 1 - decay is the weight of the new values
    decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    #: steps after which half of the average is of newer weights: decay = 0.5 ** (every / half_life)
    half_life: Positive | None = None
    #: the decay is at most (1 + t) / (10 + t) after t updates, so that the first weights are soon forgotten
    warmup: bool = False

    @model_validator(mode="after")
    def _one(self) -> EMAOptions:
        if (self.decay is None) == (self.half_life is None):
            given = "both" if self.decay is not None else "neither"
            raise ValueError(f"needs decay (0.999, say) or half_life (in steps), and was given {given}")
        return self

    @property
    def decay_of_update(self) -> float:
        if self.decay is not None:
            return self.decay
        assert self.half_life is not None
        return float(0.5 ** (self.every / self.half_life))


class SWAOptions(AverageOptions):
    #: the step whose weights are the first in the average
    start: CountOrZero
