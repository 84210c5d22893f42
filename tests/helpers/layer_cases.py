"""Every layer with inputs for it and the same function in plain torch: output and all gradients, as whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from helpers.modes import BATCH, own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.state.model_state_dict import full_state_dict

#: divide over every mode of `helpers.modes`; heads of 16 features are what flash attention takes
HIDDEN, HEADS, WIDE, TOKENS, VOCAB = 192, 12, 288, 10, 37

#: allowed gaps, relative to the norm of what is compared: twice the rounding of that type times the products in a row
ALLOWED: dict[torch.dtype, float] = {
    torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 3e-2, torch.float16: 4e-3,
}  # fmt: skip
_SHORT = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}

Parameters = Mapping[str, Tensor]


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def integers(below: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


X = numbers(BATCH, TOKENS, HIDDEN)
IDS = integers(VOCAB, BATCH, TOKENS)
LABELS = integers(VOCAB, BATCH, TOKENS, seed=2)
LABELS[0, :4] = -100
DOCUMENTS = integers(3, BATCH, TOKENS, seed=3).sort(dim=1).values


@dataclass(frozen=True)
class LayerCase:
    """A layer, or a few in a row, and what it is called with.

    Attributes:
        make: constructor of the layer.
        inputs: global tensors, dim 0 the samples; floats get gradients.
        plain: the same function of parameters (by logical names) and inputs; None: the layer itself in one process.
        has_low: whether low precision is near the wide one. The place of a largest value depends on rounding.
    """

    make: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    plain: Callable[..., Tensor] | None
    has_low: bool = True


# -- ours -----------------------------------------------------------------------------------------------------------


class Between(nn.Module):
    """A layer in the layout that activations have between blocks."""

    def __init__(self, inner: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.inner = inner()

    def forward(self, x: Tensor) -> Any:
        return self.inner(layers.to_residual(x))


class Pair(nn.Module):
    """Column, functions element by element, row."""

    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(HIDDEN, WIDE, split="column")
        self.down = layers.Linear(WIDE, HIDDEN, split="row", bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * 2.0)


class Loss(nn.Module):
    """Head and loss: the sum over the samples of this rank."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.head, self.options = layers.LMHead(HIDDEN, VOCAB, bias=True), options

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return layers.cross_entropy(self.head(x), labels, **self.options)[0]


class ChunkedLoss(nn.Module):
    """A head with a bias, its logits 11 rows at a time, and weights of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.head = layers.LMHead(HIDDEN, VOCAB, bias=True)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        options: dict[str, Any] = dict(cap=3.0, z_loss=0.02, label_smoothing=0.1)
        weights = (labels % 3).to(x.dtype)
        return layers.chunked_cross_entropy(x, self.head, labels, chunk=11, token_weights=weights, **options)[0]


class Sampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = layers.SampledSoftmax(HIDDEN, VOCAB, 9, sparse=False)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return self.inner(x, labels)[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = layers.Embedding(VOCAB, HIDDEN)
        self.head = layers.LMHead(HIDDEN, VOCAB, tied_to=self.embedding)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return layers.cross_entropy(self.head(self.embedding(ids)), labels)[0]


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = layers.Embedding(VOCAB, HIDDEN), layers.PositionEmbedding(TOKENS, HIDDEN)

    def forward(self, ids: Tensor) -> Tensor:
        return self.positions(self.embedding(ids))


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = layers.PatchEmbedding(3, HIDDEN, (2, 4)), layers.ClassToken(HIDDEN)
        self.head = layers.Classifier(HIDDEN, 12)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.token(self.patches(images))[:, 0])


class Documents(nn.Module):
    """A token looks at the tokens before it that are of its own document."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.inner = layers.Attention(HIDDEN, HEADS, **options)

    def forward(self, x: Tensor, documents: Tensor) -> Tensor:
        return self.inner(x, documents=documents)


