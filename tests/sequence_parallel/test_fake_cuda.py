"""Sequences split over ranks with CUDA devices that do not exist: attention by every mode, steps with documents and
with padding. No tensor is on the wrong device, and the host waits for nothing."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from helpers.fake_cuda import HiddenWait, Waits, batch_on_device, run_fake_ranks
from helpers.long import but
from helpers.training import batch_of, config_of
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.config import load_config
from colossus.context.local_ranks import RanksFailed
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.sequence_parallel import tiles
from colossus.sequence_parallel.attend import attend
from colossus.sequence_parallel.mask import CAUSAL, FULL

WORLD, TOKENS = 4, 13
MODES = ("ring", "ulysses", "hybrid")


def attention(rank: int, mode: str) -> None:
    """Forward and backward of one attention: round a ring in every variety."""
    settings = config_of(dict(sequence=dict(size=WORLD, mode=mode)), 1, "fp32", model=dict(seq_len=16))
    config = load_config(settings, nproc=WORLD)
    context = ParallelContext.from_config(config, device="cuda:0")
    split, device = model_parallel_of(context).sequence, context.device
    assert split is not None
    head_dims = {torch.float32: 8, torch.bfloat16: 8, torch.float64: 5}  # for each kernel one
    every = list(product(head_dims, (True, False), (True, False)))
    for dtype, causal, has_documents in every if mode == "ring" else every[4:8:3]:
        head_dim = head_dims[dtype]
        q, k, v = (
            torch.randn(3, heads, 6, head_dim, device=device, dtype=dtype, requires_grad=True) for heads in (8, 4, 4)
        )
        documents = torch.zeros(3, 6, dtype=torch.int64, device=device) if has_documents else None
        with Waits():
            out = attend(q, k, v, split.ring, split.ulysses, mask=CAUSAL if causal else FULL, documents=documents)
            out.sum().backward()
        assert (out.shape, out.device, out.dtype) == (q.shape, device, dtype)
        for x in (q, k, v):
            assert x.grad is not None
            assert (x.grad.device, x.grad.dtype) == (device, dtype)
    context.close()


def all_modes(rank: int) -> None:
    for mode in MODES:
        attention(rank, mode)


@pytest.mark.long
def test_attention_waits_for_nothing() -> None:
    run_fake_ranks(WORLD, all_modes, ranks=(1,))


def reading(rank: int) -> None:
    tiles.can_be_read = lambda documents: True
    attention(rank, "ring")


def test_documents_that_are_read_on_the_device_are_found() -> None:
    with pytest.raises(RanksFailed, match=HiddenWait.__name__):
        run_fake_ranks(WORLD, reading, ranks=(1,))


class Reader(nn.Module):
    """Packed documents, read in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(53, 24)
        self.positions = layers.PositionEmbedding(TOKENS, 24)
        self.block = layers.TransformerBlock(24, 4, mask=FULL, dropout=0.1)
        self.head = nn.Linear(24, 53)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self.positions(self.table(inputs["ids"]))
        return self.head(self.block(x, documents=inputs.get("documents")))

    def loss(self, logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return layers.cross_entropy(logits, batch["labels"])


def steps(rank: int, parallel: dict[str, Any]) -> list[str]:
    """Steps with documents, then one without; the tokens do not divide, so some are padding."""
    settings = config_of(parallel, 9, "bf16", device="cuda")
    settings.pop("model")
    engine = colossus.initialize(settings, Reader)
    batch = batch_on_device(batch_of(0, dict(vocab_size=53, seq_len=TOKENS), 4))
    labels, ids = batch["labels"], batch["inputs"]
    packed = {"inputs": {"ids": ids, "documents": torch.zeros_like(ids)}, "labels": labels}
    engine.train_step(packed)
    with Waits(allowed=True) as waits:
        engine.train_step(packed)
        engine.train_step({"inputs": {"ids": ids}, "labels": labels})
    engine.close()
    return waits.found


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "ring": (4, dict(sequence=dict(size=4, mode="ring", pad=True))),
    "hybrid x 1d": (8, dict(sequence=dict(size=4, mode="hybrid", pad=True), tensor=2)),
    "ring x 3d": (16, dict(sequence=dict(size=2, mode="ring", pad=True), tensor=dict(mode="3d", size=8))),
}


@pytest.mark.parametrize("name", but(("hybrid x 1d", "ring", "ring x 3d"), PLANS))
def test_documents_and_padding_wait_for_nothing(name: str) -> None:
    world, parallel = PLANS[name]
    assert run_fake_ranks(world, steps, parallel, ranks=(world - 1,)) == [[]]
