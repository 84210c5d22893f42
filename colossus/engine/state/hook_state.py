"""What hooks keep: the same on all ranks, or (of a rank's shards, say) each rank's own.

That of rank 0 is saved; a rank whose hook gave something else has its own beside it, and takes it back under the plan
of the checkpoint. All others take that of rank 0.
"""

from __future__ import annotations

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import host_bytes
from colossus.checkpoint.together import on_all_ranks
from colossus.checkpoint.values import decode, encode
from colossus.comm.objects import broadcast_object
from colossus.context.parallel_context import ParallelContext
from colossus.engine.hooks import Hook
from colossus.engine.state.of_ranks import of_ranks, own_path

log = logging.getLogger("colossus.engine")


def hook_values(hooks: Sequence[Hook], context: ParallelContext) -> dict[str, Any]:
    """What this rank adds, by path. Collective.

    Raises:
        CheckpointError: on all ranks, where a hook fails on any, or gives what cannot be saved.
    """
    world = context.group(context.grid.names)
    states = on_all_ranks(world, lambda: _states(hooks))
    first = broadcast_object({name: crc for name, (_, crc) in states.items()}, world, 0)
    if context.rank == 0:
        return {f"hooks/{name}": state for name, (state, _) in states.items()}
    return {
        own_path(context.rank, f"hooks/{name}"): state
        for name, (state, crc) in states.items()
        if crc != first.get(name)
    }


def restore_hooks(
    hooks: Sequence[Hook], reader: CheckpointReader, context: ParallelContext, *, is_same_plan: bool
) -> None:
    """Give hooks of the same class and number what was saved."""
    values = reader.manifest.values
    for name, hook in _named(hooks):
        own = of_ranks(values, f"hooks/{name}")
        value = values.get(f"hooks/{name}")
        if is_same_plan:
            value = own.get(context.rank, value)
        elif own and context.is_logging_rank:
            log.warning(
                "what the hook %s kept differed between ranks, and the plan is another now: all take that of rank 0",
                name,
            )
        if value is not None:
            hook.load_state_dict(decode(value, reader.tensor))


def _states(hooks: Sequence[Hook]) -> dict[str, tuple[Mapping[str, Any], int]]:
    """What each hook of this rank gives, if it gives anything, and a checksum of it."""
    states: dict[str, tuple[Mapping[str, Any], int]] = {}
    for name, hook in _named(hooks):
        if state := hook.state_dict():
            tensors: dict[str, Tensor] = {}
            text = json.dumps(encode(state, f"hooks/{name}", tensors))
            crc = zlib.crc32(text.encode())
            for tensor in tensors.values():
                crc = zlib.crc32(host_bytes(tensor), crc)
            states[name] = state, crc
    return states


def _named(hooks: Sequence[Hook]) -> list[tuple[str, Hook]]:
    """By class; of several of one class by their number, too."""
    named: list[tuple[str, Hook]] = []
    for hook in hooks:
        name = type(hook).__qualname__
        count = sum(type(other) is type(hook) for _, other in named)
        named.append((f"{name}~{count + 1}" if count else name, hook))
    return named
