"""GPT and Llama in plain torch with a key/value cache written by hand: what a careful single process runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

State = Mapping[str, Tensor]


class CachedDecoder:
    """A decoder with preallocated keys and values, one token at a time after the prompt.

    Args:
        state: weights by colossus's logical names.
        options: of the model (`GPTOptions` or `LlamaOptions`).
        fused: query, key and value, and both parts of SwiGLU, in one matmul each.
    """

    def __init__(self, state: State, options: Any, *, fused: bool) -> None:
        self.o, self.fused = options, fused
        self.state = dict(state)
        self.blocks = [self._block(f"blocks.{index}.") for index in range(options.num_layers)]
        self.embedding = state["embedding.weight"]
        self.head = self.embedding if options.tie_embeddings else state["head.weight"]
        self.final = state["norm.weight"], state.get("norm.bias")

    def _block(self, at: str) -> dict[str, Any]:
        state = self.state

        def linear(*names: str) -> list[tuple[Tensor, Tensor | None]]:
            parts = [(state[f"{at}{name}.weight"], state.get(f"{at}{name}.bias")) for name in names]
            if not self.fused or len(parts) == 1:
                return parts
            biases = [bias for _, bias in parts if bias is not None]
            return [(torch.cat([weight for weight, _ in parts]), torch.cat(biases) if biases else None)]

        is_gated = self.o.mlp == "swiglu"
        return {
            "norms": [
                (state[f"{at}{name}_norm.weight"], state.get(f"{at}{name}_norm.bias")) for name in ("attention", "mlp")
            ],
            "qkv": linear(*(f"attention.qkv.{name}" for name in ("query", "key", "value"))),
            "out": linear("attention.out")[0],
            "up": linear("mlp.up.gate", "mlp.up.value") if is_gated else linear("mlp.up"),
            "down": linear("mlp.down")[0],
        }

    def begin(self, batch: int, length: int) -> None:
        """Room for a batch of so many tokens, and the rotation of each position."""
        o = self.o
        shape = (2, batch, o.num_kv_heads, length, o.head_dim)
        self.cache = [torch.empty(shape) for _ in self.blocks]
        self.seen = 0
        if o.is_rotary:
            rates = o.rotary_base ** -(torch.arange(0, o.head_dim, 2, dtype=torch.float64) / o.head_dim)
            angles = torch.arange(length, dtype=torch.float64)[:, None] * rates
            angles = torch.cat((angles, angles), -1)
            self.cos, self.sin = angles.cos().float(), angles.sin().float()

    def forward(self, ids: Tensor) -> Tensor:
        """Logits behind the last token, [batch, vocabulary]; ids [batch, tokens] follow those before."""
        start, stop = self.seen, self.seen + ids.shape[1]
        x = F.embedding(ids, self.embedding)
        if self.o.is_rotary:
            self.now = self.cos[start:stop], self.sin[start:stop]
        else:
            x = x + self.state["positions.weight"][start:stop]
        for block, cache in zip(self.blocks, self.cache, strict=True):
            x = x + self._attention(self._norm(x, block["norms"][0]), block, cache, start, stop)
            x = x + self._mlp(self._norm(x, block["norms"][1]), block)
        self.seen = stop
        return F.linear(self._norm(x[:, -1], self.final), self.head)

    def _norm(self, x: Tensor, parameters: tuple[Tensor, Tensor | None]) -> Tensor:
        weight, bias = parameters
        if self.o.norm == "layernorm":
            return F.layer_norm(x, x.shape[-1:], weight, bias, self.o.norm_eps)
        return F.rms_norm(x, x.shape[-1:], weight, self.o.norm_eps)

    def _attention(self, x: Tensor, block: dict[str, Any], cache: Tensor, start: int, stop: int) -> Tensor:
        o = self.o
        batch, tokens, _ = x.shape
        parts = [F.linear(x, *each) for each in block["qkv"]]
        if len(parts) == 1:
            width = o.num_kv_heads * o.head_dim
            parts = list(parts[0].split((o.num_heads * o.head_dim, width, width), -1))
        query, key, value = (part.view(batch, tokens, -1, o.head_dim).transpose(1, 2) for part in parts)
        if o.is_rotary:
            query, key = self._turn(query), self._turn(key)
        cache[0, :, :, start:stop] = key
        cache[1, :, :, start:stop] = value
        key, value = cache[0, :, :, :stop], cache[1, :, :, :stop]
        grouped = o.num_kv_heads != o.num_heads
        if tokens == 1 and grouped:  # heads that share keys as tokens of one head: nothing is repeated
            query = query.reshape(batch, o.num_kv_heads, -1, o.head_dim)
            mixed = F.scaled_dot_product_attention(query, key, value).reshape(batch, o.num_heads, 1, o.head_dim)
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=tokens > 1, enable_gqa=grouped)
        return F.linear(mixed.transpose(1, 2).reshape(batch, tokens, -1), *block["out"])

    def _turn(self, x: Tensor) -> Tensor:
        cos, sin = self.now
        low, high = x.chunk(2, -1)
        return x * cos + torch.cat((-high, low), -1) * sin

    def _mlp(self, x: Tensor, block: dict[str, Any]) -> Tensor:
        up = [F.linear(x, *each) for each in block["up"]]
        if self.o.mlp == "swiglu":
            gate, value = up if len(up) == 2 else up[0].chunk(2, -1)
            return F.linear(F.silu(gate) * value, *block["down"])
        return F.linear(F.gelu(up[0]), *block["down"])
