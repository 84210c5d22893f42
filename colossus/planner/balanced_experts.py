"""Experts on tensors without values: every expert gets equally many rows, and no row is dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.uneven import Lengths
from colossus.context.groups import AxisGroup
from colossus.layers import expert_rows, moe, routed_experts
from colossus.layers.grouped_matmul import is_one_kernel


@contextmanager
def balanced_experts(*, on_cpu: bool = True) -> Iterator[None]:
    """Let layers take the choices of their routers for balanced, without reading them, inside the context.

    Args:
        on_cpu: whether ranks compute on CPU; a GPU multiplies all experts of a rank in one kernel.
    """
    sizes = _group_sizes if on_cpu else _group_sizes_on_gpu
    with ExitStack() as stack:
        stack.enter_context(patch.object(expert_rows, "agree", _agree))
        stack.enter_context(patch.object(moe, "num_chosen", lambda counts, num_choices: num_choices))
        for room in (moe, routed_experts):
            stack.enter_context(patch.object(room, "group_sizes", sizes))
        yield


def _evenly(number: int, parts: int) -> list[int]:
    return [number * (part + 1) // parts - number * part // parts for part in range(parts)]


def _agree(rows: Tensor, counts: Tensor, group: AxisGroup) -> tuple[Lengths, Tensor]:
    n, num_local = group.size, len(counts) // group.size
    collectives.all_gather(torch.zeros(n + len(counts), dtype=torch.int64), group, what="lengths").wait()
    sent = tuple(_evenly(len(rows), n))
    lengths = Lengths(sent, (sent[group.index],) * n, (sent,) * n)
    return lengths, torch.tensor([_evenly(sent[group.index], num_local)] * n)


def _group_sizes(counts: Tensor, x: Tensor, weight: Tensor) -> list[int]:
    return _evenly(len(x), len(weight))


def _group_sizes_on_gpu(counts: Tensor, x: Tensor, weight: Tensor) -> Tensor | list[int]:
    return counts if is_one_kernel(x, weight) else _group_sizes(counts, x, weight)
