"""A GPT in plain torch, with the step that a careful single-process loop runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload, fuse_qkv

#: what selective checkpointing keeps the results of: matmuls and attention
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
]


class Attention(nn.Module):
    """Causal self-attention with one matmul for query, key and value.

    Args:
        ways: ranks over which the heads are split; the linears then hold, or give, a part of the features.
    """

    def __init__(self, hidden: int, heads: int, ways: int = 1) -> None:
        super().__init__()
        self.heads, self.head_dim = heads // ways, hidden // heads
        self.qkv: nn.Module = nn.Linear(hidden, 3 * hidden)
        self.out: nn.Module = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        qkv = self.qkv(x).view(batch, tokens, 3, self.heads, self.head_dim)
        query, key, value = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, self.heads * self.head_dim))


class MLP(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up: nn.Module = nn.Linear(hidden, 4 * hidden)
        self.down: nn.Module = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, ways: int = 1) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, ways)
        self.mlp_norm = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Positions(nn.Module):
    def __init__(self, tokens: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(tokens, hidden))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[1]]


class PlainGPT(nn.Module):
    """ids [batch, tokens] -> logits [batch, tokens, vocab].

    Args:
        recompute: ``none``, ``full`` or ``selective``: torch's own activation checkpointing of each block.
    """

    def __init__(self, workload: Workload, ways: int = 1, recompute: str = "none") -> None:
        super().__init__()
        self.recompute = recompute
        w = workload
        self.embedding: nn.Module = nn.Embedding(w.vocab, w.hidden)
        self.positions = Positions(w.tokens, w.hidden)
        self.blocks = nn.ModuleList(Block(w.hidden, w.heads, ways) for _ in range(w.layers))
        self.norm = nn.LayerNorm(w.hidden)
        self.head: nn.Module = nn.Linear(w.hidden, w.vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.positions(self.embedding(ids))
        for block in self.blocks:
            x = self._run(block, x)
        return self.head(self.norm(x))

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.recompute == "none":
            return block(x)
        context_fn = partial(create_selective_checkpoint_contexts, KEPT)
        options = {} if self.recompute == "full" else {"context_fn": context_fn}
        return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, **options)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over all tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def autocast(device: str, low: bool) -> AbstractContextManager[None]:
    """Return `torch.autocast` to bf16, or nothing."""
    return torch.autocast(device, torch.bfloat16) if low else nullcontext()


class PlainCase:
    """One process, no parallelism: forward, backward, clip, fused AdamW, loss read.

    Args:
        low: forward under autocast to bf16.
        recompute: the activations of a block, as `PlainGPT`.
        alone: each rank trains its own share of the batch and talks to nobody: what no way to talk can beat.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        *,
        low: bool = False,
        recompute: str = "none",
        alone: bool = False,
    ) -> None:
        self.low, self.device = low, workload.device
        with torch.device(self.device):
            self.model = PlainGPT(workload, recompute=recompute)
        self.model.load_state_dict(fuse_qkv(workload.state(workload.device)))
        self.params = list(self.model.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)
        share = dict(part=rank, parts=world) if alone else {}
        self.batches = [(ids.to(self.device), labels.to(self.device)) for ids, labels in workload.batches(**share)]

    def run(self, index: int) -> tuple[Tensor, Tensor]:
        """Run a step and do not read its loss: an accelerator is not waited for."""
        ids, labels = self.batches[index % len(self.batches)]
        self.optimizer.zero_grad(set_to_none=True)
        with autocast(self.device, self.low):
            loss = loss_of(self.model(ids), labels)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, CLIP_NORM)
        self.optimizer.step()
        return loss.detach(), norm

    def step(self, index: int) -> tuple[float, float]:
        loss, norm = self.run(index)
        return loss.item(), norm.item()
