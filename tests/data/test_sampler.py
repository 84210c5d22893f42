"""The order of samples: a pure function of (seed, step)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from colossus.data.sampler import BatchShard, SampleOrder, local_batch_size, permute
from colossus.random import derive_seeds

SEEDS = st.integers(0, 2**40)


def order(seed: int, n: int, batch: int, rank: int = 0, size: int = 1) -> Callable[[int], np.ndarray]:
    """step -> the samples of a data rank."""
    made = SampleOrder(BatchShard(seed, batch, rank, size, endless=True), n)
    return lambda step: made.indices(step, made.span(step))


@given(seed=SEEDS, epoch=st.integers(0, 10**6), n=st.integers(1, 700))
def test_each_epoch_is_a_permutation(seed: int, epoch: int, n: int) -> None:
    assert sorted(permute(np.arange(n), n, seed, epoch)) == list(range(n))


@given(
    seed=SEEDS,
    n=st.integers(1, 60),
    data_size=st.integers(1, 5),
    per_rank=st.integers(1, 9),
    first=st.integers(0, 50),
)
def test_steps_visit_each_sample_once_per_epoch(seed: int, n: int, data_size: int, per_rank: int, first: int) -> None:
    """Whatever the batch size, and however many epochs one batch straddles: n positions in a row from an
    epoch's start are all the samples."""
    batch = data_size * per_rank
    steps = range(first, first + 2 + 3 * n // batch)
    stream = np.concatenate(list(map(order(seed, n, batch), steps)))
    skipped = -(first * batch) % n  # positions until the next epoch starts
    whole_epochs = stream[skipped : skipped + (len(stream) - skipped) // n * n].reshape(-1, n)
    assert len(whole_epochs) >= 2
    for epoch in whole_epochs:
        assert sorted(epoch) == list(range(n))


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(permute(np.arange(50), 50, seed, epoch)) for seed in range(10) for epoch in range(10)}
    assert len(orders) == 100
    assert tuple(range(50)) not in orders


@pytest.mark.rest("97", "10")
@pytest.mark.parametrize("n", [10, 97, 1000])
def test_places_are_uniform_and_neighbours_unrelated(n: int) -> None:
    epochs = 3000
    orders = np.stack([permute(np.arange(n), n, 1, epoch) for epoch in range(epochs)])
    # The standard deviation of a mean of uniform numbers on 0..n-1 is n / sqrt(12 * epochs).
    assert np.abs(orders.mean(0) - (n - 1) / 2).max() < 5 * n / np.sqrt(12 * epochs)
    steps = (orders[:, 1:] - orders[:, :-1]) % n
    most_common = Counter(steps[:, 0].tolist()).most_common(1)[0][1]
    assert most_common < 3 * epochs / n + 20


def test_values_are_pinned() -> None:
    """Another order would make old checkpoints resume on other data."""
    assert order(0, 10, 4)(0).tolist() == [6, 0, 9, 8]
    assert order(0, 10**9, 4)(0).tolist() == [892345431, 803076910, 545977981, 784772802]
    assert derive_seeds(0, (1, 2), 2) != derive_seeds(0, (2, 1), 2)


def test_a_place_in_the_order_does_not_depend_on_the_way_there() -> None:
    """Many steps are computed at once."""
    forward = order(5, 10_000, 7)
    run = [forward(step) for step in range(1500)]
    for step in (1499, 0, 700, 584, 585):
        np.testing.assert_array_equal(forward(step), run[step])
        np.testing.assert_array_equal(order(5, 10_000, 7)(step), run[step])


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((6, 4), r"train.global_batch_size = 6 does not divide over 4 data ranks \(6 / 4 = 1.50\); use 4 or 8"),
        ((3, 4), r"use 4$"),
        ((0, 1), "train.global_batch_size = 0"),
    ],
)
def test_errors(sizes: tuple[int, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        local_batch_size(*sizes)
