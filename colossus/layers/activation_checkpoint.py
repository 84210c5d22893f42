"""Activation checkpointing, full or selective, whose recomputation draws the random numbers of the first pass again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.refusal import refusal
from colossus.sequence_parallel.ring import RING_ATTENTION

_aten, _c10d = torch.ops.aten, torch.ops._c10d_functional

#: operations whose results ``selective`` keeps: matmuls, attention and collectives
SAVED = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _c10d.all_reduce.default,
    _c10d.all_gather_into_tensor.default,
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_to_all_single.default,
    _c10d.wait_tensor.default,
    RING_ATTENTION,
}


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    context: ParallelContext,
    kind: str = "full",
    preserve_rng_state: bool = True,
) -> Any:
    """``function(*args)`` whose activations are computed again in backward instead of kept.

    Args:
        function: of plain local tensors.
        context: its random streams are set back for the recomputation.
        kind: ``full`` keeps the inputs only; ``selective`` also keeps matmuls, attention and collectives.
        preserve_rng_state: whether torch's own generators are restored for the recomputation. False is faster, and
            right for a function that draws from the context's streams alone.

    Raises:
        ValueError: for another kind.
    """
    if kind not in ("full", "selective"):
        raise refusal(f"activation checkpointing {kind!r}: use 'full' or 'selective'")
    rng = context.rng
    position = rng.snapshot()

    def run(*inputs: Any) -> Any:
        if torch._C._current_graph_task_id() == -1:
            return function(*inputs)
        # ``selective`` keeps the result of every collective: the recomputation reads it and sends nothing
        counting = accounting.paused() if kind == "selective" else contextlib.nullcontext()
        with rng.replay(position), counting:
            return function(*inputs)

    options: dict[str, Any] = {}
    if kind == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return torch_checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state, **options)
