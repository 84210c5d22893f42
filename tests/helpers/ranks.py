"""Forked gloo workers behind one function: ``run_ranks(4, body, ...)`` runs ``body(context, ...)`` on four ranks.

Fork (0.1 s for 4 ranks) instead of spawn (seconds): the parent must never have run a multi-threaded operation, so
one thread is set on import, before anything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.covered import note_plans_in

from colossus.comm import log
from colossus.context.grid import LayerOptions, RankGrid
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.context.parallel_context import ParallelContext

torch.set_num_threads(1)


class RankError(AssertionError):
    """One or more ranks failed; the message holds every traceback."""


def grid(data: int = 1, tensor: int = 1, pipeline: int = 1, sequence: int = 1) -> RankGrid:
    sizes = {"pipeline": pipeline, "data": data, "sequence": sequence, "tensor": tensor}
    return RankGrid(sizes, {name: (name,) for name in sizes})


def grid_of(tensor: dict[str, int], data: int = 1) -> RankGrid:
    """A grid whose tensor parallelism has these atomic axes."""
    sizes = {"pipeline": 1, "data": data, "sequence": 1, **tensor}
    return RankGrid(sizes, {name: (name,) for name in ("pipeline", "data", "sequence")} | {"tensor": tuple(tensor)})


def run_ranks(
    world: int,
    body: Callable[..., Any],
    *args: Any,
    plan: RankGrid | None = None,
    timeout: float = 60.0,
    with_context: bool = True,
    mode: str = "1d",
    **options: Any,
) -> list[Any]:
    """``body(context, *args)`` on every rank of ``plan`` (by default 1D tensor over all); the ranks' results.

    With ``with_context=False`` the body gets its rank and finds the environment of a launcher set. ``options`` are of
    the context or of its layers. ``timeout`` is of silence: ranks that still use the processor are slow, and may be.
    """
    note_plans_in(args)
    plan = plan or grid(tensor=world)
    assert plan.world_size == world
    of_layers = {name: options.pop(name) for name in LayerOptions.__dataclass_fields__ if name in options}
    layer_options = LayerOptions(tensor_mode=mode, **of_layers)

    def run(rank: int) -> Any:
        log.clear()
        try:
            if with_context:
                return body(ParallelContext(plan, rank, options=layer_options, **options), *args)
            return body(rank, *args)
        except Exception as error:
            lines = "\n".join(log.recent()[-6:])
            error.add_note(f"{type(error).__name__}; last collectives:\n{lines}")
            raise

    try:
        return run_local_ranks(world, run, patience=timeout, collective_timeout=max(timeout, 60.0))
    except RanksFailed as failed:
        told = dict(failed.tracebacks)
        told |= {rank: f"died without a word (exit code {code})" for rank, code in failed.exit_codes.items()}
        told |= dict.fromkeys(failed.silent, f"was silent for {timeout} s")
        raise RankError("\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(told.items()))) from None
