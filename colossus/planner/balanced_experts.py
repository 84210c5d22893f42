"""Experts on tensors without values: every expert gets equally many rows, and no row is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.context.groups import AxisGroup
from colossus.layers import expert_rows, moe, routed_experts
from colossus.layers.grouped_matmul import is_one_kernel
from colossus.planner import device_record


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
    return gathered, (np.array([evenly] * group.size), device_record.num_events())


def _arrived(read: tuple[np.ndarray, int]) -> np.ndarray:
    counts, num_before = read
    device_record.note_read(num_before)
    return counts


def _group_sizes(counts: Tensor, x: Tensor, weight: Tensor) -> list[int]:
    return _evenly(len(x), len(weight))


def _group_sizes_on_gpu(counts: Tensor, x: Tensor, weight: Tensor) -> Tensor | list[int]:
    return counts if is_one_kernel(x, weight) else _group_sizes(counts, x, weight)
