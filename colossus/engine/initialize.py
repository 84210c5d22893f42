"""The engine of a config."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from colossus.comm import log, shared_memory
from colossus.config import Config, load_config
from colossus.config.plans import require_resolved
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import LOW
from colossus.context.world import pick_device
from colossus.data.batch import SampleDims
from colossus.data.loader import Loaders
from colossus.data.make_loaders import loaders_of
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.checkpoints import Launched
from colossus.engine.consistency import fingerprints_of_existing, require_same_settings, require_same_values
from colossus.engine.deterministic import deterministic_algorithms, one_thread
from colossus.engine.engine import Engine
from colossus.engine.forward_buffers import ForwardBuffers
from colossus.engine.inputs import Inputs
from colossus.engine.loss_function import LossFunction, loss_of
from colossus.engine.optimizer_step import OptimizerStep
from colossus.engine.optimizers import OptimizerFactory, build_optimizer, holders_of, require_factory
from colossus.engine.parameter_groups import ParameterGroups, make_groups, one_group
from colossus.engine.reference_weights import take_reference
from colossus.engine.routers import Routers, routers_of
from colossus.engine.stages import ModelStages
from colossus.gradients.reduction import ModelParts
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import num_parameters
from colossus.layout.split_parameter import as_shards
from colossus.random import GlobalRng
from colossus.registry import MODELS, STRATEGIES
from colossus.schedule.pipeline import PipelineRuntime
from colossus.sparse.table_optimizers import require_optimizer_of_tables
from colossus.sparse.tables import survey
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
    """Join the other ranks, and build this rank's shard of the model, its optimizer and its data.

    If ``checkpoint.weights`` is set (``model = dict(type="hf", ..)`` implies it) the model has these weights. With
    ``checkpoint.resume``, `Checkpoints.resume` or `fit` first looks for a checkpoint to resume from.

    Args:
        config: a resolved config (`colossus.config.load_config`), a dict of its sections, or the path of a config file.
        model: a class or function without arguments that builds the model; by default the config's.
        loss_fn: (outputs, batch) -> (sum, count), in the whole layout; by default the model's own ``loss``.
        data: replaces the config's ``data``.
        optimizer: makes the optimizer of this rank, in place of the config's section ``optimizer``: a function of the
            (full name, parameter) pairs that the rank trains, as it stores them, which returns a
            ``torch.optim.Optimizer`` over them. It is called once, after the model is built; not on a rank without any.
        overrides: ``section.key=value``, applied to a file or a dict (for example ``sys.argv[1:]`` of a script).

    Raises:
        ValueError: for a config that does not fit the processes or the model, with the arithmetic.
        CheckpointError: for weights that are not whole, or not those of the model.
    """
    if not isinstance(config, Config):
        config = load_config(config, overrides, nproc=int(os.environ.get("WORLD_SIZE", "1")))
    engine = make_engine(config, model, loss_fn, data, optimizer)
    try:
        take_reference(engine.run, engine.checkpoints.resumer)
        if engine.checkpoints.resume_from is None:
            engine.checkpoints.take_weights()
    except BaseException:
        engine.close()
        raise
    return engine


def make_engine(
    config: Config,
    model: Callable[[], nn.Module] | None = None,
    loss_fn: LossFunction | None = None,
    data: Any = None,
    optimizer: OptimizerFactory | None = None,
    *,
    launch: Callable[[ParallelContext], Launched] | None = None,
) -> Engine:
    """Return the engine of `initialize` without weights, for callers that choose their source later.

    ``launch`` returns how a launcher starts the run; all ranks call it at once, before the model is built.
    """
    require_resolved(config, int(os.environ.get("WORLD_SIZE", "1")))
    if model is None and config.model is None:
        raise ValueError("no model: set `model` in the config, or pass model= to colossus.initialize")
    if isinstance(model, nn.Module):
        raise ValueError("model= is a module that exists already; pass its class or a function that builds it")
    if optimizer is not None:
        require_factory(optimizer, config)
    log.resize(config.comm.log_size)
    shared_memory.enable(config.comm.shared_memory)
    with ExitStack() as failing:  # the parts of an engine; later ones depend on earlier ones
        closing = failing.enter_context(ExitStack())
        closing.enter_context(deterministic_algorithms(config.train.is_deterministic))  # before CUDA starts
        closing.enter_context(one_thread(config.train.reproducible is not None))
        device = pick_device(config.device, config.comm.backend)
        context = ParallelContext.from_config(config, device=device, on_join=partial(require_same_settings, config))
        closing.callback(context.close)
        launched = launch(context) if launch is not None else None
        data, index, size = data if data is not None else config.data, context.index("data"), context.size("data")
        loaders = None
        if data is not None:
            loaders = loaders_of(config, data, data_rank=index, data_size=size, device=context.device)
            closing.callback(loaders.close)
        pipeline = PipelineRuntime(config, context)
        closing.callback(pipeline.close)
        strategy = STRATEGIES.build(config.parallel.data_strategy)
        parallel = model_parallel_of(context)
        parallel.replicas_differ = not strategy.exact
        parallel.samples_interact = parallel.interleaves_microbatches = config.train.samples_interact
        module, whole = _build_model(config, context, model, strategy, pipeline, optimizer is not None)
        loss = loss_of(module, loss_fn)
        store = _store_parameters(config, context, module, strategy, pipeline, loaders, closing)
        tables = {id(table.param) for table in strategy.tables or ()}
        holders = holders_of(module, context, strategy.summed_axes, tables)
        updates, config = build_optimizer(config, optimizer, strategy.trained, holders, tables, whole.groups)
        strategy.optimizer_made(updates)
        if whole.routers and config.train.tokens_per_microbatch is not None:
            raise ValueError(
                "train.tokens_per_microbatch: routers of experts count padding, too, of which each plan has another "
                "amount: pack rows of one length in place of it (data = dict(type='Packed', ..))"
            )
        step = OptimizerStep(config, module, updates, store, strategy, Routers(whole.routers, module, strategy))
        dims = SampleDims(config.train.batch_dims)
        inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad, dims=dims)
        buffers = ForwardBuffers(module, parallel, config.train.buffers)
        stages = ModelStages(context, module, pipeline, store, strategy, inputs, loss, buffers)
        executor = pipeline.make_executor(stages, parallel, stages.observers)
        run = Run(config, context, module, updates, store, strategy, step.watch, step.loss_scaler, loaders)
        rules = () if whole.groups is None else whole.groups.description
        engine = Engine(run, step, pipeline, stages, executor, inputs, whole.num_parameters, closing, rules)
        if launched is not None:
            run.folder, run.on_progress = launched.folder, launched.on_progress
            strategy.on_progress = launched.on_progress
            engine.checkpoints.take_over(launched)
        failing.pop_all()
        return engine


class WholeModel(NamedTuple):
    """Facts about the whole model, beyond the rank's part.

    Attributes:
        num_parameters: its size.
        routers: its routers (`routers_of`).
        groups: its groups of parameters, if there are rules or tables with their own.
    """

    num_parameters: int
    routers: dict[str, int]
    groups: ParameterGroups | None


def _build_model(
    config: Config,
    context: ParallelContext,
    model: Callable[[], nn.Module] | None,
    strategy: Strategy,
    pipeline: PipelineRuntime,
    has_optimizer: bool,
) -> tuple[nn.Module, WholeModel]:
    """Return this rank's shards of the model, and facts about the whole model."""
    spec = config.model
    factory = model if model is not None else (lambda: MODELS.build(spec.spec()))  # type: ignore[union-attr]
    factory = with_activation_checkpoint(factory, config.train.activation_checkpoint)
    existing: dict[str, int] = {}
    wholes: list[WholeModel] = []

    def prepare(whole: nn.Module) -> None:
        if context.world_size > 1:
            existing.update(fingerprints_of_existing(whole))
        groups = make_groups(config.optimizer, whole)  # freezes parameters
        tables = survey(whole, context)
        if tables.untied and groups is None and not has_optimizer:
            groups = one_group(whole)
        if groups is not None:
            groups.set_apart([table.name for table in tables.untied], name="tables")
        wholes.append(WholeModel(num_parameters(whole), routers_of(whole), groups))
        require_optimizer_of_tables(config.optimizer, bool(tables.untied), is_custom=has_optimizer)
        strategy.check_tables(tables)
        pipeline.split(whole)
        strategy.prepare(whole, context)

    precision = context.precision
    module = build(factory, context, dtype=precision.params, wide_dtype=precision.data, prepare=prepare)
    require_same_values(module, existing, context)
    for param in module.parameters():
        if param.dtype in LOW:
            set_gradient_dtype(param, precision.gradients)
    if pipeline.partition is None and not any(param.requires_grad for param in module.parameters()):
        raise ValueError(f"{type(module).__name__} has no parameter to train")
    # for random numbers outside of forwards (the shuffle of a user's DataLoader): the same on all ranks of a model
    seed = context.rng.key("torch", context.index("data"))
    GlobalRng(tuple({torch.device("cpu"), context.device})).seed(seed)
    return module, wholes[0]


def _store_parameters(
    config: Config,
    context: ParallelContext,
    module: nn.Module,
    strategy: Strategy,
    pipeline: PipelineRuntime,
    loaders: Loaders | None,
    closing: ExitStack,
) -> ParameterStore:
    """Return the parameters as they are stored, which the strategy may shard."""
    parts = ModelParts(
        context,
        module,
        pipeline.parameters_by_stage(module),
        pipeline.tied_parameters(module),
        config.comm.bucket_mb,
        partial(_syncs_after, config, loaders is not None and loaders.validation is not None),
        closing,
    )
    store = ParameterStore(module, context, model_parallel_of(context).weights, lambda: pipeline.chain(module))
    with as_shards():
        strategy.setup(store, parts)
    return store


def _syncs_after(config: Config, has_validation: bool, completed: int) -> bool:
    """Return whether all replicas wait for each other after so many steps, by the config."""
    train, every = config.train, config.checkpoint.every
    evaluates = has_validation and bool(train.eval_every) and completed % train.eval_every == 0
    return evaluates or bool(every and completed % every == 0) or completed == train.steps
