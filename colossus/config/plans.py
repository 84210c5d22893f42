"""Checks of a plan: its sizes against processes, model and batch. No torch.

An error has the nearest plans that fit.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

from colossus.arithmetic import counted, expert_factor, factors, not_a_multiple
from colossus.config.components import options_of
from colossus.config.errors import ConfigError
from colossus.config.plan_space import overrides_between, resized_plans, with_groups_of
from colossus.config.reproducible import reproducible_plan
from colossus.config.schema import Config, Parallel
from colossus.registry import MODELS, PLAN_COSTS, SEQUENCE_MODES, STRATEGIES, TENSOR_MODES


def strategy_options(config: Config) -> Any:
    """Return the checked options of the data-parallel strategy (`data_parallel.options`); None if it declares none.

    Raises:
        ConfigError: for unknown keys and wrong values, as ``parallel.strategy.<key>: ...``.
    """
    return options_of("parallel.strategy", config.parallel.strategy, STRATEGIES)


def model_options(config: Config) -> Any:
    """Return the checked options of the model; None if it declares none (callables, a user's own).

    Their method ``check(parallel)`` returns a line for each problem of the sizes under a plan. They may name what a
    batch consists of (``samples``, by default "samples") and what the loss counts (``counted``, by default "tokens").

    Raises:
        ConfigError: for unknown keys and wrong values, as ``model.<key>: ...``.
    """
    options = options_of("model", config.model, MODELS)
    return options if hasattr(options, "check") else None


def resolve_sizes(config: Config, nproc: int | None = None) -> Config:
    """Return the config with ``parallel.data`` a number, after checking that the plan fits.

    A missing ``parallel.data`` becomes ``nproc`` over the other sizes, or 1 if ``nproc`` is None.

    Raises:
        ConfigError: if the sizes do not multiply to ``nproc``, the tensor mode cannot be built from ``tensor.size``, or
            the model or the global batch does not divide. It shows the arithmetic and the nearest plans that fit.
    """
    if config.parallel.auto is not None:
        raise ConfigError(
            "parallel.auto: no plan is chosen here; `colossus launch` and `colossus show` choose one. Set one that "
            "`colossus plan` prints (parallel.auto=None parallel.data=.. ..)"
        )
    if nproc is not None and nproc < 1:
        raise ConfigError(f"nproc = {nproc}: the number of processes must be at least 1")
    parallel = config.parallel
    options, strategy = model_options(config), strategy_options(config)
    others = parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size
    data = parallel.data or max(1, (nproc or 1) // others)
    if nproc is not None and data * others != nproc:
        is_open = parallel.data is None
        total = others if is_open else data * others
        sizes = describe_sizes(parallel)
        sizes += f" = {total}" if " x " in sizes else ""
        problem = f"parallel: {sizes}{' does not divide' if is_open else ', but'} {counted(nproc, 'process', 'es')}"
        multiple = ", or a multiple of that" if is_open else ""
        keep = f"\n  or keep the plan and start {counted(total, 'process', 'es')}{multiple} (--nproc {total})"
        raise ConfigError(problem + suggestions(config, options, nproc) + keep)
    config, problems, refused = _completed(config, parallel.model_copy(update={"data": data}), options, strategy)
    if problems:
        problems[-1] += suggestions(config, options, data * others)
    problems += refused
    model_type, wanted = getattr(options, "activation_checkpoint", "none"), config.train.activation_checkpoint.type
    if "none" not in (model_type, wanted):
        keys = f"model.activation_checkpoint = {model_type!r} and train.activation_checkpoint = {wanted!r}"
        problems.append(f"{keys}: keep one of the two")
    if config.train.profile is not None:
        problems += config.train.profile.problems(data * others)
    if problems:
        raise ConfigError(problems)
    return config


def require_resolved(config: Config, nproc: int) -> None:
    """Raise ConfigError unless a config is resolved, for so many processes."""
    if config.parallel.data is None:
        raise ConfigError("parallel.data: the config is not resolved: pass what colossus.config.load_config returns")
    if world_size(config.parallel) != nproc:
        resolve_sizes(config, nproc)  # raises, with the nearest plans


def describe_plan(config: Config) -> str:
    """Return a plan as text: ``data 2 x pipeline 2 x tensor 4 (2d), ZeRO 1, 1f1b, 2 microbatches``."""
    tensor, microbatches = config.parallel.tensor, config.schedule.microbatches
    mode = f" ({tensor.mode}{', sequence sharded' if tensor.sequence_sharded else ''})" if tensor.size > 1 else ""
    sequence = config.parallel.sequence
    mode += f", sequence mode {sequence.mode}" if sequence.size > 1 else ""
    schedule = f", {name_of(config.schedule.type)}" if config.parallel.pipeline.size > 1 else ""
    split = f", {microbatches} microbatches" if microbatches > 1 else ""
    zero = describe_zero(config.parallel)
    mode += f", experts over {config.parallel.expert.size}" if config.parallel.expert.size > 1 else ""
    return f"{describe_sizes(config.parallel)}{mode}{zero and f', {zero}'}{schedule}{split}"


def name_of(kind: Any) -> str:
    """Return a registered name unchanged, or the name of a class or function."""
    return kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)


def _completed(config: Config, parallel: Parallel, options: Any, strategy: Any) -> tuple[Config, list[str], list[str]]:
    """Return the config with a plan whose data size is known, made whole by the model, the strategy and the mode.

    Args:
        config: a config.
        parallel: the plan, which replaces the config's.
        options: options of the model; None if they are unknown.
        strategy: options of the strategy; None if it declares none.

    Returns:
        The config, the problems of the plan's sizes, and what the strategy and ``train.reproducible`` refuse in it.
    """
    parallel, problems = _with_sequence_mode(parallel, options)
    if parallel.zero.stage and strategy is not None:
        parallel = parallel.model_copy(update={"zero": strategy.zero_of(parallel)})
    config, parallel, refused = reproducible_plan(config, parallel, options)
    problems += plan_problems(config, parallel, options)
    config = config.model_copy(update={"parallel": parallel})
    return config, problems, refused + ([] if strategy is None else strategy.check(config))


def _with_sequence_mode(parallel: Parallel, options: Any) -> tuple[Parallel, list[str]]:
    """Return the plan with a mode of sequence parallelism, and problems; the model chooses one if none is set."""
    sequence = parallel.sequence
    if sequence.mode is None and sequence.size > 1:
        choose = getattr(options, "sequence_mode", None)
        sequence = sequence.model_copy(update={"mode": "ring" if choose is None else choose(parallel)})
    try:
        SEQUENCE_MODES.get(sequence.mode or "ring").axis_sizes(sequence.size, sequence.ulysses)
    except ValueError as error:
        return parallel, [str(error)]
    return parallel.model_copy(update={"sequence": sequence}), []


# -- sizes, and plans that fit ----------------------------------------------------------------------------------


def world_size(parallel: Parallel) -> int:
    """Return the number of processes of a plan whose data size is known."""
    assert parallel.data is not None
    return parallel.data * parallel.pipeline.size * parallel.sequence.size * parallel.tensor.size


def describe_sizes(parallel: Parallel) -> str:
    """Return the sizes as text, ``data 2 x pipeline 2 x tensor 4``: data if it is set, the others if they are not 1."""
    sizes = {"pipeline": parallel.pipeline.size, "sequence": parallel.sequence.size, "tensor": parallel.tensor.size}
    data = {} if parallel.data is None else {"data": parallel.data}
    return factors({**data, **{name: size for name, size in sizes.items() if size > 1}}) or "1"


def describe_zero(parallel: Parallel) -> str:
    """Return ZeRO as text, ``ZeRO 3 in groups of 4, offloaded``; empty without it."""
    zero = parallel.zero
    if not zero.stage:
        return ""
    groups = f" in groups of {zero.shard}" if zero.shard is not None and zero.shard != parallel.data else ""
    return f"ZeRO {zero.stage}{groups}{', offloaded' if zero.offload else ''}"


def plan_problems(config: Config, parallel: Parallel, options: Any) -> list[str]:
    """Return problems of a plan whose data size is known: of the tensor mode, ZeRO's groups, the model, the batch.

    Args:
        config: a config.
        parallel: the plan, which replaces the config's.
        options: options of the model; None if they are unknown.
    """
    tensor, zero, train, microbatches = parallel.tensor, parallel.zero, config.train, config.schedule.microbatches
    data, problems, ways = parallel.data or 1, [], 1
    mode = TENSOR_MODES.get(tensor.mode)
    try:
        ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    except ValueError as error:
        problems.append(f"parallel.tensor: {error}")
    if tensor.depth not in (None, 1) and "depth" not in mode.axes:
        problems.append(
            f"parallel.tensor.depth = {tensor.depth} has no effect in mode {tensor.mode}; it is for mode 2.5d"
        )
    if tensor.sequence_sharded and not mode.splits_tokens:
        problems.append(
            f"parallel.tensor.sequence_sharded has no effect in mode {tensor.mode}, whose activations between blocks "
            f"are split already; it is for mode 1d"
        )
    try:
        factor = expert_factor(data, parallel.sequence.size, parallel.expert.size)
        if zero.shard is not None and zero.shard % factor:
            problems.append(
                f"parallel.zero.shard = {zero.shard} is no multiple of the {factor} data ranks that share the experts "
                f"(parallel.expert = {parallel.expert.size})"
            )
    except ValueError as error:
        problems.append(str(error))
    if zero.shard is not None and data % zero.shard:
        problems.append(
            f"parallel.zero.shard = {zero.shard} does not divide data {data}: groups of {zero.shard} data ranks store "
            f"one copy each"
        )
    if options is not None:
        problems += options.check(parallel)
    divisor = data * microbatches * ways
    if train.global_batch_size % divisor:
        by = f"data {data} x microbatches {microbatches}"
        by += f" x {ways} (shards into which tensor mode {tensor.mode} splits a batch)" if ways > 1 else ""
        batch = not_a_multiple("train.global_batch_size", train.global_batch_size, f"{by} = {divisor}", divisor)
        problems.append(batch)
    elif train.batch_ramp is not None:
        problems += train.batch_ramp.plan_problems(train.global_batch_size, data, microbatches, ways)
    if train.eval_batch_size is not None and train.eval_batch_size % data:
        problems.append(not_a_multiple("train.eval_batch_size", train.eval_batch_size, f"data {data}", data))
    return problems


def suggestions(config: Config, options: Any, nproc: int, max_plans: int = 4) -> str:
    """Return lines to append to a problem: the nearest plans for ``nproc`` processes, as the overrides to type.

    They fit model, batch and strategy. Only axes of the config are varied: data and tensor always, pipeline and
    sequence if they are not 1. The fastest by the planner's lower bound comes first.
    """
    parallel = config.parallel
    axes = ["tensor", *(axis for axis in ("sequence", "pipeline") if getattr(parallel, axis).size > 1)]

    def distance(plan: Parallel) -> tuple[float, int]:
        # a derived data size costs nothing: it is not the user's choice
        pairs = [(getattr(plan, axis).size, getattr(parallel, axis).size) for axis in axes]
        pairs += [(plan.data or 1, parallel.data)] if parallel.data else []
        ratios = [abs(math.log2(new / old)) for new, old in pairs]
        return round(sum(ratios), 9), sum(ratio > 0 for ratio in ratios)

    plans: dict[str, Config] = {}
    refusals: list[str] = []
    for plan in sorted(resized_plans(parallel, nproc, axes), key=distance):
        if len(plans) == max_plans:
            break
        with suppress(ValueError):  # groups of experts that are wrong already stay: another size may fit them
            plan = with_groups_of(parallel, plan)
        stated = plan if parallel.data else plan.model_copy(update={"data": None})
        changed = config.model_copy(update={"parallel": plan})
        candidate, problems, refused = _completed(config, plan, options, strategy_options(changed))
        refusals += [] if problems else refused
        if not problems and not refused and (overrides := overrides_between(parallel, stated, "parallel")):
            plans[" ".join(overrides)] = candidate
    processes = counted(nproc, "process", "es")
    if not plans:
        reason = f":\n    {refusals[0]}" if refusals else ""
        return f"\n  no plan of these axes fits {processes}, this model and this batch{reason}"
    seconds = PLAN_COSTS.get("least_seconds")(config)
    ordered = sorted(plans, key=lambda overrides: seconds(plans[overrides]))
    return f"\n  nearest plans that fit {processes}:" + "".join(f"\n    {overrides}" for overrides in ordered)
