"""Products of consecutive groups of rows, each group with a weight of its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus import torch_versions
from colossus.comm.host_transfer import send_to
from colossus.comm.kept_results import read_once
from colossus.tensor_parallel.dtypes import product_dtype


def group_sizes(counts: Tensor, x: Tensor, weight: Tensor) -> Tensor | list[int]:
    """Return the counts for `grouped_product` in its fastest form for such operands: on the host, or on the device."""
    if x.is_meta:  # only operations are counted, which any split has equally many of
        return [len(x), *[0] * (len(weight) - 1)]
    if x.is_cuda and is_one_kernel(x, weight):
        return counts if counts.is_cuda else send_to(x.device, counts)
    return read_once(counts.tolist)


def is_one_kernel(x: Tensor, weight: Tensor) -> bool:
    """Return whether a GPU multiplies all groups of such operands in one kernel."""
    is_aligned = weight.shape[-1] % 8 == 0 and weight.shape[-2] % 8 == 0  # rows of whole 16 bytes
    is_bf16 = (product_dtype(x) or x.dtype) == torch.bfloat16
    return is_bf16 and is_aligned and torch_versions.grouped_mm is not None


def grouped_product(x: Tensor, weights: Tensor, counts: Tensor | list[int], biases: Tensor | None = None) -> Tensor:
    """Return ``x_g @ weights[g].T`` for the rows of each group g, which are consecutive: x [n, in] -> [n, out].

    Args:
        weights: [groups, out, in].
        counts: rows of each group, of sum n, from `group_sizes`: with a tensor all groups are one kernel
            (``torch._grouped_mm``) and the host reads no counts; with a list they are a loop.
        biases: [groups, out], added to the rows of their group.
    """
    if isinstance(counts, Tensor):
        dtype = product_dtype(x) or x.dtype
        ends = counts.cumsum(0, dtype=torch.int32)
        y: Tensor = torch_versions.grouped_mm(x.to(dtype), weights.to(dtype).transpose(-2, -1), ends)
        return y if biases is None else y + biases.to(dtype).repeat_interleave(counts, 0, output_size=len(x))
    of_groups = [None] * len(weights) if biases is None else biases.unbind()
    parts = zip(x.split(counts), weights.unbind(), of_groups, strict=True)
    return torch.cat([F.linear(rows, weight, bias) for rows, weight, bias in parts])
