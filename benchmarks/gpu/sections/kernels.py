"""What ring attention and the optimizer are made of, beside torch's own: the same numbers first, then time.

A ring is run rank after rank in one process, with nothing sent: what it takes longer than the same kernels over the
whole sequence is the price of tiles and of merging them. scaled_dot_product_attention, left to choose, may have a
faster one (cuDNN's, on Hopper), which gives no log-sum-exp to merge by. Forward and backward, causal.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.common import Spread, ratio
from benchmarks.gpu.one_process_ring import OneProcessRing
from benchmarks.gpu.section import Case, Figures, LeftOut
from benchmarks.timing import compare
from colossus.registry import OPTIMIZERS

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: largest difference from attention in a wider dtype, over the largest number there
TOLERANCES = {"bf16": 2e-2, "fp16": 4e-3, "fp32": 1e-4}
#: what a ring is made of
SAME_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
#: that AdamW moves for each fp32 parameter: value, gradient and two moments read, all but the gradient written
ADAMW_BYTES = 28


@dataclass(frozen=True)
class Attention:
    """A causal attention, whole or over a ring.

    Attributes:
        num_documents: that the sequence is made of; more than one needs masks.
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


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    on_cuda = device.type == "cuda"
    tokens, few = (16384, 4096) if on_cuda else (256, 128)
    attentions = [
        *(Attention("bf16", ranks, tokens) for ranks in (1, 2, 4)),
        Attention("fp16", 4, tokens),
        Attention("fp32", 4, few),
        Attention("bf16", 4, few, num_documents=5),
        Attention("fp32", 4, few, num_documents=5),
    ]
    share = budget / (len(attentions) + 1)
    for attention in attentions:
        yield Case(attention.name, partial(_attention, attention, device, share / 2), seconds=max(4 * share, 60))
    num_parameters = 200_000_000 if on_cuda else 100_000
    yield Case("fused AdamW", partial(_adamw, device, num_parameters, share / 2), seconds=max(4 * share, 60))


# -- attention ------------------------------------------------------------------------------------------------


def _attention(attention: Attention, device: torch.device, seconds: float) -> Figures:
    if attention.dtype == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        raise LeftOut("torch's flash kernels take bf16 on devices of capability 8.0 and more")
    dtype = DTYPES[attention.dtype]
    q, k, v, dout = (x.to(device, dtype) for x in draw(attention))
    documents = documents_of(attention, device)
    mask = None if documents is None else mask_of(documents)
    in_ring = OneProcessRing(attention.ranks, q, k, v, dout, documents)
    wide = torch.float64 if dtype == torch.float32 else torch.float32
    gaps = in_ring.gaps(whole_attention(*(x.to(wide) for x in (q, k, v, dout)), mask))
    worst = max(gaps, key=lambda name: gaps[name])
    if not gaps[worst] <= TOLERANCES[attention.dtype]:
        raise AssertionError(
            f"{worst} is off by {gaps[worst]:.3g} of its largest number, allowed are {TOLERANCES[attention.dtype]}"
        )
    whole = partial(whole_attention, q, k, v, dout, mask)

    def by_same_kernels() -> None:
        with sdpa_kernel(SAME_KERNELS):
            whole()

    series = compare({"ring": in_ring.run, "torch": whole, "same kernels": by_same_kernels}, device, seconds)
    return {
        "ms": Spread.of(series["ring"]).median * 1e3,
        "ms of torch": Spread.of(series["torch"]).median * 1e3,
        "time / torch": ratio(series, "ring", "torch").median,
        "time / same kernels": ratio(series, "ring", "same kernels").median,
        "off by": gaps[worst],
        "tokens": attention.tokens,
    }


def draw(attention: Attention) -> list[Tensor]:
    """Queries, keys, values, the gradient of the output, [1, heads, tokens, head_dim]."""
    generator = torch.Generator().manual_seed(0)
    a = attention
    heads = (a.heads, a.kv_heads, a.kv_heads, a.heads)
    return [torch.randn(1, count, a.tokens, a.head_dim, generator=generator) for count in heads]


def documents_of(attention: Attention, device: torch.device) -> Tensor | None:
    """Numbers [1, tokens] of documents of unequal lengths."""
    if attention.num_documents == 1:
        return None
    places = torch.arange(attention.tokens, dtype=torch.float64) / attention.tokens
    return (places.pow(1.7) * attention.num_documents).long().unsqueeze(0).to(device)


def mask_of(documents: Tensor) -> Tensor:
    """[1, 1, tokens, tokens], True where a query may look: back, and in its own document."""
    same = documents[:, None, :, None] == documents[:, None, None, :]
    return same.tril_()


def whole_attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, mask: Tensor | None) -> list[Tensor]:
    """Output, dq, dk and dv by torch. Kernels that take masks, or wide numbers, want as many key heads as query heads;
    the flash kernels do not."""
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    repeats = q.shape[1] // k.shape[1]
    is_flash = mask is None and q.dtype in (torch.bfloat16, torch.float16)
    keys, values = (k, v) if is_flash else (x.repeat_interleave(repeats, dim=1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q, keys, values, attn_mask=mask, is_causal=mask is None, enable_gqa=is_flash and repeats > 1
    )
    out.backward(dout)
    return [x.detach() for x in (out, q.grad, k.grad, v.grad) if x is not None]


# -- the optimizer --------------------------------------------------------------------------------------------


def _adamw(device: torch.device, num_parameters: int, seconds: float) -> Figures:
    """Ours is torch's own, made without the wrappers that import a compiler: the same bits, and the same time."""
    options = {"lr": 1e-3, "weight_decay": 0.1}
    ours, fused, looped = (_parameters(num_parameters, device) for _ in range(3))
    optimizers = {
        "colossus": OPTIMIZERS.get("AdamW")(ours, **options),
        "torch": torch.optim.AdamW(fused, fused=True, **options),
        "foreach": torch.optim.AdamW(looped, foreach=True, **options),
    }
    for _ in range(3):
        for optimizer in optimizers.values():
            optimizer.step()
    for a, b, c in zip(ours, fused, looped, strict=True):
        assert torch.equal(a, b), "a parameter differs from that of torch's fused AdamW"
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-6)
    series = compare({name: optimizer.step for name, optimizer in optimizers.items()}, device, seconds)
    times = {name: Spread.of(taken).median for name, taken in series.items()}
    moved = ADAMW_BYTES * sum(x.numel() for x in ours)
    return {
        "ms": times["colossus"] * 1e3,
        "time / torch": ratio(series, "colossus", "torch").median,
        "time / foreach": ratio(series, "colossus", "foreach").median,
        "GB/s": moved / times["colossus"] / 1e9,
        "parameters": sum(x.numel() for x in ours),
    }


def _parameters(count: int, device: torch.device) -> list[nn.Parameter]:
    """In tensors of some sizes, with gradients."""
    generator = torch.Generator(device).manual_seed(1)
    sizes = [count // 2, count // 4, count // 8, *([count // 1000] * 125)]
    out = [nn.Parameter(torch.randn(size, generator=generator, device=device)) for size in sizes]
    for param in out:
        param.grad = torch.randn(param.shape, generator=generator, device=device)
    return out
