"""Ring attention and the fused optimizer beside torch's own kernels, in one process: the same numbers first, then time.

    python -m benchmarks.kernels --device cuda

A ring is run rank after rank in one process, with nothing sent: what it takes longer than the same kernels over the
whole sequence is the price of tiles and of merging them. scaled_dot_product_attention, left to choose, may have a
faster kernel (cuDNN's, on Hopper), which gives no log-sum-exp to merge by. Forward and backward, causal.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import common
from benchmarks.common import Series, Spread, ratio
from benchmarks.timing import compare
from colossus.context.groups import AxisGroup
from colossus.engine.optimizers import torch_optimizer
from colossus.sequence_parallel import ring_attention
from colossus.sequence_parallel.mask import CAUSAL
from colossus.sequence_parallel.modes import zigzag_order

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: largest difference from attention in a wider dtype, over the largest number there
TOLERANCES = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}
#: kernels of which a ring is made
SAME_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
#: bytes that AdamW moves for each fp32 parameter: value, gradient and two moments read, all but the gradient written
ADAMW_BYTES = 28


@dataclass(frozen=True)
class Attention:
    """A causal attention, whole or over a ring.

    Attributes:
        num_documents: number of documents in the sequence; more than one needs masks.
    """

    dtype: str
    ranks: int
    tokens: int
    num_documents: int = 1
    heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64

    @property
    def name(self) -> str:
        return f"ring of {self.ranks}, {self.dtype}" + (", documents" if self.num_documents > 1 else "")


class OneProcessRing:
    """The attention of all ranks of a ring, one rank after the other, with nothing sent.

    All but the messages is what ranks do: `colossus.sequence_parallel.ring_attention` with its tiles and merging.

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
        """Return output, dq, dk and dv of each rank."""
        results, shares = [], [[torch.zeros_like(x) for x in inputs[1:]] for inputs in self.inputs]
        for rank in range(self.num_ranks):
            group = AxisGroup(("sequence",), tuple(range(self.num_ranks)), rank, None)
            with patch.object(ring_attention, "rotate", self._rotate(rank, shares)):
                q, k, v = (x.detach().requires_grad_() for x in self.inputs[rank])
                out = ring_attention.ring_attention(q, k, v, group, mask=CAUSAL, documents=self.documents[rank])
                out.backward(self.dout[rank])
            results.append([out.detach(), q.grad, k.grad, v.grad])
        for result, (dk, dv) in zip(results, shares, strict=True):
            result[2], result[3] = result[2] + dk, result[3] + dv
        return results

    def _rotate(self, rank: int, shares: list[list[Tensor]]) -> Callable[..., Callable[[], list[Tensor]]]:
        """Return what a rank calls to pass its blocks on, which brings the others' blocks and sums their gradients."""
        calls = {"keys and values": 0, "gradients of keys and values": 0}

        def rotate(tensors: list[Tensor], group: AxisGroup, description: str, hop: int) -> Callable[[], list[Tensor]]:
            assert hop == 1  # without a window every rank needs all blocks
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
        """Return the largest differences from the whole sequence's tensors, over the largest number there."""
        out = dict.fromkeys(("output", "dq", "dk", "dv"), 0.0)
        for place, tensors in zip(self.places, self.run(), strict=True):
            for name, x, reference in zip(out, tensors, whole, strict=True):
                gap = ((x.to(reference.dtype) - reference[:, :, place]).abs().max() / reference.abs().max()).item()
                out[name] = max(out[name], gap) if gap == gap else float("inf")
        return out


def draw(attention: Attention) -> list[Tensor]:
    """Return queries, keys, values and the gradient of the output, [1, heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    a = attention
    heads = (a.heads, a.kv_heads, a.kv_heads, a.heads)
    return [torch.randn(1, count, a.tokens, a.head_dim, generator=generator) for count in heads]


def documents_of(attention: Attention, device: torch.device) -> Tensor | None:
    """Return the numbers [1, tokens] of documents of unequal lengths."""
    if attention.num_documents == 1:
        return None
    places = torch.arange(attention.tokens, dtype=torch.float64) / attention.tokens
    return (places.pow(1.7) * attention.num_documents).long().unsqueeze(0).to(device)


def mask_of(documents: Tensor) -> Tensor:
    """Return [1, 1, tokens, tokens], True where a query may look: back, and in its own document."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()


