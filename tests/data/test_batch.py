"""Batches: any nest of tensors, split along dim 0."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossus.data.batch import batch_size_of, split_microbatches


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


def nested(size: int) -> dict[str, Any]:
    return {
        "tokens": torch.arange(size * 3).reshape(size, 3),
        "pair": Pair(torch.arange(size), [torch.arange(size) * 10, torch.tensor(5.0)]),
        "names": [f"file{i}" for i in range(size)],
        "shape": (224, 224),
        "note": "whole",
        "weight": torch.tensor(0.5),
    }


@given(parts=st.integers(1, 5), each=st.integers(1, 4))
def test_microbatches_concatenate_to_the_batch(parts: int, each: int) -> None:
    batch = nested(parts * each)
    pieces = split_microbatches(batch, parts)
    assert len(pieces) == parts
    assert [batch_size_of(piece) for piece in pieces] == [each] * parts
    assert torch.cat([piece["tokens"] for piece in pieces]).equal(batch["tokens"])
    assert torch.cat([piece["pair"].x for piece in pieces]).equal(batch["pair"].x)
    assert torch.cat([piece["pair"].y[0] for piece in pieces]).equal(batch["pair"].y[0])
    assert [name for piece in pieces for name in piece["names"]] == batch["names"]
    for piece in pieces:
        assert isinstance(piece["pair"], Pair)
        assert (piece["shape"], piece["note"], piece["weight"].item()) == ((224, 224), "whole", 0.5)
        assert piece["pair"].y[1].item() == 5.0


def test_a_list_of_tensors_is_a_nest_even_when_it_is_as_long_as_the_batch() -> None:
    pieces = split_microbatches([torch.arange(2), torch.arange(2) + 5], 2)
    assert [[t.tolist() for t in piece] for piece in pieces] == [[[0], [5]], [[1], [6]]]


@pytest.mark.parametrize(("size", "n"), [(6, 4), (3, 6), (4, 0)])
def test_a_batch_that_does_not_divide(size: int, n: int) -> None:
    with pytest.raises(ValueError, match=rf"batch of {size} samples .* into {n} microbatches.*schedule.microbatches"):
        split_microbatches({"x": torch.zeros(size, 2)}, n)


def test_the_size_is_not_guessed() -> None:
    with pytest.raises(ValueError, match=r"batch\['a'\] \[4, 2\], batch\['b'\]\[0\] \[3\]"):
        batch_size_of({"a": torch.zeros(4, 2), "b": [torch.zeros(3)]})
    with pytest.raises(ValueError, match="no tensor"):
        batch_size_of({"a": ["x", "y"], "b": torch.tensor(1)})
    assert batch_size_of((np.zeros((7, 2)), torch.zeros(7))) == 7
