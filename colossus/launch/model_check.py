"""Checks schedule and model before launch: sizes that would fail on the ranks are refused before they start."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.config import Config, ConfigError
from colossus.registry import MODELS, STRATEGIES
from colossus.schedule.build import make_schedule


@dataclass(frozen=True)
class ModelInfo:
    """Number of parameters of the model and of rank 0's shards of it, and a line for each pipeline stage.

    What rank 0 holds is None where the run decides it, which looks at the data first (owners of tables).
    """

    num_parameters: int
    num_local_parameters: int | None
    stages: tuple[str, ...] = ()


def check_schedule(config: Config) -> None:
    """Make the schedule and check it, without torch.

    Raises:
        ConfigError: naming the first action that is wrong.
    """
    schedule = config.schedule
    try:
        make_schedule(schedule.type, config.parallel.pipeline.size, schedule.microbatches, **schedule.options)
    except ValueError as error:
        raise ConfigError([f"schedule: {error}"], config.source) from error


def check_model(config: Config) -> ModelInfo | None:
    """Build rank 0's shards of the model on the meta device, under a context that connects to no other rank.

    Returns:
        None when the config has no model, or when its constructor fails for another reason than a size or an option:
        the ranks raise that with a traceback.

    Raises:
        ConfigError: for what the layers refuse, and for stages that cannot be cut out of the model.
    """
    check_schedule(config)
    # torch is imported here, once the config is known to be right in itself: it takes seconds
    from colossus.construct.build_model import build
    from colossus.context.parallel_context import ParallelContext
    from colossus.engine.checkpointed_modules import with_activation_checkpoint
    from colossus.engine.stages import PipelineRuntime
    from colossus.layout.parameter import num_parameters
    from colossus.sparse.survey import survey
    from colossus.sparse.table_group import require_optimizer_of_tables

    if config.model is None:
        return None
    spec = config.model.spec()
    total = 0
    try:
        context = ParallelContext.from_config(config, connect=False)
        pipeline = PipelineRuntime(config, context)
        strategy = STRATEGIES.build(config.parallel.data_strategy)

        def cut(model: object) -> None:
            nonlocal total
            total = num_parameters(model)  # type: ignore[arg-type]
            tables = survey(model, context)  # type: ignore[arg-type]
            try:
                require_optimizer_of_tables(config.optimizer, bool(tables.untied), is_given=False)
                strategy.check_tables(tables)
            except ValueError as error:
                raise ConfigError(str(error)) from error
            pipeline.split(model)  # type: ignore[arg-type]
            strategy.prepare(model, context)

        factory = with_activation_checkpoint(lambda: MODELS.build(spec), config.train.activation_checkpoint)
        model = build(factory, context, materialize=False, prepare=cut)
    except ConfigError as error:
        raise ConfigError(error.problems, config.source) from None
    except ValueError as error:
        raise ConfigError([f"the model cannot be built under this plan: {error}"], config.source) from error
    except Exception:
        return ModelInfo(total, None) if total else None
    held = sum(parameter.numel() for parameter in model.parameters())
    stages = pipeline.partition.describe() if pipeline.partition is not None else []
    return ModelInfo(total, held, tuple(stages))
