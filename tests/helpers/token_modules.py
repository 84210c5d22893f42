"""Modules that work on each token by itself, and such that mix tokens, as users write them: [b, t, 16] -> the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH = 16


class Of(nn.Module):
    """A function of (weight or modules, x) as a module; ``weight`` [16, 16] is always there."""

    def __init__(self, function: Callable[..., Tensor], **children: nn.Module) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        for name, child in children.items():
            self.add_module(name, child)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


class Product(torch.autograd.Function):
    """A user's own function, whose backward sums over tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), torch.einsum("bth,btk->hk", x, grad)


class Square(torch.autograd.Function):
    """Another one, whose gradient is computed of what was saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


def experts(m: Any, x: Tensor) -> Tensor:
    weights, chosen = F.softmax(m.gate(x), dim=-1).topk(2, dim=-1)
    outputs = torch.stack([expert(x) for expert in m.experts], dim=2)  # [b, t, experts, h]
    picked = outputs.gather(2, chosen.unsqueeze(-1).expand(-1, -1, -1, WIDTH))
    return (picked * weights.unsqueeze(-1)).sum(2)


def heads(m: Any, x: Tensor) -> Tensor:
    batch, tokens, _ = x.shape
    h = m.up(x).view(batch, tokens, 4, 8).transpose(1, 2)  # [b, heads, t, d]
    h = h * F.softmax(h.sum(-1, keepdim=True), dim=1)
    return m.down(h.transpose(1, 2).reshape(batch, tokens, 32))


def heads_of_one_token(m: Any, x: Tensor) -> Tensor:
    q, k, v = (x @ m.weight[:, :16]).unflatten(-1, (4, 4)), x.unflatten(-1, (4, 4)), x.sin().unflatten(-1, (4, 4))
    return F.scaled_dot_product_attention(q, k, v).flatten(-2)


def whole_memory(m: Any, x: Tensor) -> Tensor:
    memory = m.weight.tanh().expand(x.shape[0], -1, -1)  # 16 slots that every rank has
    return F.scaled_dot_product_attention(m.query(x).unsqueeze(1), memory.unsqueeze(1), memory.unsqueeze(1)).squeeze(1)


def rewritten(m: Any, x: Tensor) -> Tensor:
    y = x.clone()
    y[..., :4] = 0.5
    return y @ m.weight


def hooked(m: Any, x: Tensor) -> Tensor:
    h = x @ m.weight
    if h.requires_grad:
        h.register_hook(lambda grad: grad.clamp(min=0.0) - grad.norm(dim=-1, keepdim=True))
    return h.square()


def standardized(m: Any, x: Tensor) -> Tensor:
    var, mean = torch.var_mean(x, dim=-1, keepdim=True)
    return (x - mean) / (var + 1e-5).sqrt() @ m.weight


def looked_up(m: Any, x: Tensor) -> Tensor:
    ids = x.argmax(dim=-1)
    return m.weight[ids] + m.table(ids) + F.one_hot(ids, WIDTH).to(x) @ m.weight


def in_place(m: Any, x: Tensor) -> Tensor:
    out = m.linear(x)
    out += x
    return m.relu(out)


POSITION_WISE: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)),
    "layer norm": lambda: nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16, bias=False)),
    "rms norm": lambda: nn.Sequential(nn.RMSNorm(16), nn.Softmax(dim=-1)),
    "gated": lambda: Of(lambda m, x: m.down(F.glu(m.up(x), dim=-1)), up=nn.Linear(16, 64), down=nn.Linear(32, 16)),
    "heads": lambda: Of(heads, up=nn.Linear(16, 32), down=nn.Linear(32, 16)),
    "heads of one token": lambda: Of(heads_of_one_token),
    "einsum": lambda: Of(lambda m, x: torch.einsum("bth,hk->btk", x, m.weight)),
    "from the left": lambda: Of(lambda m, x: (m.weight @ x.permute(0, 2, 1)).permute(0, 2, 1)),
    "experts": lambda: Of(experts, gate=nn.Linear(16, 3), experts=nn.ModuleList(nn.Linear(16, 16) for _ in range(3))),
    "looked up": lambda: Of(looked_up, table=nn.Embedding(16, 16)),
    "matrix for each token": lambda: Of(
        lambda m, x: (x.unsqueeze(-1) @ x.unsqueeze(-2) @ m.weight).mean(-2), proj=nn.Linear(16, 16)
    ),
    "memory that is whole": lambda: Of(whole_memory, query=nn.Linear(16, 16)),
    "in place": lambda: Of(in_place, linear=nn.Linear(16, 16), relu=nn.ReLU(inplace=True)),
    "masked": lambda: Of(lambda m, x: torch.where(x > 0, x @ m.weight, x.masked_fill(x < -1, 0.0))),
    "standardized": lambda: Of(standardized),
    "checkpointed": lambda: Of(lambda m, x: checkpoint(m.mlp, x, use_reentrant=False), mlp=nn.Sequential(
        nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))),
    "checkpointed, reentrant": lambda: Of(lambda m, x: checkpoint(m.mlp, x, use_reentrant=True), mlp=nn.Sequential(
        nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16))),
    "own autograd function": lambda: Of(lambda m, x: Product.apply(Square.apply(x) - x, m.weight)),
    "hook of a gradient": lambda: Of(hooked),
    "parametrized": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)),
}  # fmt: skip


class Recurrent(nn.Module):
    """Not a child of the model before it is called, so that nothing but the call can refuse it."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.make = lambda: kind(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.make()(x)[0]


