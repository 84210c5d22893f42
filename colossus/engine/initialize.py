"""From a config to an engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from colossus.comm import log, shared_memory
from colossus.config import Config, load_config, resolve_sizes
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import LOW
from colossus.data.loader import Loaders
from colossus.data.loader import log as data_log
from colossus.data.make_loaders import loaders_of
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.build_optimizer import OptimizerFactory, build_optimizer, require_factory
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.consistency import hashes_of_existing, require_same_settings, require_same_values
from colossus.engine.device import pick_device
from colossus.engine.engine import Engine
from colossus.engine.eval_metrics import EvalMetrics, metrics_of
from colossus.engine.forward_rng import seed_outside
from colossus.engine.inputs import Inputs
from colossus.engine.loss_function import LossFunction, require_no_parameters
from colossus.engine.loss_scale import LossScaler
from colossus.engine.nonfinite import GradientWatch
from colossus.engine.optimizer_step import OptimizerStep
from colossus.engine.pipeline import PipelineRuntime
from colossus.engine.stages import ModelStages, parameters_by_stage
from colossus.engine.step_numbers import StepReduction
from colossus.gradients.gradient_norm import GradientNorm
from colossus.gradients.group_norms import GroupNorms
from colossus.gradients.parts import ModelParts
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.patch import PatchEmbedding
from colossus.layout.parameter import full_model_order, num_parameters
from colossus.registry import MODELS, STRATEGIES
from colossus.schedule.runtime.observer import StepObserver
from colossus.sparse.survey import survey
from colossus.sparse.table_group import require_optimizer_of_tables
from colossus.state.run import Run
from colossus.tensor_parallel.dtypes import set_gradient_dtype


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
    spec = config.model
    dtype = context.precision.params
    factory = model if model is not None else (lambda: MODELS.build(spec.spec()))  # type: ignore[union-attr]
    factory = with_activation_checkpoint(factory, config.train.activation_checkpoint)
    held = data if data is not None else config.data
    loaders = None
    if held is not None:
        index, size = context.index("data"), context.size("data")
        loaders = loaders_of(config, held, data_rank=index, data_size=size, device=context.device)
        if loaders.tokenizer_missing is not None and context.is_logging_rank:
            data_log.warning("checkpoints of this run will hold no tokenizer: %s", loaders.tokenizer_missing)
    inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
    pipeline = PipelineRuntime(config, context)
    existing: dict[str, str] = {}
    strategy = STRATEGIES.build(config.parallel.data_strategy)
    with_tables, of_whole = False, 0

    def prepare(whole: nn.Module) -> None:
        nonlocal with_tables, of_whole
        of_whole = num_parameters(whole)
        if context.world_size > 1:
            existing.update(hashes_of_existing(whole))
        tables = survey(whole, context)
        with_tables = bool(tables.untied)
        require_optimizer_of_tables(config.optimizer, with_tables, is_given=optimizer is not None)
        strategy.check_tables(tables)
        pipeline.split(whole)
        strategy.prepare(whole, context)

    module = build(factory, context, dtype=dtype, wide_dtype=context.precision.data, prepare=prepare)
    if not any(getattr(getattr(hook, "type", hook), "compares_values", False) for hook in config.hooks):
        require_same_values(module, existing, context)
    for param in module.parameters():
        if param.dtype in LOW:
            set_gradient_dtype(param, context.precision.gradients)
    _require_position_wise(module, context)
    seed_outside(context)
    loss = loss_fn or getattr(module, "loss", None)
    if loss is None:
        raise ValueError(
            f"{type(module).__name__} has no method loss(outputs, batch), and no loss_fn was given: pass "
            f"loss_fn= to colossus.initialize, or define it; it returns (sum, count)"
        )
    if pipeline.partition is None and not any(param.requires_grad for param in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameter to train")
    engine = _engine(config, context, module, loss, strategy, pipeline, inputs, loaders, optimizer, with_tables)
    engine.num_parameters = of_whole
    return engine


def _engine(
    config: Config,
    context: ParallelContext,
    model: nn.Module,
    loss_fn: LossFunction,
    strategy: Strategy,
    pipeline: PipelineRuntime,
    inputs: Inputs,
    loaders: Loaders | None,
    optimizer_factory: OptimizerFactory | None,
    with_tables: bool,
) -> Engine:
    """The parts of an engine, in the order in which they need each other."""
    parallel = model_parallel_of(context)
    parts = ModelParts(
        context,
        model,
        parameters_by_stage(pipeline.actions, lambda stage: pipeline.parameters_on(stage, model)),
        pipeline.tied_parameters(model),
        config.comm.bucket_mb,
        partial(_syncs_after, config, loaders is not None and loaders.validation is not None),
    )
    store = ParameterStore(model, context, parallel.weights, lambda: pipeline.chain(model))
    strategy.setup(store, parts)
    tables = {id(table.param) for table in strategy.tables or ()} if with_tables else None
    optimizer, config = build_optimizer(config, optimizer_factory, strategy.trained, context, tables)
    strategy.optimizer_made(optimizer)
    norm = GradientNorm(store.parameters(), context, {id(store.stored(param)) for param in parts.counted_elsewhere})
    train = config.train
    groups = GroupNorms(norm, optimizer, context.group(strategy.summed_axes)) if train.grad_norm_by_group else None
    scaler = None
    if context.precision.scales_loss:
        scaler = LossScaler(train.loss_scale, context, train.global_batch_size)
    reduction = StepReduction(context, norm, strategy, train.clip_grad_norm, groups)
    watch = GradientWatch(train, context, strategy, norm, full_model_order(model), scaler)
    observers: list[StepObserver] = []
    stages = ModelStages(
        context,
        model,
        pipeline.stage_forwards(model),
        pipeline.last_stage,
        inputs=inputs,
        loss_fn=loss_fn,
        metrics=EvalMetrics(metrics_of(model), context.device),
        store=store,
        strategy=strategy,
        parameters_by_stage=parts.parameters_by_stage,
        splits_backward=pipeline.splits_backward,
        is_partitioned=pipeline.partition is not None,
        observers=observers,
    )
    return Engine(
        Run(config, context, model, optimizer, store, strategy, watch, scaler, loaders),
        reduction=reduction,
        optimizer_step=OptimizerStep(config, optimizer, strategy, reduction, watch, scaler),
        pipeline=pipeline,
        stages=stages,
        executor=pipeline.make_executor(stages, parallel, observers),
        observers=observers,
        inputs=inputs,
    )


def _syncs_after(config: Config, has_validation: bool, completed: int) -> bool:
    """Whether all replicas wait for each other after so many steps, as the config says."""
    train, every = config.train, config.checkpoint.every
    evaluates = has_validation and bool(train.eval_every) and completed % train.eval_every == 0
    return evaluates or bool(every and completed % every == 0) or completed == train.steps


def _require_position_wise(model: nn.Module, context: ParallelContext) -> None:
    """Under sequence parallelism, that no module is there to mix tokens: it would see the tokens of one rank.

    What is seen when they run only, `ShardedTensor` refuses.
    """
    if model_parallel_of(context).sequence is None:
        return
    mixing = (nn.MultiheadAttention, nn.RNNBase, PatchEmbedding)
    for name, module in model.named_modules():
        if isinstance(module, mixing):
            raise ValueError(
                f"{name or 'the model'} ({type(module).__name__}) mixes tokens, but parallel.sequence gives each of "
                f"{context.size('sequence')} ranks a part of them: use colossus.layers.Attention, and what works on "
                f"each token by itself"
            )
