"""Packed rows: every token once, no label across documents, the same loss as documents alone, exact resumes."""

from __future__ import annotations

import pickle
import re
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.documents import Documents, texts, write_rows
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.tokenizer import make_tokenizer
from helpers.training import config_of
from hypothesis import given, settings
from hypothesis import strategies as st

import colossus
from colossus.data import TooLittleData, build_loaders
from colossus.data.documents.encoder import Text
from colossus.data.documents.packed import NO_LABEL, Packed
from colossus.data.documents.packing import STRATEGIES, best_fit
from colossus.data.documents.row_source import Piece, RowSource
from colossus.state.model_state_dict import full_state_dict

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any)


def filled(batch: Any) -> Any:
    """Whether a token of a batch is no padding."""
    documents, labels = batch["inputs"]["documents"], batch["labels"]
    is_last = documents == documents.max(1, keepdim=True).values
    is_padding = is_last & (batch["inputs"]["ids"] == 0) & (labels == NO_LABEL)
    has_padding = (is_padding | ~is_last).all(1, keepdim=True)
    return ~(is_padding & has_padding)


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, size=st.integers(1, 12), strategy=st.sampled_from(STRATEGIES), seed=st.integers(0, 9))
def test_every_token_is_once_an_input_and_but_the_first_of_a_document_once_a_label(
    lengths: list[int], size: int, strategy: str, seed: int
) -> None:
    documents = Documents([0, *lengths])
    documents.tokens = documents.tokens + 1  # padding is 0
    rows = Packed(documents, size, strategy, seed=seed, validation_fraction=0)
    batch = rows.batch(np.arange(len(rows)))
    ids, labels = batch["inputs"]["ids"], batch["labels"]
    assert sorted(ids[ids > 0].tolist()) == documents.tokens.tolist()
    firsts = {int(document[0]) for document in documents if len(document)}
    assert sorted(labels[labels != NO_LABEL].tolist()) == [token for token in documents.tokens if token not in firsts]
    # a label is the token behind its input in the same document, and so are its neighbours
    has_label = labels != NO_LABEL
    assert (labels == ids + 1)[has_label].all()
    for row, own in zip(ids, batch["inputs"]["documents"], strict=True):
        places = [np.searchsorted(documents.offsets, token - 1, side="right") for token in row.tolist() if token]
        numbers = own[: len(places)].tolist()
        assert numbers == sorted(numbers)
        assert all((a == b) == (c == d) for a, b, c, d in zip(places, places[1:], numbers, numbers[1:], strict=False))
        assert (own[len(places) :] == numbers[-1] + 1).all()
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = batch["inputs"]["documents"].diff(dim=1) != 0
    assert (batch["inputs"]["positions"] == 0)[starts].all()
    steps = batch["inputs"]["positions"].diff(dim=1)[~starts[:, 1:] & (ids[:, 1:] > 0)]
    assert (steps == 1).all()
    assert rows.padding == pytest.approx(1 - len(documents.tokens) / (len(rows) * size))


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=40), size=st.integers(12, 30))
def test_best_fit_fills_the_rows_that_the_textbook_fills(lengths: list[int], size: int) -> None:
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, number) for number, room in enumerate(rooms) if room >= length]
        if not fitting:
            fitting = [(size, len(rooms))]
            rooms.append(size)
        rooms[min(fitting)[1]] -= length
    row_of = best_fit(np.array(lengths, np.int64), size)
    used = np.bincount(row_of, lengths).astype(int).tolist() if lengths else []
    assert sorted(used) == sorted(size - room for room in rooms)


def test_a_million_lengths_leave_hardly_any_padding() -> None:
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 50_000).astype(np.int64) + 1
    padding = {strategy: Packed(Documents(lengths.tolist()), 2048, strategy).padding for strategy in STRATEGIES}
    assert padding["best_fit"] < 2e-3
    assert padding["greedy"] < 2e-4
    assert padding["none"] > 0.5


def test_splits_share_no_document_and_have_all() -> None:
    splits = {split: Packed(Documents([4] * 200), 16, split=split) for split in ("train", "validation")}
    ids = {split: rows.batch(np.arange(len(rows)))["inputs"]["ids"] for split, rows in splits.items()}
    assert splits["validation"].num_documents == 10
    assert sorted(torch.cat([part.flatten() for part in ids.values()]).tolist())[-799:] == [*range(1, 800)]
    assert splits["train"].fingerprint != splits["validation"].fingerprint
    with pytest.raises(TooLittleData, match="none of 3 documents is in this split"):
        Packed(Documents([4] * 3), 16, split="validation")


