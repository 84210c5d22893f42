"""From a config to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from colossus.comm import log, shared_memory
from colossus.config import Config, load_config, resolve_sizes
from colossus.context.parallel_context import ParallelContext
from colossus.data.loader import Loaders
from colossus.data.make_loaders import loaders_of
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.build_optimizer import OptimizerFactory, build_optimizer, require_factory
from colossus.engine.consistency import require_same_settings
from colossus.engine.device import pick_device
from colossus.engine.engine import Engine
from colossus.engine.eval_metrics import EvalMetrics, metrics_of
from colossus.engine.inputs import Inputs
from colossus.engine.loss_function import LossFunction, require_no_parameters
from colossus.engine.loss_scale import LossScaler
from colossus.engine.nonfinite import GradientWatch
from colossus.engine.optimizer_step import OptimizerStep
from colossus.engine.pipeline import PipelineRuntime
from colossus.engine.rank_model import build_rank_model
from colossus.engine.stages import ModelStages, parameters_by_stage
from colossus.engine.step_numbers import StepReduction
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.group_norms import GroupNorms
from colossus.gradients.parts import ModelParts
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import full_model_order
from colossus.registry import STRATEGIES
from colossus.schedule.runtime.observer import StepObserver
from colossus.state.run import Run


def initialize(
    config: Config | Mapping[str, Any] | str | Path,
    model: Callable[[], nn.Module] | None = None,
    loss_fn: LossFunction | None = None,
    data: Any = None,
    *,
    optimizer: OptimizerFactory | None = None,
    overrides: Sequence[str] = (),
) -> Engine:
    """Join the other ranks, build this rank's shard of the model, its optimizer and its data.

    Where ``checkpoint.weights`` names weights (``model = dict(type="hf", ..)`` does) the model has them, unless
    ``checkpoint.resume`` is set: `Checkpoints.resume`, or `fit`, then looks first where the run goes on.

    Args:
        config: a config, a dict of its sections, or the path of a config file.
        model: a class or function without arguments that builds the model; by default the config's.
        loss_fn: (outputs, batch) -> (sum, count), in the whole layout; by default the model's own ``loss``.
        data: takes the place of the config's ``data``.
        optimizer: makes the optimizer of this rank, in the place of the config's ``optimizer`` section: a function of
            the (full name, parameter) pairs that the rank trains, as it stores them, which returns a
            ``torch.optim.Optimizer`` over them. Called once, after the model is built; not on a rank without any.
        overrides: ``section.key=value``, laid over a file or a dict (``sys.argv[1:]`` of a script, say).

    Raises:
        ValueError: for a config that does not fit the processes or the model, with the arithmetic.
        CheckpointError: for weights that are not whole, or not those of the model.
    """
    engine = make_engine(config, model, loss_fn, data, optimizer=optimizer, overrides=overrides)
    try:
        engine.checkpoints.begin()
    except BaseException:
        engine.close()
        raise
    return engine


def make_engine(
    config: Config | Mapping[str, Any] | str | Path,
    model: Callable[[], nn.Module] | None = None,
    loss_fn: LossFunction | None = None,
    data: Any = None,
    *,
    optimizer: OptimizerFactory | None = None,
    overrides: Sequence[str] = (),
) -> Engine:
    """The engine of `initialize`, which has loaded nothing yet: for what knows later where its weights come from."""
    nproc = int(os.environ.get("WORLD_SIZE", "1"))
    if not isinstance(config, Config):
        config = load_config(config, overrides, nproc=nproc)
    config = resolve_sizes(config, nproc)
    if model is None and config.model is None:
        raise ValueError("no model: give the config a `model`, or pass model= to colossus.initialize")
    if isinstance(model, nn.Module):
        raise ValueError(
            "model= is a module that exists already; pass its class or a function that builds it, so that every rank "
            "makes its own shard only"
        )
    if loss_fn is not None:
        require_no_parameters(loss_fn)
    if optimizer is not None:
        require_factory(optimizer, config)
    log.resize(config.comm.log_size)
    shared_memory.enable(config.comm.shared_memory)
    own_code = {"the model": model, "loss_fn": loss_fn, "the optimizer": optimizer}
    context = ParallelContext.from_config(
        config,
        device=pick_device(config.device, config.comm.backend),
        on_join=partial(require_same_settings, config, own_code),
    )
    try:
        return _assemble(config, context, model, loss_fn, data, optimizer)
    except BaseException:
        context.close()
        raise


def _assemble(
    config: Config,
    context: ParallelContext,
    model: Callable[[], nn.Module] | None,
    loss_fn: LossFunction | None,
    data: Any,
    optimizer: OptimizerFactory | None,
) -> Engine:
    """The parts of an engine, in the order in which they need each other."""
    loaders = _make_loaders(config, data if data is not None else config.data, context)
    pipeline = PipelineRuntime(config, context)
    strategy = STRATEGIES.build(config.parallel.data_strategy)
    built = build_rank_model(config, context, model, strategy, pipeline, has_optimizer=optimizer is not None)
    module = built.module
    loss = _loss_of(module, loss_fn)
    store, parts = _store_parameters(config, context, module, strategy, pipeline, loaders)
    optimizer_made, config = _make_optimizer(config, context, optimizer, strategy, with_tables=built.with_tables)
    run, reduction, step = _make_step(config, context, module, optimizer_made, store, strategy, parts, loaders)
    observers: list[StepObserver] = []
    inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
    stages = ModelStages(
        context,
        module,
        pipeline.stage_forwards(module),
        pipeline.last_stage,
        inputs=inputs,
        loss_fn=loss,
        metrics=EvalMetrics(metrics_of(module), context.device),
        store=store,
        strategy=strategy,
        parameters_by_stage=parts.parameters_by_stage,
        splits_backward=pipeline.splits_backward,
        is_partitioned=pipeline.partition is not None,
        observers=observers,
    )
    engine = Engine(
        run,
        reduction=reduction,
        optimizer_step=step,
        pipeline=pipeline,
        stages=stages,
        executor=pipeline.make_executor(stages, model_parallel_of(context), observers),
        observers=observers,
        inputs=inputs,
    )
    engine.num_parameters = built.num_parameters
    return engine


def _make_loaders(config: Config, data: Any, context: ParallelContext) -> Loaders | None:
    """Of training and validation, None where there is no data."""
    if data is None:
        return None
    index, size = context.index("data"), context.size("data")
    return loaders_of(config, data, data_rank=index, data_size=size, device=context.device)


def _loss_of(module: nn.Module, loss_fn: LossFunction | None) -> LossFunction:
    """The one that was given, or the model's own."""
    loss = loss_fn or getattr(module, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(module).__name__} has no method loss(outputs, batch), and no loss_fn was given: pass "
            f"loss_fn= to colossus.initialize, or define it; it returns (sum, count)"
        )
    return loss


