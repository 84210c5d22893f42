"""Bags against torch's own, alone and in a training step."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import colossus
from colossus import layers
from colossus.data.batch import split_microbatches

ROWS, DIM = 7, 3


def twins(**options: Any) -> tuple[Any, nn.EmbeddingBag]:
    ours = layers.EmbeddingBag(ROWS, DIM, dtype=torch.float64, **options)
    options.pop("sparse", None)
    plain = nn.EmbeddingBag(ROWS, DIM, dtype=torch.float64, **options)
    plain.load_state_dict(ours.state_dict())
    return ours, plain


@given(
    bags=st.integers(0, 4),
    length=st.integers(1, 4),
    mode=st.sampled_from(["sum", "mean", "max"]),
    sparse=st.booleans(),
    padding=st.sampled_from([None, 2, -1]),
    weighted=st.booleans(),
    seed=st.integers(0, 99),
)
def test_bags(bags: int, length: int, mode: str, sparse: bool, padding: int | None, weighted: bool, seed: int) -> None:
    """Padding, also of whole bags; outputs, gradients, and which rows have one."""
    ours, plain = twins(mode=mode, sparse=sparse, padding_idx=padding)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, ROWS, (bags, length), generator=generator)
    if padding is not None:
        ids[:1] = padding % ROWS
    weights = [None, None]
    if weighted and mode == "sum":
        drawn = torch.randn(ids.shape, generator=generator, dtype=torch.float64)
        weights = [drawn.clone().requires_grad_() for _ in range(2)]
    found = ours(ids, per_sample_weights=weights[0])
    want = plain(ids, per_sample_weights=weights[1])
    torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
    slope = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for out in (found, want):
        (out * slope).sum().backward()
    grad = ours.weight.grad
    assert grad.is_sparse is sparse
    torch.testing.assert_close(grad.to_dense() if sparse else grad, plain.weight.grad, rtol=1e-12, atol=1e-12)
    if sparse:
        touched = set(ids.flatten().tolist()) - ({padding % ROWS} if padding is not None else set())
        assert set(grad.coalesce().indices()[0].tolist()) == touched
    if weights[0] is not None:
        torch.testing.assert_close(weights[0].grad, weights[1].grad, rtol=1e-12, atol=1e-12)


def test_sums_of_a_narrow_table_are_wide() -> None:
    """A thousand gradients of one row, which bfloat16 would stop to add up at 256."""
    bag = layers.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.bfloat16)
    bag.weight.grad_dtype = torch.float32
    bag(torch.ones(1, 1000, dtype=torch.int64)).sum().backward()
    assert bag.weight.grad is not None
    assert torch.equal(bag.weight.grad[1].float(), torch.full((DIM,), 1000.0))


class Largest(TorchDispatchMode):
    """The most bytes of a result of an operator, a tensor or several."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for one in out if isinstance(out, tuple) else (out,):
            if isinstance(one, Tensor):
                self.num_bytes = max(self.num_bytes, one.nbytes)
        return out


@pytest.mark.parametrize("padding", [None, 3, 6])
@pytest.mark.parametrize("num_ids", [0, 600])
def test_a_narrow_table_is_widened_by_distinct_rows(padding: int | None, num_ids: int) -> None:
    """Of 600 ids 5 are distinct: what is gathered wide are 5 rows, and no row for each id."""
    dim = 1024
    bag = layers.EmbeddingBag(ROWS, dim, mode="sum", padding_idx=padding, dtype=torch.bfloat16)
    bag.weight.data = torch.arange(ROWS * dim).view(ROWS, dim).remainder(11).sub(5).bfloat16()  # sums are exact
    bag.weight.grad_dtype = torch.float32
    ids = (torch.arange(num_ids) % 5).view(2, -1)
    with Largest() as seen:
        y = bag(ids)
        y.float().sum().backward()
    assert seen.num_bytes == ROWS * dim * 4  # the gradient itself
    of_each = torch.tensor([num_ids / 5 * (row < 5 and row != padding) for row in range(ROWS)])
    assert torch.equal(bag.weight.grad, of_each.unsqueeze(1).expand(ROWS, dim))
    want = (bag.weight.detach().float() * of_each.unsqueeze(1)).sum(0) / 2
    assert torch.equal(y, want.bfloat16().expand(2, dim))


IDS = torch.tensor([[0, 1, 2]])
BAD: list[tuple[dict[str, Any], Tensor, Tensor | None, str]] = [
    ({}, IDS[0], None, "EmbeddingBag: ids have shape (3,), not [bags, n]. Pad bags of different lengths"),
    ({}, IDS + 5, None, "ids range over 5..7, outside the vocabulary 0..6"),
    ({"mode": "sum"}, IDS, torch.ones(1, 2), "per_sample_weights have shape (1, 2), the ids (1, 3)"),
]


@pytest.mark.parametrize(("options", "ids", "weights", "words"), BAD, ids=[words for *_, words in BAD])
def test_bad_bags(options: dict[str, Any], ids: Tensor, weights: Tensor | None, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        layers.EmbeddingBag(ROWS, DIM, sparse=True, **options)(ids, per_sample_weights=weights)


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(ROWS, DIM, sparse=True, **options)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.bag(inputs["ids"], inputs["offsets"])

    def loss(self, y: Tensor, batch: Any) -> tuple[Tensor, int]:
        return y.square().sum(), len(y)


def engine(microbatches: int = 1, **options: Any) -> Any:
    config = dict(
        optimizer=dict(type="SGD", lr=0.5),
        schedule=dict(microbatches=microbatches),
        train=dict(steps=1, global_batch_size=2, precision="fp64"),
    )
    return colossus.initialize(config, model=lambda: Bag(**options))


@pytest.mark.parametrize("option", [dict(max_norm=1.0), dict(scale_grad_by_freq=True)], ids=["norm", "freq"])
def test_what_torchs_lookups_do_beside_looking_up(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"bag \(EmbeddingBag\) has sparse=True with max_norm or scale_grad_by_freq"):
        engine(**option)


def test_offsets_are_refused() -> None:
    one = engine()
    with pytest.raises(ValueError, match=r"takes ids \[bags, n\], padded with padding_idx, and no offsets"):
        one.train_step({"inputs": {"ids": torch.tensor([0, 1, 2, 3]), "offsets": torch.tensor([0, 1, 2, 3])}})
    one.close()
    with pytest.raises(ValueError, match="ids"):
        split_microbatches({"inputs": {"ids": torch.arange(6), "offsets": torch.tensor([0, 2])}}, 2)