def own_attention(m: Any, x: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (4, 4)).transpose(1, 2) for _ in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)


def across(m: Any, x: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(m.weight.expand(x.shape[0], -1, -1), x, x)


def scores(m: Any, x: Tensor) -> Tensor:
    seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
    weights = (x @ x.mT / x.shape[-1] ** 0.5).masked_fill(~seen, float("-inf")).softmax(-1)
    return weights @ (x @ m.weight)


def attention_with_mask(m: Any, x: Tensor) -> Tensor:
    q, k = (y.unflatten(-1, (4, 4)).transpose(1, 2) for y in (x, x @ m.weight))
    bias = (torch.arange(x.size(1))[:, None] - torch.arange(x.size(1))) * m.weight[0, :4, None, None]
    return F.scaled_dot_product_attention(q, k, k, bias).transpose(1, 2).reshape(x.shape)


def shifted(m: Any, x: Tensor) -> Tensor:
    return x * (x[:, 1:] * x[:, :-1] @ m.weight).mean(1, keepdim=True)


#: what looks at all tokens, and is computed of all: [b, t, 16] -> the same, t no padding
OF_ALL_TOKENS: dict[str, Callable[[], nn.Module]] = {
    "mean": lambda: Of(lambda m, x: x @ m.weight - x.mean(dim=1, keepdim=True)),
    "sum of a sample": lambda: Of(lambda m, x: x / x.square().sum((1, 2), True)),
    "largest": lambda: Of(lambda m, x: x * (x @ m.weight).amax(1, keepdim=True) + x.amin(1, True)),
    "variance": lambda: Of(lambda m, x: x / (1 + x.var(1, keepdim=True) + x.std((1, 2), keepdim=True))),
    "norms": lambda: Of(lambda m, x: x / x.norm(dim=1, keepdim=True) + F.normalize(x, dim=1) * x.logsumexp(1)[:, None]),
    "softmax over tokens": lambda: Of(lambda m, x: x.softmax(dim=-2) @ m.weight + x.log_softmax(1)),
    "first token": lambda: Of(lambda m, x: x + x[:, :1] @ m.weight + x[:, 0].unsqueeze(1)),
    "last token": lambda: Of(lambda m, x: x * x[:, -1:].mean(-1, True) + (x.select(1, 5) @ m.weight).unsqueeze(1)),
    "shifted": lambda: Of(shifted),
    "positions": lambda: Of(lambda m, x: x + torch.arange(x.shape[1])[:, None] * m.weight[0]),
    "learned positions": lambda: Of(lambda m, x: x + m.weight[None, : x.size(1)]),
    "scale of a size": lambda: Of(lambda m, x: x @ m.weight * x.shape[1] ** -0.5 / x[:1].numel()),
    "causal attention": lambda: Of(own_attention),
    "MultiheadAttention": lambda: Of(
        lambda m, x: m.a(x, x, x, key_padding_mask=x[..., 0] > x[..., 1:].amax(-1))[0]
        + m.a(x, x, x, attn_mask=torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), need_weights=False)[0],
        a=nn.MultiheadAttention(16, 4, batch_first=True),
    ),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True),
    "attention with a bias": lambda: Of(attention_with_mask),
    "attention by hand": lambda: Of(scores),
    "attention from latents": lambda: Of(lambda m, x: x + across(m, x)),
    "einsum of tokens": lambda: Of(lambda m, x: torch.einsum("bth,bsh->bts", x, x) @ x @ m.weight * 0.1),
    "linear attention": lambda: Of(lambda m, x: x @ (x.mT @ (x @ m.weight)) + x.square().sum(1)[:, None]),
    "mixed by a matrix": lambda: Of(lambda m, x: x + m.weight @ x),
    "linear over tokens": lambda: Of(lambda m, x: x + F.linear(x.mT, m.weight).mT),
}  # fmt: skip

#: with a part of what the refusal says
MIXING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rewritten": (lambda: Of(rewritten), r"assigning by index .* torch.where"),
    "class token in front": (
        lambda: Of(lambda m, x: torch.cat([m.weight[:1].expand(x.shape[0], 1, 16), x], dim=1)[:, 1:]),
        r"cat concatenates along dim 1, which is split",
    ),
    "shifted by one": (lambda: Of(lambda m, x: x - x.roll(1, 1)), r"roll works along dim 1"),
    "padded": (lambda: Of(lambda m, x: F.pad(x, (0, 0, 1, 0))), "pad is not known to work"),
    "convolution": (
        lambda: Of(lambda m, x: m.conv(x.mT).mT, conv=nn.Conv1d(16, 16, 3, padding=1)),
        r"conv1d is not known to work on each part by itself",
    ),
    "lstm": (lambda: Recurrent(nn.LSTM), r"lstm is not known"),
    "batch norm": (lambda: nn.BatchNorm1d(16), r"batch_norm is not known"),
    "norm over tokens": (lambda: nn.LayerNorm((16, 16)), r"layer_norm normalizes over dim -2, which is split"),
    "taken apart": (lambda: Of(lambda m, x: x.view(3, 4, 4, 16).flatten(1, 2)), r"view takes the split dim apart"),
    "written into a plain one": (
        lambda: Of(lambda m, x: torch.zeros(3, 16, 16).copy_(x)), r"copy_ writes a split tensor into a plain one"
    ),
    "a number": (lambda: Of(lambda m, x: x * x.abs().amax(2).tolist()[0][0]), r"tolist reads the values of one rank"),
    "not known": (lambda: Of(lambda m, x: torch.cov(x[0])), r"cov is not known to work on each part by itself"),
}  # fmt: skip