def test_long_documents_are_cut_refused_or_left_out() -> None:
    lengths = [5, 20, 6, 19]
    assert Packed(Documents(lengths), 8, validation_fraction=0).num_documents == 4
    short = Packed(Documents(lengths), 8, long="skip", validation_fraction=0)
    assert (short.num_documents, short.num_long) == (2, 2)
    with pytest.raises(TooLittleData, match=r"none of 4 documents is in this split, 4 long ones left out$"):
        Packed(Documents(lengths), 4, long="skip", validation_fraction=0)
    documents = Documents([])
    documents.skipped = {"chat": 300}
    with pytest.raises(TooLittleData, match="left out of all: 300 chat; without skip the first"):
        Packed(documents, 4, validation_fraction=0)
    with pytest.raises(
        ValueError, match=r"document 1: a document of 20 tokens is longer than a row of 8, and 1 others"
    ):
        Packed(Documents(lengths), 8, long="error", validation_fraction=0)
    with pytest.raises(ValueError, match="long = 'shorten' is not one of None, 'cut', 'error', 'skip'"):
        Packed(Documents(lengths), 8, long="shorten")


def test_ids_beyond_the_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match=r"ids from 0 to 9, but model\.vocab_size = 9: set it to 10"):
        Packed(Documents([10]), 10, validation_fraction=0, vocab_size=9).batch(np.array([0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(source=dict(type="Jsonl")), "data.source.path: is missing: Jsonl needs it"),
        (
            dict(source=dict(type="Text", source=dict(type="Jsonl", pth=1))),
            "data.source.source.pth: no such key; did you mean data.source.source.path?",
        ),
        (dict(source=dict(type="Jsonl", path=5)), "5 is a int, not a path"),
        (dict(source=dict(path="x")), "data.source needs a 'type'"),
        (dict(source=dict(type=lambda: Text(Own())), tokenizer="model"), "data.source: its ids are of bytes"),
        (dict(source=Text(dict(type="StdlibFiles")), tokenizer="model"), "data.source: its ids are of bytes"),
        (dict(source=Documents([3]), validation_fraction="0.1"), "validation_fraction = '0.1' is outside"),
    ],
)
def test_sources_and_options_that_do_not_fit_are_told_in_words(
    options: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tokenizer(tmp_path / "model")
    with pytest.raises(ValueError, match=re.escape(message)):
        Packed(seq_len=8, **options)


class Own(RowSource):
    """A source that takes no tokenizer."""

    name = fingerprint = "own"

    def pieces(self) -> list[Piece]:
        return [Piece("own", 0, 1)]

    def read(self, piece: Piece) -> Any:
        yield 1, {"text": "own"}


def test_a_function_that_gives_rows_needs_no_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Packed(dict(type=lambda: Own()), 8, validation_fraction=0, tokenizer="bytes").num_documents == 1


def test_the_first_rows_of_best_fit_are_of_all_lengths() -> None:
    rows = Packed(Documents([*range(1, 65)]), 64, validation_fraction=0)
    longest = [int(np.bincount(row["inputs"]["documents"]).max()) for row in rows]
    assert abs(np.corrcoef(longest, np.arange(len(rows)))[0, 1]) < 0.4  # nearly -1 in the order of packing


# -- resumes ----------------------------------------------------------------------------------------------------


def packed(seed: int) -> Packed:
    return Packed(Documents([3, 9, 1, 7, 12, 2, 5, 5, 8, 30, 4, 6] * 3), 8, seed=seed)


def read(steps: int, batch: int, data_size: int, state: Any = None, **options: Any) -> tuple[list[list[int]], Any]:
    """The rows of some steps in the order of the global batch, and the state after them."""
    own = [
        build_loaders({"type": packed, **options}, seed=5, global_batch_size=batch, data_rank=rank, data_size=data_size)
        for rank in range(data_size)
    ]
    if state is not None:
        for loaders in own:
            loaders.train.load_state_dict(state)
    by_rank = [[*islice(loaders.train, steps)] for loaders in own]
    state = own[0].train.state_dict()
    for loaders in own:
        loaders.close()
    batches = [torch.cat([rank[step]["inputs"]["ids"] for rank in by_rank]) for step in range(steps)]
    return [row for part in batches for row in part.tolist()], state


@settings(max_examples=12, deadline=None)
@given(
    first=st.integers(0, 20), sizes=st.lists(st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 4)]), min_size=2, max_size=3)
)
def test_a_resume_with_other_ranks_and_batches_reads_on(first: int, sizes: list[tuple[int, int]]) -> None:
    state, rows = None, []
    for batch, data_size in sizes:
        part, state = read(first, batch, data_size, state)
        rows += part
    whole, _ = read(len(rows), 1, 1)
    assert rows == whole


@pytest.mark.parametrize("first", long(5, 0, 11))
def test_workers_read_the_same_and_a_resume_within_them(first: int) -> None:
    rows, state = read(first, 4, 1, num_workers=2)
    more, _ = read(12, 4, 2, state, num_workers=1)
    assert rows + more == read(first + 12, 4, 1)[0]


def test_epochs_have_every_row_once_and_another_order() -> None:
    count = len(packed(5))
    rows, _ = read(2 * count, 1, 1)
    assert sorted(rows[:count]) == sorted(rows[count:])
    assert rows[:count] != rows[count:]


