"""A real engine on tensors without values: what it would read of them, or hear from other ranks, is what a rank of a
healthy run reads and hears."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm import collectives, shared_memory
from colossus.construct import allocate
from colossus.construct.allocate import trace_constructor
from colossus.construct.build_model import _Materializer
from colossus.context import parallel_context
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.engine import consistency
from colossus.gradients.buckets import Bucket
from colossus.layers import deferred_wgrad
from colossus.planner.balanced_experts import balanced_experts
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors


@contextmanager
def fake_engines() -> Iterator[CountedFakeTensors]:
    """Inside, `colossus.initialize` makes engines of fake tensors, which can train.

    Other ranks say what this one says: they have the same settings, and use the same parameters. The batch is that of
    the other ranks of a model, and no number is other than finite. Experts get equal numbers of tokens.
    """
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (parallel_context, "init_device_mesh", _mesh),  # arithmetic on a tensor of ranks, whose values are needed
            (allocate, "trace_constructor", _trace),  # on meta: a fake tensor keeps its device in an attribute
            (allocate, "draw", _undrawn),
            (_Materializer, "_traced_value", _without_values),
            (deferred_wgrad, "Tensor", FakeTensor),  # plain is what is of no type of ours
            (consistency, "_samples", lambda batch: iter(())),
            (consistency.BatchCheck, "check", lambda self, total: None),
            (consistency.ProgramCheck, "check", lambda self, total: None),
            (Bucket, "used_by_ranks", Bucket.used_here),
            (RowGradients, "used_by_ranks", RowGradients.used_here),
            (collectives, "_MESSAGES_BYTES", sys.maxsize),  # that is a way of gloo's
            (shared_memory, "_open_channel", lambda group: None),  # which lists all pairs of ranks first
            (dist, "all_gather_object", _hear_oneself),
            (dist, "broadcast_object_list", _hear_oneself),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(balanced_experts())
        yield stack.enter_context(counted_fake_tensors())


def _mesh(*args: Any, **options: Any) -> DeviceMesh:
    with _disable_current_modes():
        return init_device_mesh(*args, **options)


def _trace(*args: Any) -> Any:
    with _disable_current_modes():
        return trace_constructor(*args)


def _undrawn(
    spec: Any, shape: tuple[int, ...], context: Any, *, key_of: Any, dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _without_values(self: Any, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)


def _hear_oneself(*args: Any, **options: Any) -> None:
    """The list of answers is filled with this rank's own before it is asked for (`colossus.comm.objects`)."""
