"""The workload of every case: the sizes, one set of initial weights by logical name, the batches."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from colossus.monitor.mfu import flops_per_token

LEARNING_RATE = 1e-3
CLIP_NORM = 1.0

State = dict[str, Tensor]


@dataclass(frozen=True)
class Workload:
    """Sizes of the model and of the global batch. The head is not tied to the embedding, biases are everywhere.

    Attributes:
        device: of the cases of one process, and of the ranks that share one in the benchmark of tensor modes.
    """

    hidden: int = 512
    layers: int = 4
    heads: int = 8
    tokens: int = 128
    batch: int = 16
    vocab: int = 256
    seed: int = 0
    device: str = "cpu"

    def __str__(self) -> str:
        return (
            f"hidden {self.hidden} x {self.layers} layers, {self.heads} heads, {self.tokens} tokens, "
            f"global batch {self.batch}, vocabulary {self.vocab}"
        )

    @property
    def flops(self) -> int:
        """Return the operations of forward and backward of a step, as the utilisation of a run counts them."""
        model = dict(
            type="GPT", num_layers=self.layers, hidden_size=self.hidden, num_heads=self.heads, vocab_size=self.vocab,
            seq_len=self.tokens, tie_embeddings=False,
        )  # fmt: skip
        counted = flops_per_token(model)
        assert counted is not None
        return round(counted) * self.batch * self.tokens

    def state(self, device: torch.device | str = "cpu") -> State:
        """Return initial weights: logical name -> full tensor [out, in], the query, key and value apart.

        Args:
            device: that draws and keeps them; on a GPU the numbers are others.
        """
        generator = torch.Generator(device)
        generator.manual_seed(self.seed)
        with torch.device(device):
            return self._drawn(generator)

    def _drawn(self, generator: torch.Generator) -> State:
        h = self.hidden

        def normal(*shape: int, std: float = 0.02) -> Tensor:
            return torch.randn(*shape, generator=generator) * std

        state = {
            "embedding.weight": normal(self.vocab, h),
            "positions.weight": normal(self.tokens, h),
            "norm.weight": torch.ones(h),
            "norm.bias": torch.zeros(h),
            "head.weight": normal(self.vocab, h),
        }
        into_residual = 0.02 / math.sqrt(2 * self.layers)
        for index in range(self.layers):
            block = f"blocks.{index}"
            for norm in ("attention_norm", "mlp_norm"):
                state[f"{block}.{norm}.weight"] = torch.ones(h)
                state[f"{block}.{norm}.bias"] = torch.zeros(h)
            for part in ("query", "key", "value"):
                state[f"{block}.attention.qkv.{part}.weight"] = normal(h, h)
                state[f"{block}.attention.qkv.{part}.bias"] = torch.zeros(h)
            state[f"{block}.attention.out.weight"] = normal(h, h, std=into_residual)
            state[f"{block}.attention.out.bias"] = torch.zeros(h)
            state[f"{block}.mlp.up.weight"] = normal(4 * h, h)
            state[f"{block}.mlp.up.bias"] = torch.zeros(4 * h)
            state[f"{block}.mlp.down.weight"] = normal(h, 4 * h, std=into_residual)
            state[f"{block}.mlp.down.bias"] = torch.zeros(h)
        return state

    def batches(self, count: int = 4, *, part: int = 0, parts: int = 1) -> list[tuple[Tensor, Tensor]]:
        """Return (ids, labels), each [batch / parts, tokens]: part ``part`` of ``count`` global batches."""
        if self.batch % parts:
            raise ValueError(f"a global batch of {self.batch} does not divide over {parts} data ranks")
        generator = torch.Generator().manual_seed(self.seed + 1)
        rows = slice(part * self.batch // parts, (part + 1) * self.batch // parts)
        out = []
        for _ in range(count):
            text = torch.randint(self.vocab, (self.batch, self.tokens + 1), generator=generator)
            out.append((text[rows, :-1].contiguous(), text[rows, 1:].contiguous()))
        return out


def fuse_qkv(state: State, *, interleave: int = 1) -> State:
    """Return the state with query, key and value in one tensor, ``[.., out, in]`` side by side in dim 0.

    Args:
        interleave: tensor ranks; rows are then ordered rank by rank, each with its own query, key and value rows, so
            that an even split of dim 0 gives every rank whole heads.
    """
    out: State = {}
    for name, value in state.items():
        if ".qkv." not in name:
            out[name] = value
        elif ".query." in name:
            whole = [state[name.replace(".query.", f".{part}.")] for part in ("query", "key", "value")]
            parts = [part.chunk(interleave) for part in whole]
            fused = torch.cat([rows for rank in range(interleave) for rows in (part[rank] for part in parts)])
            out[name.replace(".query.", ".")] = fused
    return out
