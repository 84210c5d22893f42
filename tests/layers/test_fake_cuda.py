"""Every layer in every tensor mode on CUDA devices that do not exist: nothing is on the wrong one, nothing waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.fake_cuda.pretend import DEVICE
from helpers.modes import BATCH, MODES, TOKENS, Mode, own
from helpers.ranks import grid_of
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.layer_options import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import DTYPES, Precision
from colossus.registry import TENSOR_MODES

HIDDEN, HEADS, WIDE, WORDS = 24, 6, 36, 41
PLAIN = Mode("1d", (1,))
ALL = {"none": PLAIN, **MODES}
#: how numbers are kept and computed: parameters, compute
PRECISIONS = {
    "fp64": ("fp64", "fp64"),
    "fp32": ("fp32", "fp32"),
    "bf16": ("fp32", "bf16"),
    "fp16": ("fp32", "fp16"),
    "pure bf16": ("bf16", "bf16"),
}


class Pair(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.up = layers.Linear(HIDDEN, WIDE, bias, split="column")
        self.down = layers.Linear(WIDE, HIDDEN, bias, split="row")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Between(nn.Module):
    """A layer where activations are split as they are between blocks."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, *more: Any) -> Tensor:
        return layers.to_user(self.layer(layers.to_outer(x), *more))


class Head(nn.Module):
    """A head whose logits stay split, and its loss."""

    def __init__(self, loss: Callable[..., tuple[Tensor, Tensor]], words: int = WORDS) -> None:
        super().__init__()
        self.head, self.loss = layers.LMHead(HIDDEN, words), loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(x)
        hits, seen = layers.accuracy(logits, labels)
        loss, count = self.loss(logits, labels)
        return loss / count + 0.0 * hits / seen


