"""The attention of all ranks of a ring, one rank after the other in one process, with nothing sent.

All but the messages is what ranks do: `colossus.sequence_parallel.ring_attention` with its tiles, kernels and merging.
"""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import torch
from torch import Tensor

from colossus.context.groups import AxisGroup
from colossus.sequence_parallel import ring_attention
from colossus.sequence_parallel.modes import zigzag_order


class OneProcessRing:
    """
    Args:
        q: [batch, heads, tokens, head_dim] of the whole sequence.
        k, v: [batch, kv_heads, tokens, head_dim].
        dout: the gradient of the output.
        documents: [batch, tokens], or None.
    """

    def __init__(
        self, num_ranks: int, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, documents: Tensor | None = None
    ) -> None:
        self.num_ranks, self.whole = num_ranks, q
        self.places = torch.tensor(zigzag_order(q.shape[2], num_ranks), device=q.device).chunk(num_ranks)
        self.inputs = [[x[:, :, place].contiguous() for x in (q, k, v)] for place in self.places]
        self.dout = [dout[:, :, place].contiguous() for place in self.places]
        self.documents = [None if documents is None else documents[:, place].contiguous() for place in self.places]

    def run(self) -> list[list[Tensor]]:
        """Output, dq, dk and dv of each rank."""
        results, shares = [], [[torch.zeros_like(x) for x in inputs[1:]] for inputs in self.inputs]
        for rank in range(self.num_ranks):
            group = AxisGroup(("sequence",), tuple(range(self.num_ranks)), rank, None)
            with patch.object(ring_attention, "rotate", self._rotate(rank, shares)):
                q, k, v = (x.detach().requires_grad_() for x in self.inputs[rank])
                out = ring_attention.ring_attention(q, k, v, group, causal=True, documents=self.documents[rank])
                out.backward(self.dout[rank])
            results.append([out.detach(), q.grad, k.grad, v.grad])
        for result, (dk, dv) in zip(results, shares, strict=True):
            result[2], result[3] = result[2] + dk, result[3] + dv
        return results

    def _rotate(self, rank: int, shares: list[list[Tensor]]) -> Callable[..., Callable[[], list[Tensor]]]:
        """What a rank calls to pass its blocks on: keys and values of the others come from here, and its shares of
        their gradients are added up here."""
        calls = {"keys and values": 0, "gradients of keys and values": 0}

        def rotate(tensors: list[Tensor], group: AxisGroup, description: str) -> Callable[[], list[Tensor]]:
            calls[description] += 1
            if description == "keys and values":
                # forward and backward both go round once
                source = (rank - (calls[description] - 1) % (self.num_ranks - 1) - 1) % self.num_ranks
                coming = [*self.inputs[source][1:], self.documents[source]][: len(tensors)]
                return lambda: [x for x in coming if x is not None]
            source = (rank - calls[description]) % self.num_ranks
            for total, share in zip(shares[source], tensors, strict=True):
                total += share
            return lambda: [torch.zeros_like(share) for share in tensors]

        return rotate

    def gaps(self, whole: list[Tensor]) -> dict[str, float]:
        """Largest differences from the output, dq, dk and dv of the whole sequence, over the largest number there."""
        out = dict.fromkeys(("output", "dq", "dk", "dv"), 0.0)
        for place, found in zip(self.places, self.run(), strict=True):
            for name, x, reference in zip(out, found, whole, strict=True):
                wanted = reference[:, :, place]
                gap = ((x.to(reference.dtype) - wanted).abs().max() / reference.abs().max()).item()
                out[name] = max(out[name], gap) if gap == gap else float("inf")
        return out
