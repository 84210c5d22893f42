"""Initial values are functions of (key, full shape, box): any box holds what the whole would hold there."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossus.construct import initial_values
from colossus.construct.initial_values import Constant, Normal, Uniform, uniform_box

Box = tuple[tuple[int, int], ...]


@st.composite
def shapes_and_boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], Box]:
    """One to three dims, the last sometimes longer than what is drawn as a whole; boxes of any size, also none."""
    ndim = draw(st.integers(1, 3))
    shape = [draw(st.integers(0, 9)) for _ in range(ndim)]
    shape[-1] = draw(st.one_of(st.integers(0, 13), st.sampled_from([2047, 2048, 2049, 2053, 5000])))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append((start, draw(st.integers(start, size))))
    return tuple(shape), tuple(box)


def everything(shape: tuple[int, ...]) -> Box:
    return tuple((0, size) for size in shape)


def cut(whole: np.ndarray, box: Box) -> np.ndarray:
    return whole[tuple(slice(*span) for span in box)]


@given(shapes_and_boxes(), st.integers(0, 2**63 - 1))
def test_a_box_holds_what_the_whole_holds(case: tuple[tuple[int, ...], Box], key: int) -> None:
    shape, box = case
    for draw in (uniform_box, Normal(0.3, 1.0), Uniform(0.1), Constant(2.5)):
        part = draw(key, shape, box)
        assert part.dtype == np.float64
        assert part.shape == tuple(stop - start for start, stop in box)
        np.testing.assert_array_equal(part, cut(draw(key, shape, everything(shape)), box))


def test_values_are_pinned() -> None:
    """Other values would give every user's model another start."""
    assert uniform_box(7, (2, 3), ((0, 2), (0, 3))).round(6).tolist() == [
        [0.872073, 0.295365, 0.420098],
        [0.082843, 0.696633, 0.296358],
    ]


# -- distributions --------------------------------------------------------------------------------------------

COUNT = 1_000_000


def test_uniforms_are_uniform() -> None:
    x = uniform_box(3, (1000, 1000), ((0, 1000), (0, 1000))).reshape(-1)
    assert 0 < x.min() < x.max() < 1
    assert abs(x.mean() - 0.5) < 5 * math.sqrt(1 / 12 / COUNT)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / COUNT)
    counts = np.histogram(x, bins=100, range=(0, 1))[0]
    assert (((counts - COUNT / 100) ** 2) / (COUNT / 100)).sum() < 99 + 5 * math.sqrt(2 * 99)  # chi squared
    assert abs(np.corrcoef(x[:-1], x[1:])[0, 1]) < 5 / math.sqrt(COUNT)
    assert abs(np.corrcoef(x[:-1000], x[1000:])[0, 1]) < 5 / math.sqrt(COUNT)  # row and row


def test_normals_are_normal() -> None:
    x = Normal(0.02, 0.5)(3, (1000, 1000), ((0, 1000), (0, 1000))).reshape(-1)
    z = (x - 0.5) / 0.02
    assert np.isfinite(z).all()
    assert abs(z.mean()) < 5 / math.sqrt(COUNT)
    assert abs(z.var() - 1) < 5 * math.sqrt(2 / COUNT)
    assert abs((z**3).mean()) < 5 * math.sqrt(15 / COUNT)
    assert abs((z**4).mean() - 3) < 5 * math.sqrt(96 / COUNT)
    assert 4.2 < np.abs(z).max() < 6.5


def test_no_word_gives_an_infinity() -> None:
    words = np.array([0, 1, 2**63, 2**64 - 1, 2**64 - 2**11, 2**64 - 2**12], dtype=np.uint64)
    unit = initial_values._to_unit(words)
    assert 0 < unit.min() < unit.max() < 1
    normals = torch.special.ndtri(torch.from_numpy(unit))
    assert torch.isfinite(normals).all()
    assert normals.abs().max() < 8.3
    assert unit[0] + unit[3] == 1.0  # as far from 0 as from 1
    assert torch.isfinite(normals.float()).all()


# -- cost -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((1 << 14, 1 << 14), ((0, 1 << 14), (256, 320))),  # a column slice of long rows
        ((1 << 20, 4), ((0, 1 << 20), (1, 3))),  # of short ones
        ((1 << 14, 1 << 14), ((100, 140), (0, 1 << 14))),  # some rows
        ((1 << 30,), ((1 << 29, (1 << 29) + 1000),)),
        ((64, 64, 1 << 14), ((3, 5), (1, 3), (0, 100))),
    ],
)
def test_the_box_is_what_one_pays_for(shape: tuple[int, ...], box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words drawn and calls made, counted: neither all of the tensor nor one call for each short row."""
    calls: list[int] = []
    raw = initial_values._raw

    def counted(key: int, start: int, count: int) -> np.ndarray:
        calls.append(count)
        return raw(key, start, count)

    monkeypatch.setattr(initial_values, "_raw", counted)
    part = uniform_box(1, shape, box)
    assert sum(calls) <= 3 * part.size + 4 * len(calls)
    assert max(calls) <= 2 * initial_values._BLOCK_WORDS
    assert len(calls) <= 1 + part.size // 32 if shape[-1] > 4 else len(calls) <= 4
