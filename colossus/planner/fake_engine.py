"""The real engine on tensors without values.

Where the engine reads a value, or an answer of another rank, it gets that of a healthy run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm import shared_memory
from colossus.construct import allocate
from colossus.construct.allocate import trace_constructor
from colossus.construct.build_model import _Materializer
from colossus.context import parallel_context
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.engine import consistency
from colossus.gradients.buckets import Bucket
from colossus.layers import deferred_wgrad
from colossus.planner.balanced_experts import balanced_experts
from colossus.planner.fake_channel import fake_channels
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors


@contextmanager
def fake_engines(*, on_cpu: bool) -> Iterator[CountedFakeTensors]:
    """Let `colossus.initialize` make engines of fake tensors inside the context. They can train.

    The tensors are on the CPU; without ``on_cpu`` flat tensors have any size, as between GPUs.

    Other ranks answer as this one: they have the same settings, use the same parameters, and the ranks of a model have
    the same batch. All numbers are finite. Experts get equal numbers of tokens.
    """
    with ExitStack() as stack:
        for owner, name, stand_in in (
            (parallel_context, "init_device_mesh", _mesh),  # reads the values of a tensor of ranks
            (allocate, "trace_constructor", _trace),  # runs on meta; a fake tensor stores its device in an attribute
            (allocate, "draw", _empty),
            (_Materializer, "_traced_value", _without_values),
            (deferred_wgrad, "Tensor", FakeTensor),  # the type of a plain tensor
            (consistency, "_samples", lambda batch: iter(())),
            (consistency.BatchCheck, "check", lambda self, total: None),
            (consistency.ProgramCheck, "check", lambda self, total: None),
            (Bucket, "used_by_ranks", lambda self: [float(i in self._present) for i in range(len(self.params))]),
            (RowGradients, "used_by_ranks", lambda self, flags: [float(used) for used in self._present]),
            *(() if on_cpu else ((shared_memory, "flat_limit", lambda device: None),)),
        ):
            stack.enter_context(patch.object(owner, name, stand_in))
        stack.enter_context(balanced_experts(on_cpu=on_cpu))
        fake = stack.enter_context(counted_fake_tensors())
        if on_cpu:
            stack.enter_context(fake_channels(fake))
        yield fake


def _mesh(*args: Any, **options: Any) -> DeviceMesh:
    with _disable_current_modes():
        return init_device_mesh(*args, **options)


def _trace(*args: Any) -> Any:
    with _disable_current_modes():
        return trace_constructor(*args)


def _empty(
    spec: Any, shape: tuple[int, ...], context: Any, *, key_of: Any, dtype: torch.dtype | None, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=device)


def _without_values(self: Any, tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype)