class Checkpointed(nn.Module):
    """A block behind another whose activations are computed again."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first, self.second = block(**options)(), layers.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return layers.to_whole(self.second(self.first(torch.tanh(x))))


def block(**options: Any) -> Callable[[], nn.Module]:
    return partial(layers.TransformerBlock, HIDDEN, HEADS, ffn_size=WIDE, **options)


# -- plain torch: p are parameters by their logical names, `at` is the prefix of a module ------------------------------


def linear(p: Parameters, x: Tensor, at: str = "") -> Tensor:
    return F.linear(x, p[at + "weight"], p.get(at + "bias"))


def norm(p: Parameters, x: Tensor, at: str = "", rms: bool = False, eps: float | None = None) -> Tensor:
    if rms:
        return F.rms_norm(x, (HIDDEN,), p[at + "weight"], eps)
    return F.layer_norm(x, (HIDDEN,), p[at + "weight"], p[at + "bias"])


def embedding(p: Parameters, ids: Tensor, at: str = "", padding: int | None = None) -> Tensor:
    return F.embedding(ids, p[at + "weight"], padding_idx=padding)


def bag(p: Parameters, ids: Tensor, mode: str, padding: int | None = None) -> Tensor:
    return F.embedding_bag(ids, p["weight"], mode=mode, padding_idx=padding)


def mlp(p: Parameters, x: Tensor, at: str = "", gated: bool = False) -> Tensor:
    up = F.silu(linear(p, x, at + "up.gate.")) * linear(p, x, at + "up.value.") if gated else F.gelu(
        linear(p, x, at + "up.")
    )  # fmt: skip
    return linear(p, up, at + "down.")


def attention(
    p: Parameters,
    x: Tensor,
    documents: Tensor | None = None,
    at: str = "",
    causal: bool = True,
    rotary: bool = False,
    window: int = TOKENS,
    scale: float | None = None,
    soft_cap: float | None = None,
) -> Tensor:
    size = HIDDEN // HEADS
    q, k, v = (
        linear(p, x, f"{at}qkv.{name}.").unflatten(-1, (-1, size)).transpose(1, 2) for name in ("query", "key", "value")
    )
    if rotary:
        q, k = rotate(q), rotate(k)
    k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], 1) for heads in (k, v))
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool, device=x.device).tril().triu(1 - window) if causal else None
    if documents is not None:
        mask = mask & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = q @ k.mT * (size**-0.5 if scale is None else scale)
    scores = scores if soft_cap is None else soft_cap * torch.tanh(scores / soft_cap)
    scores = scores if mask is None else scores.masked_fill(~mask, float("-inf"))
    if at + "sinks" in p:
        scores = torch.cat((scores, p[at + "sinks"].view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)), -1)
    y = scores.softmax(-1)[..., :TOKENS] @ v
    return linear(p, y.transpose(1, 2).flatten(2), at + "out.")


def rotate(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device=x.device) / half)
    angles = torch.arange(TOKENS, dtype=torch.float64, device=x.device)[:, None] * rates
    one, two = x[..., :half], x[..., half:]
    return torch.cat((one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()), -1)


def plain_block(p: Parameters, x: Tensor, at: str = "inner.", llama: bool = False) -> Tensor:
    x = x + attention(p, norm(p, x, at + "attention_norm.", llama, 1e-6), at=at + "attention.", rotary=llama)
    return x + mlp(p, norm(p, x, at + "mlp_norm.", llama, 1e-6), at + "mlp.", llama)


def loss(p: Parameters, x: Tensor, labels: Tensor, label_smoothing: float = 0.0, z_loss: float = 0.0) -> Tensor:
    logits, labels = linear(p, x, "head.").flatten(0, 1), labels.flatten()
    entropy = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=label_smoothing)
    return entropy + z_loss * (logits.logsumexp(-1)[labels != -100] ** 2).sum()


def chunked_loss(p: Parameters, x: Tensor, labels: Tensor) -> Tensor:
    logits = 3.0 * (linear(p, x, "head.") / 3.0).tanh()
    logp = logits.log_softmax(-1)
    entropy = -0.9 * logp.gather(-1, labels.clamp(min=0)[..., None])[..., 0] - 0.1 * logp.mean(-1)
    return ((entropy + 0.02 * logits.logsumexp(-1) ** 2) * (labels % 3) * (labels != -100)).sum()


def lora(p: Parameters, x: Tensor) -> Tensor:
    base = {name: value.detach() for name, value in p.items()}  # frozen
    return linear(base, x, "base.") + 2.0 * linear(p, linear(p, x, "first."), "second.")


def images(p: Parameters, x: Tensor) -> Tensor:
    patches = F.conv2d(x, p["patches.weight"].view(HIDDEN, 3, 2, 4), p["patches.bias"], (2, 4))
    assert patches.shape[1] == HIDDEN
    token = p["token.weight"].expand(len(x), 1, -1)  # the classifier looks at the class token alone
    return linear(p, torch.cat((token, patches.flatten(2).transpose(1, 2)), 1)[:, 0], "head.")


def checkpointed(p: Parameters, x: Tensor) -> Tensor:
    return norm(p, plain_block(p, torch.tanh(x), "first."), "second.")


CASES: dict[str, LayerCase] = {
    "Linear": LayerCase(partial(layers.Linear, HIDDEN, 36), (X,), linear),
    "Linear column, row": LayerCase(
        Pair, (X,), lambda p, x: linear(p, F.gelu(linear(p, x, "up.")) * 2, "down.")
    ),
    "Linear column, row between blocks": LayerCase(
        partial(Between, Pair), (X,), lambda p, x: linear(p, F.gelu(linear(p, x, "inner.up.")) * 2, "inner.down.")
    ),
    "Embedding": LayerCase(partial(layers.Embedding, VOCAB, HIDDEN, 2), (IDS,), partial(embedding, padding=2)),
    "Embedding, PositionEmbedding": LayerCase(
        Positions, (IDS,), lambda p, ids: embedding(p, ids, "embedding.") + p["positions.weight"]
    ),
    "EmbeddingBag sum": LayerCase(
        partial(layers.EmbeddingBag, VOCAB, HIDDEN, mode="sum"), (IDS,), partial(bag, mode="sum")
    ),
    "EmbeddingBag mean": LayerCase(
        partial(layers.EmbeddingBag, VOCAB, HIDDEN, padding_idx=3), (IDS,), partial(bag, mode="mean", padding=3)
    ),
    "EmbeddingBag max": LayerCase(
        partial(layers.EmbeddingBag, VOCAB, HIDDEN, mode="max"), (IDS,), partial(bag, mode="max"), has_low=False
    ),
    "LayerNorm": LayerCase(
        partial(Between, partial(layers.LayerNorm, HIDDEN)), (X,), lambda p, x: norm(p, x, "inner.")
    ),
    "RMSNorm": LayerCase(
        partial(Between, partial(layers.RMSNorm, HIDDEN)), (X,), lambda p, x: norm(p, x, "inner.", rms=True)
    ),
    "MLP": LayerCase(partial(layers.MLP, HIDDEN, WIDE), (X,), mlp),
    "GatedMLP": LayerCase(partial(layers.GatedMLP, HIDDEN, WIDE), (X,), partial(mlp, gated=True)),
    "Attention causal": LayerCase(partial(layers.Attention, HIDDEN, HEADS), (X,), attention),
    "Attention both ways": LayerCase(
        partial(layers.Attention, HIDDEN, HEADS, mask=layers.Mask.full()), (X,), partial(attention, causal=False)
    ),
    "Attention rotary, grouped heads": LayerCase(
        partial(layers.Attention, HIDDEN, HEADS, 6, rotary=True), (X,), partial(attention, rotary=True)
    ),
    "Attention within documents": LayerCase(Documents, (X, DOCUMENTS), partial(attention, at="inner.")),
    "Attention within windows": LayerCase(
        partial(layers.Attention, HIDDEN, HEADS, 6, rotary=True, mask=layers.Mask.window(2)), (X,),
        partial(attention, rotary=True, window=3),
    ),
    "Attention within windows of documents": LayerCase(
        partial(Documents, mask=layers.Mask.window(1)), (X, DOCUMENTS), partial(attention, at="inner.", window=2)
    ),
    "Attention with sinks": LayerCase(
        partial(layers.Attention, HIDDEN, HEADS, 6, sinks=True), (X,), attention
    ),
    "Attention with soft cap and scale, sinks and documents": LayerCase(
        partial(Documents, sinks=True, soft_cap=0.3, scale=0.5, mask=layers.Mask.window(4)), (X, DOCUMENTS),
        partial(attention, at="inner.", window=5, scale=0.5, soft_cap=0.3),
    ),
    "TransformerBlock": LayerCase(partial(Between, block()), (X,), plain_block),
    "TransformerBlock like Llama": LayerCase(
        partial(Between, block(norm="rmsnorm", mlp="swiglu", bias=False, rotary=True)), (X,),
        partial(plain_block, llama=True),
    ),
    "TransformerBlock checkpointed, full": LayerCase(
        partial(Checkpointed, activation_checkpoint="full"), (X,), checkpointed
    ),
    "TransformerBlock checkpointed, selective": LayerCase(
        partial(Checkpointed, activation_checkpoint="selective"), (X,), checkpointed
    ),
    "LoRALinear": LayerCase(
        lambda: layers.LoRALinear(layers.Linear(HIDDEN, WIDE), rank=12, alpha=24.0), (X,), lora
    ),
    "LMHead, cross_entropy": LayerCase(Loss, (X, LABELS), loss),
    "LMHead, cross_entropy smoothed, z-loss": LayerCase(
        partial(Loss, label_smoothing=0.1, z_loss=0.02), (X, LABELS), partial(loss, label_smoothing=0.1, z_loss=0.02)
    ),
    "chunked_cross_entropy": LayerCase(ChunkedLoss, (X, LABELS), chunked_loss),
    "Embedding tied to LMHead": LayerCase(
        Tied, (IDS, LABELS),
        lambda p, ids, labels: loss({"head.weight": p["embedding.weight"]}, embedding(p, ids, "embedding."), labels),
    ),
    "SampledSoftmax": LayerCase(Sampled, (X, LABELS.clamp(min=0)), None),
    "PatchEmbedding, ClassToken, Classifier": LayerCase(Images, (numbers(BATCH, 3, 4, 8),), images),
}  # fmt: skip

Result = dict[str, Tensor]


def compute(
    context: ParallelContext, case: LayerCase, dtype: torch.dtype, autocast: torch.dtype | None = None
) -> tuple[Result, Parameters]:
    """Return output and gradients of sum(layer(..) * weights) on the device in float64, and the whole parameters.

    Outputs and gradients of inputs are this rank's share of the samples, gradients of parameters are whole.

    Args:
        autocast: the layer has parameters of ``dtype`` and runs under ``torch.autocast`` of this one.
    """
    module = colossus.build(case.make, context, dtype=dtype)
    device = context.device
    inputs = [
        own(context, x).to(device, dtype).requires_grad_() if x.is_floating_point() else own(context, x).to(device)
        for x in case.inputs
    ]
    with context, torch.autocast(device.type, autocast) if autocast is not None else nullcontext():
        out = layers.to_whole(module(*inputs))
    _backward(context, out)
    if not out.dim():  # a loss is a sum over samples
        out = collectives.all_reduce(out.detach(), context.group(model_parallel_of(context).regions.whole.batch)).wait()
    with torch._C.DisableTorchFunctionSubclass():  # the sum is a plain tensor, no slice of a parameter
        for parameter in module.parameters():
            if parameter.grad is not None and (axes := gradient_sum_axes(parameter, context)):
                parameter.grad = collectives.all_reduce(parameter.grad.contiguous(), context.group(axes)).wait()
    result = {"output": out, **{f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}}
    result |= {f"gradient of {n}": g for n, g in full_state_dict(module, context, gradients=True).items()}
    parameters = {name: value.detach().double() for name, value in full_state_dict(module, context).items()}
    return {name: value.detach().to(device, torch.float64) for name, value in result.items()}, parameters


def _backward(context: ParallelContext | None, out: Tensor) -> None:
    if not out.dim():
        out.backward()
        return
    weights = numbers(BATCH, *out.shape[1:], seed=9)
    (out * (weights if context is None else own(context, weights)).to(out)).sum().backward()


def compute_plain(device: torch.device, case: LayerCase, parameters: Parameters) -> Result:
    """Return the same in plain torch, in one process on the device in float64, with these parameters."""
    assert case.plain is not None
    leaves = {name: value.detach().clone().to(device).requires_grad_() for name, value in parameters.items()}
    inputs = [x.to(device, copy=True).requires_grad_() if x.is_floating_point() else x.to(device) for x in case.inputs]
    out = case.plain(leaves, *inputs)
    _backward(None, out)
    result = {"output": out.detach()}
    result |= {f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None}
    return result | {f"gradient of {name}": leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def largest_gap(context: ParallelContext, result: Result, expected: Result) -> tuple[float, str]:
    """Return the largest norm of a difference over the norm of the expected tensor, and the name of that tensor.

    Gradients that are nothing but rounding (of a key's bias, which softmax ignores) are measured against the largest.

    Raises:
        AssertionError: names or shapes differ, or a number is not finite.
    """
    assert result.keys() == expected.keys(), f"there is {sorted(result)}, not {sorted(expected)}"
    least = 1e-2 * max(value.norm().item() for value in expected.values())
    worst = 0.0, "nothing"
    for name, value in expected.items():
        if name == "output" or name.startswith("gradient of input"):
            value = own(context, value) if value.dim() else value
        mine = result[name]
        assert mine.shape == value.shape, f"{name} has shape {tuple(mine.shape)}, not {tuple(value.shape)}"
        assert mine.isfinite().all(), f"{name} has {int((~mine.isfinite()).sum())} numbers that are not finite"
        gap = (mine - value).norm().item() / max(value.norm().item(), least)
        worst = max(worst, (gap, name))
    return worst


def check(
    context: ParallelContext,
    alone: ParallelContext,
    name: str,
    dtype: torch.dtype,
    autocast: torch.dtype | None = None,
) -> dict[str, float]:
    """Return the gap of a layer under this context, as a figure.

    Args:
        alone: a context of one rank, for the layer that plain torch does not have.

    Raises:
        AssertionError: the gap is larger than what rounding makes.
    """
    case = CASES[name]
    result, parameters = compute(context, case, dtype, autocast)
    if case.plain is None:
        expected, _ = compute(alone, case, torch.float64)
    else:
        expected = compute_plain(context.device, case, parameters)
    gap, where = largest_gap(context, result, expected)
    low = autocast or dtype
    title = _SHORT[low] + (" autocast" if autocast is not None else "")
    assert gap <= ALLOWED[low], (
        f"{name}, {title}: {where} is off by {gap:.2g} of its norm, {ALLOWED[low]:.2g} is allowed"
    )
    return {title: gap}
