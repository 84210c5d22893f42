"""A rank of the sequence benchmark: one attention over a split sequence, and one train step of a GPT."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo  # every optimizer imports it
import torch.nn.functional as F
from torch import Tensor

import colossus
from benchmarks import memory
from benchmarks.timing import seconds_per_call
from colossus.comm import accounting
from colossus.context.grid import LayerOptions, RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layers.attention_weights import both, same_document
from colossus.layers.model_parallel import model_parallel_of
from colossus.sequence_parallel import ring_attention
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, Mask
from colossus.sequence_parallel.modes import Hybrid
from colossus.sequence_parallel.tiles import visible


@dataclass(frozen=True)
class Shape:
    """One attention.

    Attributes:
        tokens: of the whole sequence.
        device: of all ranks.
        mask: what a token attends to.
        lengths: of the documents, in tokens; None: one document.
        chunks: of each ring rank.
        is_dense: one process gets the mask as a tensor [tokens, tokens].
    """

    tokens: int
    heads: int = 8
    kv_heads: int = 8
    head_dim: int = 64
    batch: int = 1
    device: str = "cpu"
    mask: Mask = CAUSAL
    lengths: tuple[int, ...] | None = None
    chunks: int = 2
    is_dense: bool = False

    @property
    def pairs(self) -> int:
        """The pairs of a query and a key that it sees, of all heads."""
        parts = [self.tokens] if self.lengths is None else self.lengths
        return self.batch * self.heads * sum(self.mask.within(tokens).num_pairs(tokens) for tokens in parts)


@dataclass(frozen=True)
class Counted:
    """Elements that one rank sends in forward and backward, and scores that it computes (forward, all heads)."""

    forward: float
    backward: float
    scores: float


class AttentionCase:
    """Attention on one rank. One rank alone takes torch's scaled_dot_product_attention where that needs no mask."""

    def __init__(self, shape: Shape, mode: str, rank: int, world: int) -> None:
        self.shape, self.world = shape, world
        sizes = Hybrid.axis_sizes(world) if mode == "hybrid" else {"sequence": world}
        grid = RankGrid(
            {"pipeline": 1, "data": 1, **sizes, "tensor": 1},
            {"pipeline": ("pipeline",), "data": ("data",), "sequence": tuple(sizes), "tensor": ("tensor",)},
        )
        options = LayerOptions(sequence_mode=mode, sequence_chunks=shape.chunks)
        self.context = ParallelContext(grid, rank, options=options, device=shape.device)
        split = model_parallel_of(self.context).sequence
        self.groups = (split.ring, split.ulysses) if split is not None else None
        whole = [self._draw(shape.heads, 0), self._draw(shape.kv_heads, 1), self._draw(shape.kv_heads, 2)]
        self.gradient = self._draw(shape.heads, 3)
        if split is not None:
            index = self.context.index(split.axes)
            self.local_tokens = split.positions(shape.tokens // world, index, world, torch.device("cpu"))
            whole = [x[:, :, self.local_tokens].clone() for x in whole]
            self.gradient = self.gradient[:, :, self.local_tokens].clone()
        self.gradient = self.gradient.to(shape.device)
        self.documents: Tensor | None = None
        if shape.lengths is not None:
            numbers = torch.arange(len(shape.lengths)).repeat_interleave(torch.tensor(shape.lengths))
            own = numbers if split is None else numbers[self.local_tokens]
            self.documents = own.expand(shape.batch, -1).to(shape.device)
        self.dense = self._dense() if shape.is_dense else None
        self.q, self.k, self.v = (x.to(shape.device).requires_grad_() for x in whole)

    def _draw(self, heads: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(self.shape.batch, heads, self.shape.tokens, self.shape.head_dim, generator=generator)

    def _dense(self) -> Tensor:
        """Return the mask as a tensor, [batch or 1, 1, tokens, tokens]."""
        positions = torch.arange(self.shape.tokens, device=self.shape.device)
        seen = visible(self.shape.mask, positions, positions)[None, None]
        return seen if self.documents is None else both(seen, same_document(self.documents))

    def forward(self) -> Tensor:
        mask = self.shape.mask
        if self.groups is None and (self.dense is not None or (mask == CAUSAL and self.documents is None)):
            grouped = self.shape.heads != self.shape.kv_heads
            options = dict(attn_mask=self.dense, is_causal=self.dense is None, enable_gqa=grouped)
            return F.scaled_dot_product_attention(self.q, self.k, self.v, **options)
        groups = self.groups or (self.context.group(()), self.context.group(()))
        options = dict(mask=mask, documents=self.documents, chunks=self.shape.chunks)
        return attend(self.q, self.k, self.v, *groups, **options)

    def step(self, index: int = 0) -> tuple[float, float]:
        self.q.grad = self.k.grad = self.v.grad = None
        self.forward().backward(self.gradient)
        return 0.0, 0.0

    def result(self) -> list[Any]:
        """Return output and gradients as arrays."""
        self.q.grad = self.k.grad = self.v.grad = None
        out = self.forward()
        out.backward(self.gradient)
        return [x.detach().cpu().numpy() for x in (out, self.q.grad, self.k.grad, self.v.grad)]

    def gap(self, whole: list[Any]) -> float:
        """Return the largest difference from one process's output and gradients, over the largest value of each."""
        gaps = []
        for mine, other in zip(self.result(), whole, strict=True):
            wanted = torch.from_numpy(other)
            here = wanted if self.groups is None else wanted[:, :, self.local_tokens]
            gaps.append(((torch.from_numpy(mine) - here).abs().max() / wanted.abs().max()).item())
        return max(gaps)

    def count(self) -> Counted:
        scores = 0
        real = ring_attention.block_forward

        def counted(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, **options: Any) -> Any:
            nonlocal scores
            scores += _scores(q, k, causal)
            return real(q, k, v, causal=causal, **options)

        ring_attention.block_forward = counted
        try:
            with accounting.count() as there:
                out = self.forward()
            with accounting.count() as back:
                out.backward(self.gradient)
        finally:
            ring_attention.block_forward = real
        size = self.q.element_size()
        return Counted(there.bytes() / size, back.bytes() / size, scores)

    def times(self, count: int) -> tuple[float, float]:
        """Return seconds per forward and backward: processor time of this process, and wall time."""
        self.step()
        began, used = time.perf_counter(), time.process_time()
        for _ in range(count):
            self.step()
        return (time.process_time() - used) / count, (time.perf_counter() - began) / count

    def block(self, count: int) -> float:
        """Return seconds per forward and backward, by the clock."""
        return seconds_per_call(self.step, torch.device(self.shape.device), count)

    def peak(self) -> int:
        """Return the bytes that a forward and backward needs on top of those between them."""
        self.step()
        return memory.allocated_peak(self.step)

    def close(self) -> None:
        """Destroy its groups; others may be made then."""
        self.context.close()


def _scores(q: Tensor, k: Tensor, causal: bool) -> int:
    """Return the entries of the score matrix that a causal or a whole block computes, over all heads."""
    batch, heads, rows, columns = *q.shape[:3], k.shape[-2]
    return batch * heads * (rows * (rows + 1) // 2 if causal else rows * columns)


class TrainWorker:
    """A GPT on one rank of a sequence axis."""

    def __init__(self, tokens: int, hidden: int, num_layers: int, world: int, rank: int) -> None:
        config = dict(
            parallel=dict(sequence=dict(size=world, mode="ring")),
            model=dict(
                type="GPT", num_layers=num_layers, hidden_size=hidden, num_heads=hidden // 32, vocab_size=256,
                seq_len=tokens, positions="rotary",
            ),
            optimizer=dict(type="SGD", lr=0.1),
            train=dict(global_batch_size=1, steps=10),
            device="cpu",
        )  # fmt: skip
        self.engine = colossus.initialize(config)
        self.tokens = tokens
        self.losses: list[float] = []

    def step(self, index: int) -> None:
        ids = torch.randint(0, 256, (1, self.tokens + 1), generator=torch.Generator().manual_seed(index))
        self.losses.append(self.engine.train_step({"inputs": ids[:, :-1], "labels": ids[:, 1:]}).loss)

    def train(self, steps: int) -> tuple[list[float], int, float]:
        """Return losses, bytes of tensors at the peak of a step, and seconds of a step."""
        self.step(0)
        before = memory.live_bytes()
        peak = before + memory.allocated_peak(lambda: self.step(1))
        began = time.perf_counter()
        for index in range(steps):
            self.step(2 + index)
        return self.losses, peak, (time.perf_counter() - began) / steps