class Adapted(nn.Module):
    """Linears between which features are split, and one alone, with LoRA."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = layers.LoRALinear(layers.Linear(HIDDEN, HIDDEN), 12, 3.0)
        self.up = layers.LoRALinear(layers.Linear(HIDDEN, WIDE, split="column"), 12)
        self.down = layers.LoRALinear(layers.Linear(WIDE, HIDDEN, split="row"), 12)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.alone(x))))


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return layers.cross_entropy(logits, labels, label_smoothing=0.1, z_loss=0.01)


def hidden(device: str) -> Tensor:
    return torch.randn(BATCH, TOKENS, HIDDEN, device=device)


def ids(device: str, *shape: int, words: int = WORDS) -> Tensor:
    return torch.randint(0, words, shape or (BATCH, TOKENS), device=device)


def block(**options: Any) -> nn.Module:
    return Between(layers.TransformerBlock(HIDDEN, HEADS, 2, WIDE, **options))


def attention(**options: Any) -> nn.Module:
    return layers.Attention(HIDDEN, HEADS, 2, **options)


Inputs = tuple[Any, ...]
#: name -> the layer, its inputs (with the whole batch)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[str], Inputs]]] = {
    "linear": (lambda: layers.Linear(HIDDEN, 7), lambda on: (hidden(on),)),
    "pair": (Pair, lambda on: (hidden(on),)),
    "pair, no bias": (lambda: Pair(bias=False), lambda on: (hidden(on),)),
    "layer norm": (lambda: Between(layers.LayerNorm(HIDDEN)), lambda on: (hidden(on),)),
    "rms norm": (lambda: Between(layers.RMSNorm(HIDDEN)), lambda on: (hidden(on),)),
    "dropout": (lambda: Between(layers.Dropout(0.3)), lambda on: (hidden(on),)),
    "mlp": (lambda: layers.MLP(HIDDEN, WIDE), lambda on: (hidden(on),)),
    "gated mlp": (lambda: layers.GatedMLP(HIDDEN, WIDE), lambda on: (hidden(on),)),
    "embedding": (lambda: layers.Embedding(WORDS, HIDDEN), lambda on: (ids(on),)),
    "embedding, padding": (lambda: layers.Embedding(WORDS, HIDDEN, -1), lambda on: (ids(on),)),
    "positions": (lambda: Between(layers.PositionEmbedding(TOKENS + 1, HIDDEN)), lambda on: (hidden(on),)),
    "bag of sums": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="sum"), lambda on: (ids(on),)),
    "bag of means, padding": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, padding_idx=3), lambda on: (ids(on),)),
    "bag of largest": (lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="max"), lambda on: (ids(on),)),
    "weighted bag": (
        lambda: layers.EmbeddingBag(WORDS, HIDDEN, mode="sum", padding_idx=3),
        lambda on: (ids(on), None, torch.randn(BATCH, TOKENS, device=on)),
    ),
    "bags with offsets": (
        lambda: layers.EmbeddingBag(WORDS, HIDDEN),
        lambda on: (ids(on, 17), torch.arange(0, 17, 4, device=on)),
    ),
    "patches": (lambda: layers.PatchEmbedding(3, HIDDEN, (2, 4)), lambda on: (torch.randn(BATCH, 3, 4, 8, device=on),)),
    "attention": (attention, lambda on: (hidden(on),)),
    "attention, dropout": (lambda: attention(dropout=0.2), lambda on: (hidden(on),)),
    "attention, mask": (
        attention,
        lambda on: (hidden(on), torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool, device=on)),
    ),
    "attention, documents": (attention, lambda on: (hidden(on), None, ids(on, words=2))),
    "attention, rotary": (lambda: attention(rotary=True, causal=False), lambda on: (hidden(on),)),
    "attention, scaled rotary": (
        lambda: attention(rotary=True, rotary_scaling=dict(factor=8.0)),
        lambda on: (hidden(on),),
    ),
    "block": (lambda: block(dropout=0.1, mlp="swiglu", norm="rmsnorm"), lambda on: (hidden(on),)),
    "lora": (Adapted, lambda on: (hidden(on),)),
    "vocabulary loss": (lambda: Head(layers.cross_entropy), lambda on: (hidden(on), ids(on))),
    "smoothed loss": (lambda: Head(smoothed, 13), lambda on: (hidden(on), ids(on, words=13))),
    "classifier": (lambda: layers.Classifier(HIDDEN, 12), lambda on: (hidden(on),)),
}


def run_case(context: ParallelContext, name: str) -> None:
    """A forward and a backward, with gradients on the device."""
    make, inputs_of = CASES[name]
    precision = context.precision
    model = colossus.build(make, context, dtype=precision.params, wide_dtype=precision.data)
    inputs = [x if not isinstance(x, Tensor) else own(context, x) for x in inputs_of(str(DEVICE))]
    inputs = [as_input(x, precision) for x in inputs]
    for _ in range(2):  # what is made once, and what is found again
        with context, precision.autocast(context.device):
            out = layers.to_user(model(*inputs))
        out.float().sum().backward()
    assert out.device == DEVICE, name
    for key, parameter in model.named_parameters():
        assert parameter.device == DEVICE, (name, key)
        if parameter.requires_grad:
            assert parameter.grad is not None, (name, key)
            assert parameter.grad.device == DEVICE, (name, key)
    for x in inputs:
        assert not isinstance(x, Tensor) or not x.requires_grad or x.grad is not None, name


def as_input(x: Any, precision: Precision) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.to(precision.data).requires_grad_()
    return x


def body(rank: int, mode: Mode, precisions: list[str], names: list[str]) -> dict[str, list[str]]:
    """What waits, by case."""
    axes = TENSOR_MODES.get(mode.name).axes
    plan = grid_of(data=mode.data, tensor=dict(zip(axes, mode.shape, strict=True)))
    options = LayerOptions(tensor_mode=mode.name, sequence_sharded=mode.sequence_sharded)
    context = ParallelContext(plan, rank, options=options, device=DEVICE)
    found = {}
    for key in precisions:
        params, compute = (DTYPES[each] for each in PRECISIONS[key])
        wide = torch.float64 if params is torch.float64 else torch.float32
        context.precision = Precision(params, compute, wide, wide)
        for name in names:
            try:
                with Waits(allowed=True) as waits:
                    run_case(context, name)
            except Exception as error:
                error.add_note(f"in the case {name!r}, {key}")
                raise
            if waits.found:
                found[f"{name}, {key}"] = waits.found
    return found


@pytest.mark.parametrize("mode", ALL)
def test_layers(mode: str) -> None:
    """All layers; rank 0 and the last, whose shards may be empty."""
    ranks = sorted({0, ALL[mode].world - 1})
    for found in run_fake_ranks(ALL[mode].world, body, ALL[mode], list(PRECISIONS), list(CASES), ranks=ranks):
        assert found == {}
