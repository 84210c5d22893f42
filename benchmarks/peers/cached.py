"""GPT and Llama in plain torch with a key/value cache written by hand: what a careful single process runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linears(nn.Module):
    """Outputs of one input, in one matmul (``fused``) or one each."""

    def __init__(self, inputs: int, outputs: Sequence[int], bias: bool, *, fused: bool) -> None:
        super().__init__()
        self.sizes, self.fused = list(outputs), fused
        widths = [sum(outputs)] if fused else outputs
        self.parts = nn.ModuleList(nn.Linear(inputs, width, bias) for width in widths)

    def forward(self, x: Tensor) -> Sequence[Tensor]:
        return self.parts[0](x).split(self.sizes, -1) if self.fused else [part(x) for part in self.parts]

    def load(self, state: Mapping[str, Tensor], at: str, names: Sequence[str]) -> None:
        for kind, _ in self.parts[0].named_parameters():
            weights = [state[f"{at}.{name}.{kind}"] for name in names]
            for part, value in zip(self.parts, [torch.cat(weights)] if self.fused else weights, strict=True):
                getattr(part, kind).data = value.clone()


class Attention(nn.Module):
    def __init__(self, o: Any, *, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = o.num_heads, o.num_kv_heads, o.head_dim
        kv = self.kv_heads * self.size
        self.qkv = Linears(o.hidden_size, (self.heads * self.size, kv, kv), o.bias, fused=fused)
        self.out = nn.Linear(self.heads * self.size, o.hidden_size, o.bias)

    def begin(self, batch: int, length: int) -> None:
        self.keys, self.values = torch.empty(2, batch, self.kv_heads, length, self.size).unbind(0)

    def forward(self, x: Tensor, start: int, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (part.view(batch, tokens, -1, self.size).transpose(1, 2) for part in self.qkv(x))
        if rotation is not None:
            query, key = turn(query, *rotation), turn(key, *rotation)
        stop = start + tokens
        self.keys[:, :, start:stop] = key
        self.values[:, :, start:stop] = value
        key, value = self.keys[:, :, :stop], self.values[:, :, :stop]
        grouped = self.kv_heads != self.heads
        if tokens == 1 and grouped:  # heads that share keys as tokens of one head: nothing is repeated
            query = query.reshape(batch, self.kv_heads, -1, self.size)
            mixed = F.scaled_dot_product_attention(query, key, value).reshape(batch, self.heads, 1, self.size)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1, enable_gqa=grouped)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


class MLP(nn.Module):
    def __init__(self, o: Any, *, fused: bool) -> None:
        super().__init__()
        self.gated = o.mlp == "swiglu"
        self.up = Linears(o.hidden_size, [o.ffn_hidden_size] * (2 if self.gated else 1), o.bias, fused=fused)
        self.down = nn.Linear(o.ffn_hidden_size, o.hidden_size, o.bias)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        return self.down(F.silu(up[0]) * up[1] if self.gated else F.gelu(up[0]))


def norm_of(o: Any) -> nn.Module:
    if o.norm == "layernorm":
        return nn.LayerNorm(o.hidden_size, o.norm_eps, bias=o.bias)
    return nn.RMSNorm(o.hidden_size, o.norm_eps)


class Block(nn.Module):
    def __init__(self, o: Any, *, fused: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm_of(o), Attention(o, fused=fused)
        self.mlp_norm, self.mlp = norm_of(o), MLP(o, fused=fused)

    def forward(self, x: Tensor, start: int, rotation: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.attention(self.attention_norm(x), start, rotation)
        return x + self.mlp(self.mlp_norm(x))


class CachedDecoder(nn.Module):
    """A decoder with preallocated keys and values.

    Args:
        state: weights by colossus's logical names.
        options: of the model (`GPTOptions` or `LlamaOptions`).
        fused: query, key and value, and both parts of SwiGLU, in one matmul each.
    """

    def __init__(self, state: Mapping[str, Tensor], options: Any, *, fused: bool) -> None:
        super().__init__()
        self.o = o = options
        self.embedding = nn.Embedding(o.vocab_size, o.hidden_size)
        self.positions = None if o.is_rotary else nn.Embedding(o.seq_len, o.hidden_size)
        self.blocks = nn.ModuleList(Block(o, fused=fused) for _ in range(o.num_layers))
        self.norm = norm_of(o)
        self.head = nn.Linear(o.hidden_size, o.vocab_size, bias=False)
        self._load(state)
        self.eval().requires_grad_(False)

    def _load(self, state: Mapping[str, Tensor]) -> None:
        up = ("gate", "value") if self.o.mlp == "swiglu" else ("",)
        for index, block in enumerate(self.blocks):
            block.attention.qkv.load(state, f"blocks.{index}.attention.qkv", ("query", "key", "value"))
            block.mlp.up.load({name.replace("up.", "up..") if len(up) == 1 else name: value for name, value in
                               state.items()}, f"blocks.{index}.mlp.up", up)  # fmt: skip
        for name, param in self.named_parameters():
            if ".parts." not in name and not (name == "head.weight" and self.o.tie_embeddings):
                param.data = state[name].clone()
        if self.o.tie_embeddings:
            self.head.weight = self.embedding.weight

    def begin(self, batch: int, length: int) -> None:
        """Room for a batch of so many tokens, and the rotation of each position."""
        self.seen = 0
        for block in self.blocks:
            block.attention.begin(batch, length)
        if self.o.is_rotary:
            size = self.o.head_dim
            rates = self.o.rotary_base ** -(torch.arange(0, size, 2, dtype=torch.float64) / size)
            angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
            angles = torch.cat((angles, angles), -1)
            self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def forward(self, ids: Tensor) -> Tensor:
        """Logits behind the last token, [batch, vocabulary]; ids [batch, tokens] follow those before."""
        start, stop = self.seen, self.seen + ids.shape[1]
        x, rotation = self.embedding(ids), None
        if self.positions is None:
            rotation = self.cos[start:stop], self.sin[start:stop]
        else:
            x = x + self.positions.weight[start:stop]
        for block in self.blocks:
            x = block(x, start, rotation)
        self.seen = stop
        return self.head(self.norm(x[:, -1]))
