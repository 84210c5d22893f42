"""Mixtures: shares, epochs of each source, resumes under any plan and with other weights from a sample on."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from helpers.documents import Documents
from hypothesis import given, settings
from hypothesis import strategies as st

from colossus.data import TokenWindows, build_loaders, mix
from colossus.data.documents.packed import Packed
from colossus.data.mix import Mix
from colossus.data.tokenizer import DatasetTokenizer
from colossus.data.tokens import BatchedDataset, TooLittleData

#: first id of each source
FIRST = {"code": 0, "books": 1000, "talk": 2000}


@pytest.fixture(autouse=True)
def blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mix, "BLOCK", 20)


def windows(name: str, count: int) -> TokenWindows:
    return TokenWindows(FIRST[name] + np.arange(2 * count + 1), 2, name=name)


def mixture(weights: dict[str, float], counts: tuple[int, ...] = (7, 40, 13), **options: Any) -> Mix:
    sources = {name: windows(name, count) for name, count in zip(FIRST, counts, strict=True)}
    return Mix(sources, weights, **options)


def numbers(samples: Any) -> list[int]:
    return [int(first) for first in samples["inputs"][:, 0]]


def names(firsts: list[int]) -> Counter[str]:
    of = {value // 1000: name for name, value in FIRST.items()}
    return Counter(of[first // 1000] for first in firsts)


WEIGHTS = st.fixed_dictionaries({name: st.integers(1, 5).map(float) for name in FIRST})


@settings(max_examples=15, deadline=None)
@given(WEIGHTS, st.integers(0, 5), st.integers(0, 70))
def test_shares_are_the_weights_and_each_source_is_read_epoch_by_epoch(
    weights: dict[str, float], seed: int, more: int
) -> None:
    mixed = mixture(weights, seed=seed)
    firsts = numbers(mixed.batch(mixed.samples_at(np.arange(200 + more))))
    counts = names(firsts)
    assert counts == Counter(mixed.taken(200 + more))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        assert abs(names(firsts[:200])[name] - 200 * share) <= 10  # within one of each 20
        own = [first for first in firsts if first // 1000 == FIRST[name] // 1000]
        length = len(mixed.sources[name])
        for start in range(0, len(own) - length, length):
            assert len({*own[start : start + length]}) == length
        if len(own) >= 3 * length and length > 7:
            assert own[:length] != own[length : 2 * length]
    assert mixed.epochs(200 + more) == {name: counts[name] / len(source) for name, source in mixed.sources.items()}


def test_weights_are_exact_to_a_place_of_a_block() -> None:
    counts = mixture(dict(code=0.3, books=0.65, talk=0.05)).taken(20 * 50)
    assert counts == dict(code=300, books=650, talk=50)
    assert mixture(dict(code=1, books=1, talk=1)).taken(20) == dict(code=7, books=7, talk=6)


def read(
    steps: int, batch: int, data_size: int, state: Any = None, own_seed: int = 5, **options: Any
) -> tuple[list[int], Any]:
    """The first ids of samples in the order of the global batch, and the state after them."""
    data = dict(type=lambda seed: mixture(dict(code=3, books=6, talk=1), seed=seed, **options))
    own = [
        build_loaders(data, seed=own_seed, global_batch_size=batch, data_rank=rank, data_size=data_size)
        for rank in range(data_size)
    ]
    for loaders in own if state is not None else ():
        loaders.train.load_state_dict(state)
    by_rank = [[*islice(loaders.train, steps)] for loaders in own]
    batches = [torch.cat([rank[step]["inputs"] for rank in by_rank]) for step in range(steps)]
    return [int(row[0]) for part in batches for row in part], own[0].train.state_dict()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 30), st.lists(st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 4)]), min_size=2, max_size=3))
def test_a_resume_with_other_ranks_and_batches_reads_on(steps: int, sizes: list[tuple[int, int]]) -> None:
    state, firsts = None, []
    for batch, data_size in sizes:
        part, state = read(steps, batch, data_size, state)
        firsts += part
    assert firsts == read(len(firsts), 1, 1)[0]


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 30), st.integers(0, 5), WEIGHTS)
def test_other_weights_from_a_sample_on_repeat_and_lose_nothing(
    steps: int, seed: int, weights: dict[str, float]
) -> None:
    first, state = read(steps, 4, 2)
    changed = {4 * steps: weights}
    firsts = first + read(150, 2, 1, state, changes=changed)[0]
    assert firsts == read(len(firsts), 1, 1, changes=changed)[0]
    for name, source in mixture(weights).sources.items():
        own = [number for number in firsts if number // 1000 == FIRST[name] // 1000]
        for start in range(0, len(own) - len(source), len(source)):
            assert len({*own[start : start + len(source)]}) == len(source)


def test_other_weights_for_samples_that_were_read_are_refused() -> None:
    _, state = read(10, 4, 1)
    with pytest.raises(ValueError, match=r"had given \{'code': 12.*data\.changes=\{40: \.\.\}"):
        read(1, 4, 1, state, changes={20: dict(code=0, books=1, talk=1)})
    with pytest.raises(ValueError, match=r"made by the seed 5 when .* and is by 6 now: restore train.seed"):
        read(1, 4, 1, state, own_seed=6)
    state["fingerprint"] = "of other sources"
    with pytest.raises(ValueError, match="its fingerprint was of other so"):
        read(1, 4, 1, state)


def test_another_seed_of_a_source_is_refused_on_a_resume() -> None:
    """The rows of a source that has a seed of its own hold other documents under another one."""

    def loader(seed: int | None) -> Any:
        own = {} if seed is None else {"seed": seed}
        source = dict(type=Packed, source=Documents([5, 3, 9, 2] * 9), seq_len=10, **own)
        data = Mix({"a": source}, {"a": 1.0}, seed=3)
        return build_loaders(data, seed=3, global_batch_size=4, data_rank=0, data_size=1).train

    own = loader(7)
    next(own)
    state = own.state_dict()
    loader(7).load_state_dict(state)
    for other in (8, None):
        with pytest.raises(ValueError, match="is not what the checkpoint was trained on: its fingerprint was"):
            loader(other).load_state_dict(state)
    assert loader(None).source.dataset.fingerprint == loader(3).source.dataset.fingerprint


def test_validation_is_all_of_each_source() -> None:
    sources = dict(a=dict(type=packed, count=30), b=dict(type=packed, count=60, length=6))
    data = dict(type="Mix", weights=dict(a=1, b=3), sources=sources)
    loaders = build_loaders(data, seed=0, global_batch_size=4, data_rank=0, data_size=1, seq_len=8)
    assert loaders.validation is not None
    batches = [*loaders.validation]
    assert set((batches[0]["labels"] >= 0).sum(1).tolist()) == {4, 5}  # both are in the first
    assert sum(len(batch["labels"]) for batch in batches) == len(packed(8, "validation", 30)) + len(
        packed(8, "validation", 60)
    )
    assert "a 25.00% of" in loaders.description


def test_a_mixture_has_the_tokenizer_and_the_vocabulary_of_its_sources() -> None:
    sources = {name: windows(name, 4) for name in FIRST}
    sources["books"].tokenizer = "bytes"  # type: ignore[attr-defined]
    sources["books"].vocab_size = 7
    mixed = Mix(sources, dict.fromkeys(FIRST, 1))
    assert mixed.tokenizer is not None
    assert (mixed.tokenizer.name, mixed.vocab_size) == ("bytes", 7)
    sources["talk"].tokenizer = DatasetTokenizer("tokenizer.json", b"{}")  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=r"data\.sources\.talk: its ids are of tokenizer\.json, those .* of bytes"):
        Mix(sources, dict.fromkeys(FIRST, 1))


def packed(seq_len: int, split: str, count: int, length: int = 5) -> Packed:
    return Packed(Documents([length] * count), seq_len, split=split, validation_fraction=0.2)


class Bare(BatchedDataset):
    def __len__(self) -> int:
        return 1

    def batch(self, indices: np.ndarray) -> Any:
        return {"inputs": torch.zeros(len(indices), 2)}


def test_what_does_not_fit_is_told_in_words() -> None:
    with pytest.raises(ValueError, match="one number from 0 on for each of code, books, talk"):
        mixture(dict(code=1, books=1))
    with pytest.raises(ValueError, match=r"changes\[40\].*one number from 0 on"):
        mixture(dict(code=1, books=1, talk=1), changes={40: dict(code=1, books=1, talk=-1)})
    for changes in ({0: dict(code=1, books=1, talk=1)}, {"x": {}}, [1]):
        with pytest.raises(ValueError, match=r"Mix: changes = .*number of a sample, above 0"):
            mixture(dict(code=1, books=1, talk=1), changes=changes)
    for weights in ([1, 1], dict(code="1", books=1, talk=1), 3):
        with pytest.raises(ValueError, match=r"Mix: weights = .*one number from 0 on"):
            mixture(weights)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Mix: sources = "):
        Mix([1], {"x": 1})  # type: ignore[arg-type]
    assert Mix({"x": Bare()}, {"x": 1}).tree()[1:] == ["  x: Bare"]
    with pytest.raises(ValueError, match="Mix: 'x' has an order of its own"):
        Mix({"x": mixture(dict(code=1, books=1, talk=1))}, {"x": 1})
    with pytest.raises(TooLittleData, match="'code' takes no split='validation'"):
        Mix({"code": windows("code", 4)}, {"code": 1}, split="validation")
    with pytest.raises(ValueError, match="'code' would have less than one of 20 samples"):
        mixture(dict(code=1, books=1000, talk=1000))
    with pytest.raises(ValueError, match="'x' is a list, not a dataset that reads batches"):
        Mix({"x": [1, 2]}, {"x": 1})
    mixed = Mix({"code": windows("code", 4), "books": packed(2, "train", 9)}, dict(code=1, books=1))
    with pytest.raises(ValueError, match="samples of code and books differ in their entries or shapes"):
        mixed.batch(np.arange(len(mixed)))
    with pytest.raises(TooLittleData, match="'x' takes no split='validation'"):
        Mix({"x": dict(type=lambda: windows("code", 4))}, {"x": 1}, split="validation")