def test_a_changed_fingerprint_is_an_error_in_words() -> None:
    _, state = read(2, 4, 1)
    assert state["fingerprint"]
    with pytest.raises(ValueError, match=r"its fingerprint was .* and is None"):
        build_loaders([1] * 8, seed=5, global_batch_size=4, data_rank=0, data_size=1).train.load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"its fingerprint was other finger and is \w{12} \(Packed.*checkpoint\.weights"
    ):
        read(2, 4, 1, {**state, "fingerprint": "other fingerprint"})


def test_a_pickled_copy_of_prepared_rows_reads_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = Packed({"type": "Jsonl", "path": write_rows(tmp_path / "x.jsonl", texts(200))}, 64)
    copy = pickle.loads(pickle.dumps(rows))
    for number in range(len(rows)):
        assert copy[number]["labels"].equal(rows[number]["labels"])
    assert "\n".join(rows.tree()).count("fingerprint") == 2


# -- training ---------------------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    "learned": dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=16),
    "rotary": dict(type="Llama", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=16, window=5),
}
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data 2": (2, dict(data=2), {}),
    "1d 2": (2, dict(tensor=2), {}),
    "pipeline 2": (2, dict(pipeline=2), dict(type="1f1b", microbatches=2)),
    "sequence 2": (2, dict(sequence=2), {}),
    "1d sharded 2": (2, dict(tensor=dict(size=2, sequence_sharded=True)), {}),
    "zero 3": (2, dict(data=2, zero=3), {}),
    "2d 4": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "3d": (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), {}),
    "sequence 4 in 4 chunks": (4, dict(sequence=dict(size=4, mode="ring", chunks=2)), {}),
    "data 2 x sequence 2": (4, dict(data=2, sequence=2), {}),
}


def rows_of_53(seed: int) -> Packed:
    documents = Documents([3, 9, 1, 7, 12, 2, 5, 5, 8, 30, 4, 6] * 3)
    documents.tokens = documents.tokens * 7 % 53
    return Packed(documents, 16, seed=seed)


def trained(rank: int, model: str, parallel: dict[str, Any], schedule: dict[str, Any]) -> Any:
    config = config_of(parallel, 3, "fp64", model=MODELS[model], schedule=schedule, data=dict(type=rows_of_53))
    engine = colossus.initialize(config)
    numbers = []
    for _ in range(3):
        result = engine.train_step(next(engine.loader))
        numbers.append((result.loss, result.grad_norm, result.tokens))
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    engine.close()
    return numbers, gradients


@cache
def in_one_process(model: str) -> Any:
    return run_ranks(1, trained, model, {}, {}, with_context=False)[0]


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *((model, plan) for model in MODELS for plan in ("data 2", "1d 2", "pipeline 2", "sequence 2")),
        *(
            pytest.param(model, plan, marks=pytest.mark.long)
            for model in MODELS
            for plan in ("1d sharded 2", "zero 3", "2d 4", "3d", "sequence 4 in 4 chunks", "data 2 x sequence 2")
        ),
    ],
)
def test_packed_rows_train_alike_under_every_plan(model: str, plan: str) -> None:
    world, parallel, schedule = PLANS[plan]
    reference, gradients = in_one_process(model)
    for numbers, own in run_ranks(world, trained, model, parallel, schedule, with_context=False):
        assert np.array(numbers) == pytest.approx(np.array(reference), rel=1e-9)
        for name, gradient in gradients.items():
            torch.testing.assert_close(own[name], gradient, rtol=1e-9, atol=1e-11)


def alone(rank: int, model: str) -> tuple[float, dict[str, Any], float, dict[str, Any]]:
    """Losses and gradients of packed rows, and of the same documents one after the other."""
    engine = colossus.initialize(config_of({}, 1, "fp64", model=MODELS[model]))
    batch = rows_of_53(0).batch(np.arange(6))
    numbers: list[Any] = []
    for inputs, labels in (
        ([batch["inputs"]], [batch["labels"]]),
        zip(
            *(
                (ids[None, mask], labels[None, mask])
                for ids, documents, labels in zip(
                    batch["inputs"]["ids"], batch["inputs"]["documents"], batch["labels"], strict=True
                )
                for mask in (documents == number for number in documents.unique())
            ),
            strict=True,
        ),
    ):
        engine.model.zero_grad()
        total = sum(engine.model.loss(engine.model(x), {"labels": y})[0] for x, y in zip(inputs, labels, strict=True))
        total.backward()
        numbers += [total.item(), {name: p.grad.clone() for name, p in engine.model.named_parameters()}]
    engine.close()
    return tuple(numbers)


@pytest.mark.parametrize("model", MODELS)
def test_a_packed_row_is_its_documents_one_by_one(model: str) -> None:
    loss, gradients, loss_alone, gradients_alone = run_ranks(1, alone, model, with_context=False)[0]
    assert loss == pytest.approx(loss_alone, rel=1e-11)
    for name, gradient in gradients_alone.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-9, atol=1e-11)
