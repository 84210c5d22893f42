"""Whether a plan fits: its sizes against processes, model and batch, its names against the registries. No torch."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Protocol

from pydantic import BaseModel, ValidationError

from colossus import __version__
from colossus.arithmetic import factors, not_a_multiple
from colossus.config.errors import ConfigError, explain
from colossus.config.ranges import range_problems, vocabulary_problems
from colossus.config.schema import Config, Parallel
from colossus.config.section import Named
from colossus.config.signatures import option_problems
from colossus.registry import (
    DATASETS,
    HOOKS,
    LR_SCHEDULES,
    MODEL_OPTIONS,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    SEQUENCE_MODES,
    STRATEGIES,
    TENSOR_MODES,
    Registry,
)

Sizes = tuple[int, int, int, int]


class ModelOptions(Protocol):
    """What a class in ``MODEL_OPTIONS`` offers; a pydantic model gives the best messages for wrong keys.

    A ``flops_per_token()`` is optional: operations of forward and backward, without which no utilisation is shown.
    """

    def check(self, parallel: Parallel) -> list[str]:
        """Problems of the sizes under this plan, one line each."""

    def num_parameters(self) -> int: ...


def check_names(config: Config) -> None:
    """Every ``type`` is registered, or a callable, and takes the options it is given.

    Raises:
        ConfigError: with the nearest registered name, or the nearest option.
    """
    named: list[tuple[str, Any, Registry]] = [
        ("model", config.model, MODELS),
        ("data", config.data, DATASETS),
        ("optimizer", config.optimizer, OPTIMIZERS),
        ("lr_schedule", config.lr_schedule, LR_SCHEDULES),
        ("schedule", config.schedule, SCHEDULES),
        ("parallel.strategy", config.parallel.strategy, STRATEGIES),
    ]
    named += [(f"hooks.{number}", hook, HOOKS) for number, hook in enumerate(config.hooks)]
    problems = []
    for key, value, registry in named:
        if not isinstance(value, Named):
            continue
        if isinstance(value.type, str) and value.type not in registry:
            problems.append(f"{key}.type: {registry.missing(value.type)}")
        elif not (registry is MODELS and value.type in MODEL_OPTIONS.names()):  # checked by their own class
            problems += option_problems(key, value, registry)
            problems += range_problems(key, value, registry)
    mode = config.parallel.tensor.mode
    if mode not in TENSOR_MODES:
        problems.append(f"parallel.tensor.mode: {TENSOR_MODES.missing(mode)}")
    sequence = config.parallel.sequence.mode
    if sequence is not None and sequence not in SEQUENCE_MODES:
        problems.append(f"parallel.sequence.mode: {SEQUENCE_MODES.missing(sequence)}")
    if problems:
        raise ConfigError(problems)


def model_options(config: Config) -> ModelOptions | None:
    """The checked options of the model, or None for models that declare none (callables, a user's own).

    Raises:
        ConfigError: for unknown keys and wrong values, as ``model.<key>: ...``.
    """
    model = config.model
    if model is None or not isinstance(model.type, str) or model.type not in MODEL_OPTIONS:
        return None
    options = MODEL_OPTIONS.get(model.type)
    try:
        built: ModelOptions = options(**model.options)
    except ValidationError as error:
        problems = explain(error, options, "model") if issubclass(options, BaseModel) else {"model": str(error)}
        raise ConfigError(f"{path}: {problem}" for path, problem in problems.items()) from None
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model: {error}") from error
    return built


def resolve_sizes(config: Config, nproc: int | None = None) -> Config:
    """The config with ``parallel.data`` a number, after checking that the plan fits.

    ``parallel.data`` left out becomes what the other sizes leave of ``nproc``, or 1 when ``nproc`` is None.

    Raises:
        ConfigError: when the sizes do not multiply to ``nproc``, the tensor mode cannot be built from
            ``tensor.size``, the model does not divide, or the global batch does not; shows the arithmetic and the
            nearest plans that fit.
    """
    if nproc is not None and nproc < 1:
        raise ConfigError(f"nproc = {nproc}: the number of processes must be at least 1")
    parallel = config.parallel
    options = model_options(config)
    _require_one_checkpointing(config, options)
    others = parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size
    parallel, problems = _with_sequence_mode(parallel, options)
    problems += _mode_problems(parallel)
    if parallel.data is None:
        fits = nproc is None or nproc % others == 0
        resolved = parallel.model_copy(update={"data": nproc // others if nproc and fits else 1})
        if not fits:
            problems.append(f"parallel: {describe_sizes(parallel)} = {others} does not divide {_processes(nproc)}")
    else:
        resolved = parallel
        total = parallel.data * others
        fits = nproc is None or total == nproc
        if not fits:
            problems.append(f"parallel: {describe_sizes(parallel)} = {total}, but {_processes(nproc)}")
    if fits:  # otherwise the number of replicas is still open
        problems += _shard_problems(resolved)
    if options is not None:
        problems += options.check(resolved)
        problems += vocabulary_problems(config, options)
    if fits:  # otherwise the number of replicas is still open
        problems += _batch_problems(config, resolved)
    if problems:
        processes = nproc or world_size(resolved)
        raise ConfigError([*problems[:-1], problems[-1] + _suggestions(config, options, processes, fits)])
    return config.model_copy(update={"parallel": resolved})


def world_size(parallel: Parallel) -> int:
    """Number of processes of a plan whose data size is known."""
    assert parallel.data is not None
    return parallel.data * parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size


def describe_sizes(parallel: Parallel) -> str:
    """``data 2 x pipeline 2 x tensor 4``: data when it is given, the others when they are not 1."""
    sizes = {"pipeline": parallel.pipeline.size, "sequence": parallel.sequence.size, "tensor": parallel.tensor.size}
    data = {} if parallel.data is None else {"data": parallel.data}
    return factors({**data, **{name: size for name, size in sizes.items() if size > 1}}) or "1"


def describe_plan(config: Config) -> str:
    """``data 2 x pipeline 2 x tensor 4 (2d), 1f1b, 2 microbatches``."""
    tensor, microbatches = config.parallel.tensor, config.schedule.microbatches
    mode = f" ({tensor.mode}{', sequence sharded' if tensor.sequence_sharded else ''})" if tensor.size > 1 else ""
    schedule = f", {name_of(config.schedule.type)}" if config.parallel.pipeline.size > 1 else ""
    split = f", {microbatches} microbatches" if microbatches > 1 else ""
    return f"{describe_sizes(config.parallel)}{mode}{schedule}{split}"


def name_of(kind: Any) -> str:
    """A registered name as it is, or the name of a class or function."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)


def require_available(config: Config) -> None:
    """Refuse what can be declared and shown, but not trained yet.

    Raises:
        ConfigError: names each such key.
    """
    version = ".".join(__version__.split(".")[:2])
    tail = f"not available in this version (colossus {version})"
    parallel = config.parallel
    problems = []
    if parallel.zero.stage:
        problems.append(
            f"parallel.zero = {parallel.zero.stage}: sharding of optimizer state, gradients or parameters is {tail}; "
            f"parallel.data, pipeline, sequence and tensor are"
        )
    checkpoint = config.checkpoint
    for key in type(checkpoint).model_fields:
        value = getattr(checkpoint, key)
        if value not in (0, None):
            problems.append(f"checkpoint.{key} = {value!r}: saving and resuming are {tail}; leave checkpoint out")
    if problems:
        raise ConfigError(problems, config.source)


def _with_sequence_mode(parallel: Parallel, options: ModelOptions | None) -> tuple[Parallel, list[str]]:
    """The plan with a mode of sequence parallelism, which the model chooses where the config does not."""
    sequence = parallel.sequence
    if sequence.mode is not None and sequence.mode not in SEQUENCE_MODES:
        return parallel, []  # check_names refuses it
    if sequence.mode is None and sequence.size > 1:
        choose = getattr(options, "sequence_mode", None)
        mode = choose(parallel) if choose is not None else "ring"
        parallel = parallel.model_copy(update={"sequence": sequence.model_copy(update={"mode": mode})})
    try:
        SEQUENCE_MODES.get(parallel.sequence.mode or "ring").axis_sizes(sequence.size, sequence.ulysses)
    except ValueError as error:
        return parallel, [str(error)]
    return parallel, []


def _mode_problems(parallel: Parallel) -> list[str]:
    tensor = parallel.tensor
    mode = TENSOR_MODES.get(tensor.mode)
    try:
        mode.axis_sizes(tensor.size, tensor.depth, tensor.shape)
    except ValueError as error:
        return [f"parallel.tensor: {error}"]
    if tensor.depth not in (None, 1) and "depth" not in mode.axes:
        return [f"parallel.tensor.depth = {tensor.depth} means nothing in mode {tensor.mode}; it is for mode 2.5d"]
    if tensor.sequence_sharded and not mode.splits_tokens:
        return [
            f"parallel.tensor.sequence_sharded means nothing in mode {tensor.mode}, whose activations between blocks "
            f"are split already; it is for mode 1d"
        ]
    return []


def _shard_problems(parallel: Parallel) -> list[str]:
    shard, data = parallel.zero.shard, parallel.data or 1
    if shard is None or data % shard == 0:
        return []
    return [
        f"parallel.zero.shard = {shard} does not divide data {data}: groups of {shard} data ranks hold one copy each"
    ]


def _require_one_checkpointing(config: Config, options: ModelOptions | None) -> None:
    """Activation checkpointing is told to the model or to the training, not to both."""
    of_model, wanted = getattr(options, "activation_checkpoint", "none"), config.train.activation_checkpoint.type
    if "none" not in (of_model, wanted):
        raise ConfigError(
            f"model.activation_checkpoint = {of_model!r} and train.activation_checkpoint = {wanted!r}: keep one of "
            f"the two",
            config.source,
        )


def _batch_problems(config: Config, parallel: Parallel) -> list[str]:
    batch, microbatches, tensor = config.train.global_batch_size, config.schedule.microbatches, parallel.tensor
    assert parallel.data is not None
    mode = TENSOR_MODES.get(tensor.mode)
    ways = 1 if _mode_problems(parallel) else mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    divisor = parallel.data * microbatches * ways
    problems = []
    if batch % divisor:
        by = f"data {parallel.data} x microbatches {microbatches}"
        if ways > 1:
            by += f" x {ways} (shards into which tensor mode {tensor.mode} splits a batch)"
        problems.append(not_a_multiple("train.global_batch_size", batch, f"{by} = {divisor}", divisor))
    eval_batch = config.train.eval_batch_size
    if eval_batch is not None and eval_batch % parallel.data:
        problems.append(not_a_multiple("train.eval_batch_size", eval_batch, f"data {parallel.data}", parallel.data))
    return problems


def _suggestions(config: Config, options: ModelOptions | None, nproc: int, fits: bool) -> str:
    plans = nearest_plans(config, options, nproc)
    if plans:
        out = f"\n  nearest plans that fit {_processes(nproc)}:" + "".join(f"\n    {plan}" for plan in plans)
    else:
        out = f"\n  no plan of these axes fits {_processes(nproc)}, this model and this batch"
    if not fits and config.parallel.data is not None:
        wanted = world_size(config.parallel)
        out += f"\n  or keep the plan and start {_processes(wanted)} (--nproc {wanted})"
    return out


def nearest_plans(config: Config, options: ModelOptions | None, nproc: int, most: int = 4) -> list[str]:
    """Plans for ``nproc`` processes that fit model and batch, nearest first, as the overrides to type.

    Only axes that the config uses already are varied: data and tensor always, pipeline and sequence when not 1.
    """
    parallel = config.parallel
    now: Sizes = (parallel.data or 0, parallel.pipeline.size, parallel.sequence.size, parallel.tensor.size)
    keys = ("parallel.data", "parallel.pipeline.size", "parallel.sequence.size", "parallel.tensor.size")

    def distance(sizes: Sizes) -> tuple[float, int]:
        # A derived data size (0) is free: it is not the user's choice.
        ratios = [abs(math.log2(new / old)) for new, old in zip(sizes, now, strict=True) if old]
        return round(sum(ratios), 9), sum(ratio > 0 for ratio in ratios)

    found: list[str] = []
    for sizes in sorted(_factorisations(nproc, now), key=distance):
        if sizes == now or len(found) == most:
            continue
        data, pipeline, sequence, tensor = sizes
        candidate = parallel.model_copy(
            update={
                "data": data,
                "pipeline": parallel.pipeline.model_copy(update={"size": pipeline}),
                "sequence": parallel.sequence.model_copy(update={"size": sequence}),
                "tensor": parallel.tensor.model_copy(update={"size": tensor}),
            }
        )
        if _mode_problems(candidate) or _batch_problems(config, candidate):
            continue
        if options is not None and options.check(candidate):
            continue
        changed = [f"{key}={new}" for key, new, old in zip(keys, sizes, now, strict=True) if old and new != old]
        if changed:
            found.append(" ".join(changed))
    return found


def _factorisations(nproc: int, now: Sizes) -> Iterator[Sizes]:
    small = [n for n in range(1, math.isqrt(nproc) + 1) if nproc % n == 0]
    divisors = sorted({*small, *(nproc // n for n in small)})
    for tensor in divisors:
        for sequence in divisors if now[2] > 1 else [1]:
            for pipeline in divisors if now[1] > 1 else [1]:
                data, rest = divmod(nproc, tensor * sequence * pipeline)
                if not rest:
                    yield data, pipeline, sequence, tensor


def _processes(count: int | None) -> str:
    return f"{count} process{'' if count == 1 else 'es'}"