def _store_parameters(
    config: Config,
    context: ParallelContext,
    module: nn.Module,
    strategy: Strategy,
    pipeline: PipelineRuntime,
    loaders: Loaders | None,
) -> tuple[ParameterStore, ModelParts]:
    """The parameters as they are stored, which the strategy may cut, and which stage has which."""
    parts = ModelParts(
        context,
        module,
        parameters_by_stage(pipeline.actions, lambda stage: pipeline.parameters_on(stage, module)),
        pipeline.tied_parameters(module),
        config.comm.bucket_mb,
        partial(_syncs_after, config, loaders is not None and loaders.validation is not None),
    )
    store = ParameterStore(module, context, model_parallel_of(context).weights, lambda: pipeline.chain(module))
    strategy.setup(store, parts)
    return store, parts


def _make_optimizer(
    config: Config,
    context: ParallelContext,
    factory: OptimizerFactory | None,
    strategy: Strategy,
    *,
    with_tables: bool,
) -> tuple[torch.optim.Optimizer, Config]:
    """The optimizer of what this rank trains, and the config with what a factory has chosen."""
    tables = {id(table.param) for table in strategy.tables or ()} if with_tables else None
    optimizer, config = build_optimizer(config, factory, strategy.trained, context, tables)
    strategy.optimizer_made(optimizer)
    return optimizer, config


def _make_step(
    config: Config,
    context: ParallelContext,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    store: ParameterStore,
    strategy: Strategy,
    parts: ModelParts,
    loaders: Loaders | None,
) -> tuple[Run, StepReduction, OptimizerStep]:
    """What follows once gradients are summed, and the parts that have a state."""
    train = config.train
    norm = GradientNorm(store.parameters(), context, {id(store.stored(param)) for param in parts.counted_elsewhere})
    groups = GroupNorms(norm, optimizer, context.group(strategy.summed_axes)) if train.grad_norm_by_group else None
    scales = context.precision.scales_loss
    scaler = LossScaler(train.loss_scale, context, train.global_batch_size) if scales else None
    reduction = StepReduction(context, norm, strategy, train.clip_grad_norm, groups)
    watch = GradientWatch(train, context, strategy, norm, full_model_order(module), scaler)
    run = Run(config, context, module, optimizer, store, strategy, watch, scaler, loaders)
    return run, reduction, OptimizerStep(config, optimizer, strategy, reduction, watch, scaler)


def _syncs_after(config: Config, has_validation: bool, completed: int) -> bool:
    """Whether all replicas wait for each other after so many steps, as the config says."""
    train, every = config.train, config.checkpoint.every
    evaluates = has_validation and bool(train.eval_every) and completed % train.eval_every == 0
    return evaluates or bool(every and completed % every == 0) or completed == train.steps
