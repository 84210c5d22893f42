"""The whole state of a run, as a checkpoint saves it: parts of tensors, and values."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from colossus.arithmetic import factors
from colossus.checkpoint.manifest import TOKENIZER_FILE, About
from colossus.checkpoint.part import Part
from colossus.checkpoint.rank_errors import gather_on_all_ranks
from colossus.checkpoint.saved_averages import HOOK_STATE
from colossus.checkpoint.tensor_file import host_bytes
from colossus.checkpoint.values import encode
from colossus.checkpoint.weight_sources import Assets
from colossus.comm.host_staging import all_to_host
from colossus.config import as_dict
from colossus.config.plans import describe_zero
from colossus.layout.split_parameter import as_shards
from colossus.state.model_parts import buffer_parts, parts_of
from colossus.state.optimizer import ParameterState, optimizer_values, state_parts
from colossus.state.parameters import saved_buffers, warn_of_own_buffers
from colossus.state.replicas import (
    averaged_parameters,
    buffer_means,
    has_own_parameters,
    has_own_state,
    replica_prefix,
)
from colossus.state.run import Run
from colossus.state.run_values import hook_values, named_hooks, run_values, written_prefixes
from colossus.state.whole_state import whole_state_parts


def about(run: Run) -> About:
    """Return facts about a run for the manifest."""
    files = assets_of(run)
    grid, zero = run.context.grid, describe_zero(run.config.parallel)
    text = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "one process"
    tokenizer = getattr(run.loaders, "tokenizer", None)
    tokenizer_file = TOKENIZER_FILE if TOKENIZER_FILE in files.files else None
    return About(
        run.completed_steps,
        {"axes": dict(grid.sizes), "text": f"{text}, {zero}" if zero else text, "num_ranks": grid.world_size},
        {**as_dict(run.config), **files.config},
        tokenizer_file if tokenizer is None else tokenizer.name,
        files.files,
    )


def assets_of(run: Run) -> Assets:
    """Return the assets of a run's weights, on the first rank.

    They are those of the loaded weights, as far as they fit the tokenizer of the data, and that tokenizer.
    """
    tokenizer = getattr(run.loaders, "tokenizer", None)
    if tokenizer is None:
        return run.assets
    fitting = run.assets.for_tokenizer(tokenizer.content)
    return Assets(fitting.config, {**fitting.files, **tokenizer.files})


def collect(run: Run) -> tuple[list[Part], dict[str, Any]]:
    """Return what this rank adds to a checkpoint: parts of tensors (views, no copies), and encoded values. Collective.

    Each value has a path that comes from one rank only.

    Raises:
        CheckpointError: if a checkpoint cannot hold some state; on all ranks if a hook or a buffer has it.
    """
    rank, world = run.context.rank, run.world
    run.strategy.sync_point()
    buffers = buffer_parts(run.model)
    values: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    hook_states: dict[str, ParameterState] = {}

    def prepare() -> dict[str, int]:
        with as_shards(), torch.no_grad():
            hook_dicts = hook_values(run)
            hook_states.update({name: hook.parameter_state() for name, hook in named_hooks(run.hooks)})
            if rank == 0:
                values.update({path: encode(value, path, tensors) for path, value in hook_dicts.items()})
            if world.size == 1:  # no rank to compare with, and no device to wait for
                return dict.fromkeys((part.key for part in buffers), 0)
            on_host = zip(buffers, all_to_host([part.memory for part in buffers]), strict=True)
            return {part.key: zlib.crc32(host_bytes(buffer)) for part, buffer in on_host}

    checksums = gather_on_all_ranks(world, prepare)
    if run.strategy.exact and run.context.is_logging_rank:
        warn_of_own_buffers(checksums)
    with as_shards(), torch.no_grad():
        of_model = parts_of(run)
        parts = [*saved_buffers(buffers, rank, checksums, buffer_means(run))]
        is_averaged = has_own_parameters(run)
        of_replica = parts_of(run, replicas_differ=True) if is_averaged or has_own_state(run) else of_model
        if is_averaged:
            parts += averaged_parameters(run, of_model, of_replica)
        else:
            parts += (part.at(f"model/{part.key}") for part in of_model)
        parts += _per_parameter(run, of_model, of_replica, hook_states, values)
        # the class and the group options of each pipeline stage's optimizer
        stage = f"optimizer_groups/{run.context.index('pipeline')}"
        of_optimizer = optimizer_values(run.optimizer, run.made_options)
        of_run = {f"{replica}{stage}": of_optimizer for replica in written_prefixes(run, "pipeline")} | run_values(run)
        values.update({path: encode(value, path, tensors) for path, value in of_run.items()})
    return [*parts, *(Part.whole(key, tensor) for key, tensor in tensors.items())], values


def _per_parameter(
    run: Run,
    parts: list[Part],
    of_replica: list[Part],
    hooks: Mapping[str, ParameterState],
    values: dict[str, Any],
) -> Iterator[Part]:
    """Yield the state that optimizer, strategy and hooks keep for each parameter; add plain ``values``.

    Args:
        run: the run.
        parts: this rank's parts of the parameters, of which one of all replicas writes each.
        of_replica: the same where each replica writes its own.
        hooks: state of hooks.
        values: encoded values of the checkpoint, by path.
    """
    own, are_own = replica_prefix(run.context.index("data")), has_own_parameters(run)
    sections = {
        "optimizer": (run.strategy.optimizer_state(run.optimizer), are_own),
        "strategy": (run.strategy.parameter_state(), has_own_state(run)),
        **{f"{HOOK_STATE}/{name}": (params, are_own) for name, params in hooks.items() if params},
    }
    for section, (params, is_own) in sections.items():
        where, by = (own + section, of_replica) if is_own else (section, parts)
        yield from state_parts(where, params, by, values)
    elsewhere = {id(run.store.stored(param)) for param in run.strategy.parts.counted_elsewhere}
    where = (own if are_own else "") + "optimizer"
    yield from whole_state_parts(where, run.optimizer, elsewhere, values)
