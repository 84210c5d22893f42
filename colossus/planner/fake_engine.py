"""The real engine on tensors without values.

Where the engine reads a value, or an answer of another rank, it gets that of a healthy run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._python_dispatch import _disable_current_modes

from colossus.comm import collectives, shared_memory
from colossus.comm.channel import Channel, Consume
from colossus.comm.pending import Pending
from colossus.comm.tensor_transport import Fill
from colossus.construct import allocate
from colossus.construct.allocate import trace_constructor
from colossus.construct.build_model import _Materializer
from colossus.context import parallel_context
from colossus.context.groups import AxisGroup
from colossus.data_parallel.zero.row_gradients import RowGradients
from colossus.engine import consistency
from colossus.gradients.buckets import Bucket
from colossus.layers import deferred_wgrad, expert_rows, moe, routed_experts
from colossus.layers.grouped_matmul import is_one_kernel
from colossus.planner import device_play
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors


class FakeChannel(Channel):
    """A channel whose other ranks are there at once. Its slots are not counted, and what it copies is not observed.

    The slots are no memory of one rank, and the copies are a part of the collective.

    Args:
        group: the ranks.
        fake: counts bytes.
    """

    def __init__(self, group: AxisGroup, fake: CountedFakeTensors) -> None:
        slot = fake.uncounted(shared_memory.SLOT_BYTES)
        super().__init__(group, [[slot, slot]] * group.size, {})
        self._fake = fake

    def start(self, shape: torch.Size, dtype: torch.dtype, fill: Fill, consume: Consume) -> Pending:
        with self._fake.unobserved():
            pending = super().start(shape, dtype, fill, consume)

        def wait() -> Tensor:
            with self._fake.unobserved():
                return pending.wait()

        return Pending(wait)


@contextmanager
def fake_channels(fake: CountedFakeTensors) -> Iterator[None]:
    """Let collectives of CPU tensors go through a `FakeChannel` inside the context, as between ranks of one host."""
    with patch.object(shared_memory, "_open_channel", lambda group: FakeChannel(group, fake)):
        yield


@contextmanager
def balanced_experts(*, on_cpu: bool = True) -> Iterator[None]:
    """Let layers take the choices of their routers for balanced, without reading them, inside the context.

    Args:
        on_cpu: whether ranks compute on CPU; a GPU multiplies all experts of a rank in one kernel.
    """
    sizes = _group_sizes if on_cpu else _group_sizes_on_gpu
    with ExitStack() as stack:
        stack.enter_context(patch.object(expert_rows, "gather_counts", _gather_counts))
        stack.enter_context(patch.object(expert_rows, "arrived", _arrived))
        stack.enter_context(patch.object(moe, "num_chosen", lambda choices, num_experts: choices.numel()))
        for room in (moe, routed_experts):
            stack.enter_context(patch.object(room, "group_sizes", sizes))
        yield


def _evenly(number: int, parts: int) -> list[int]:
    return [number * (part + 1) // parts - number * part // parts for part in range(parts)]


def _gather_counts(choices: Tensor, num_experts: int, group: AxisGroup) -> tuple[Tensor, tuple[np.ndarray, int]]:
    evenly = _evenly(choices.numel(), num_experts)
    counts = torch.tensor(evenly, device=choices.device)
    gathered = collectives.all_gather(counts, group, what="lengths").wait().view(group.size, -1)
    return gathered, (np.array([evenly] * group.size), device_play.num_events())


def _arrived(read: tuple[np.ndarray, int]) -> np.ndarray:
    counts, num_before = read
    device_play.note_read(num_before)
    return counts


def _group_sizes(counts: Tensor, x: Tensor, weight: Tensor) -> list[int]:
    return _evenly(len(x), len(weight))


def _group_sizes_on_gpu(counts: Tensor, x: Tensor, weight: Tensor) -> Tensor | list[int]:
    return counts if is_one_kernel(x, weight) else _group_sizes(counts, x, weight)


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
