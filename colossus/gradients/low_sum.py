"""Sums of gradients that travel in 16 bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.comm.staged import Staged, Stages
from colossus.context.groups import AxisGroup
from colossus.gradients.bucket_sum import padded
from colossus.gradients.compression import CompressionMemory, ErrorBuffer

#: exponent of the largest number that float16 is given
_LARGEST = 15


class LowSum:
    """Half the bytes of an all-reduce, or a quarter in float64: bfloat16 or float16 on the way, summed as they are.

    Every rank sends each other the chunk that this one is to sum, and gets sums back. What rounding takes away, of an
    addend or of a sum, its rank adds to its next addend (1901.09847), so no part of a gradient is lost for good. All
    ranks make the same numbers of the same bytes.

    A float16 chunk is scaled by a power of two, which goes with it, so that nothing overflows.

    Args:
        whole: summed over before, exactly: the axes inside of a replica.
        inner: the ranks of this host, see `TwoLevelSum`; compressed is what goes between hosts.
        outer: those that exchange compressed chunks.
        dtype: on the way.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        whole: AxisGroup,
        inner: AxisGroup,
        outer: AxisGroup,
        dtype: torch.dtype,
        memory: CompressionMemory,
    ) -> None:
        self._params, self._whole, self._inner, self._outer = list(params), whole, inner, outer
        self._dtype, self._memory = dtype, memory
        self._error: ErrorBuffer | None = None

    def start(self, flat: Tensor) -> Pending:
        return Staged(self._stages(flat))

    def _stages(self, flat: Tensor) -> Stages:
        if self._error is None:
            self._error = ErrorBuffer(self._params, flat.dtype, self._memory)
        num_flags = len(self._params)
        flat = yield collectives.all_reduce(flat, self._whole, owned=True)
        numbers, flags = flat[:-num_flags], flat[-num_flags:]
        num_ranks, num_inner = self._outer.size, self._inner.size
        size = -(-numbers.numel() // (num_inner * num_ranks))  # of a chunk
        flags = yield collectives.all_reduce(flags, self._inner)
        share = yield collectives.reduce_scatter(padded(numbers, num_inner * num_ranks), self._inner)
        owed = self._memory.take(self._error).to(share.dtype)
        error = padded(owed, num_inner * num_ranks).view(num_inner, num_ranks, size)[self._inner.index]
        share = share.view(num_ranks, size) + error
        sent = self._packed(share)
        error = share - self._unpacked(sent, share.dtype)
        # a rank that has used a parameter tells all others so
        used = flags.clamp(max=1).to(self._dtype).expand(num_ranks, num_flags)
        received = yield collectives.all_to_all(torch.cat((sent, used), 1), self._outer, 0, 0)
        used = received[:, -num_flags:].to(flags.dtype).sum(0)
        addends = self._unpacked(received[:, :-num_flags], share.dtype)
        me = self._outer.index
        addends[me] = share[me]
        total = addends[0]
        for addend in addends[1:]:
            total += addend
        sent = self._packed(total[None])
        error[me] = total - self._unpacked(sent, share.dtype)[0]
        received = yield collectives.all_gather(sent, self._outer)
        self._keep(error.flatten())
        total = self._unpacked(received, share.dtype).flatten()
        whole = yield collectives.all_gather(total, self._inner)
        return torch.cat((whole[: numbers.numel()], used))

    def _keep(self, error: Tensor) -> None:
        """This rank's errors, for the next step; those of gradients that are not finite are none."""
        assert self._error is not None
        start = error.numel() * self._inner.index
        kept = self._error.left[start : start + error.numel()]
        kept.copy_(error[: kept.numel()].nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))

    def _packed(self, chunks: Tensor) -> Tensor:
        """[n, size] -> [n, size] of 16 bits each, in float16 and two more for the scale."""
        if self._dtype == torch.bfloat16:
            return chunks.to(self._dtype)
        largest = chunks.abs().amax(1).float() if chunks.numel() else chunks.new_zeros(len(chunks)).float()
        _, exponent = torch.frexp(torch.where(largest.isfinite(), largest, 0.0))
        scale = torch.ldexp(torch.ones_like(largest), (_LARGEST - exponent).clamp(-100, 100))
        low = (chunks * scale[:, None]).to(self._dtype)
        return torch.cat((low, scale[:, None].view(self._dtype)), 1)

    def _unpacked(self, packed: Tensor, dtype: torch.dtype) -> Tensor:
        """What `_packed` was given, rounded."""
        if self._dtype == torch.bfloat16:
            return packed.to(dtype)
        scale = packed[:, -2:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        return packed[:, :-2].to(dtype) / scale.to(dtype)