def whole_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Return output, dq, dk and dv by torch.

    Kernels that take masks, or wide numbers, want as many key heads as query heads; the flash kernels do not.
    """
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    is_flash = mask is None and q.dtype in (torch.bfloat16, torch.float16)
    keys, values = (k, v) if is_flash else (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=is_flash and repeats > 1
    )
    out.backward(dout)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]


def check_ring(attention: Attention, device: torch.device) -> tuple[OneProcessRing, dict[str, Callable[[], object]]]:
    """Compare a ring with the attention over the whole sequence, in a wider dtype.

    Returns:
        The ring, and the same attention by torch as functions: by the kernel that torch chooses, and by a ring's.

    Raises:
        AssertionError: output or a gradient is off by more than rounding makes.
    """
    q, k, v, dout = (x.to(device, DTYPES[attention.dtype]) for x in draw(attention))
    documents = documents_of(attention, device)
    mask = None if documents is None else mask_of(documents)
    ring = OneProcessRing(attention.ranks, q, k, v, dout, documents)
    wide = torch.float64 if q.dtype == torch.float32 else torch.float32
    gaps = ring.gaps(whole_attention(*(x.to(wide) for x in (q, k, v, dout)), mask))
    worst = max(gaps, key=lambda name: gaps[name])
    allowed = TOLERANCES[attention.dtype]
    if not gaps[worst] <= allowed:
        raise AssertionError(f"{worst} is off by {gaps[worst]:.3g} of its largest number, {allowed} is allowed")
    whole = partial(whole_attention, q, k, v, dout, mask)

    def run_same_kernels() -> None:
        with sdpa_kernel(SAME_KERNELS):
            whole()

    return ring, {"torch": whole, "same kernels": run_same_kernels}


def check_adamw(device: torch.device, num_parameters: int) -> dict[str, torch.optim.Optimizer]:
    """Return our AdamW, torch's fused and torch's foreach one, which were stepped and compared.

    Raises:
        AssertionError: ours has other bits than torch's fused one, or is not near the foreach one.
    """
    options: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    ours, fused, foreach = (make_parameters(num_parameters, device) for _ in range(3))
    optimizers = {
        "colossus": torch_optimizer("AdamW", ours, **options),
        "torch": torch.optim.AdamW(fused, fused=True, **options),
        "foreach": torch.optim.AdamW(foreach, foreach=True, **options),
    }
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.step()
    for a, b, c in zip(ours, fused, foreach, strict=True):
        assert torch.equal(a, b), "a parameter differs from that of torch's fused AdamW"
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    return optimizers


def make_parameters(count: int, device: torch.device) -> list[nn.Parameter]:
    """Return tensors of some sizes, with gradients."""
    generator = torch.Generator(device).manual_seed(1)
    sizes = [count // 2, count // 4, count // 8, *([count // 1000] * 125)]
    parameters = [nn.Parameter(torch.randn(size, generator=generator, device=device)) for size in sizes]
    for parameter in parameters:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    return parameters


def attentions(tokens: int, masked_tokens: int) -> list[Attention]:
    return [
        *(Attention("bf16", ranks, tokens) for ranks in (1, 2, 4)),
        Attention("fp16", 4, tokens),
        Attention("fp32", 4, masked_tokens),
        Attention("bf16", 4, masked_tokens, num_documents=5),
        Attention("fp32", 4, masked_tokens, num_documents=5),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__, blocks=11)
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    arguments = parser.parse_args(argv)
    torch.set_num_threads(1)
    device, seconds = torch.device(arguments.device), 0.1 if arguments.smoke else 5.0
    sizes = (16384, 4096) if device.type == "cuda" else (256, 128)
    results: dict[str, Series] = {}
    rows = []
    for attention in attentions(*sizes):
        ring, peers = check_ring(attention, device)
        series = results[attention.name] = compare({"ring": ring.run, **peers}, device, seconds)
        rows.append((f"{attention.name}, {attention.tokens} tokens", f"{Spread.of(series['ring']).median * 1e3:.2f}",
                     ratio(series, "ring", "torch"), ratio(series, "ring", "same kernels")))  # fmt: skip
    common.print_table("attention", ("case", "ms", "time / torch", "time / same kernels"), rows)
    count = 200_000_000 if device.type == "cuda" else 100_000
    optimizers = check_adamw(device, count)
    series = compare({name: optimizer.step for name, optimizer in optimizers.items()}, device, seconds)
    results["AdamW"] = series
    median = Spread.of(series["colossus"]).median
    row = (f"{median * 1e3:.2f}", ratio(series, "colossus", "torch"), ratio(series, "colossus", "foreach"),
           f"{ADAMW_BYTES * count / median / 1e9:.0f}")  # fmt: skip
    common.print_table(f"AdamW, {count:,} parameters", ("ms", "time / fused", "time / foreach", "GB/s"), [row])
    common.write_json(arguments.json, {"cases": results})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
