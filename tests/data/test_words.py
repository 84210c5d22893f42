"""The words of the standard library as ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from colossus.data import PythonStdlibWords, text, words
from colossus.registry import DATASETS

FILES = {"a.py": "def f(x):\n    return f(x, 12.5)\n\n\n", "b.py": "x = x\n", "c.py": 'café = "x"\n', "d.py": "x\n"}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A standard library of four files, of which c.py is held out, and an empty cache."""
    for name, content in FILES.items():
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / name).write_text(content, encoding="utf-8")
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path / "lib"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(text, "_one_split", lambda files, fraction, split: (
        [file for file in files if (file.name == "c.py") == (split == "validation")], "files"))  # fmt: skip
    words._encoded.cache_clear()
    yield tmp_path
    words._encoded.cache_clear()


def test_words_are_numbered_by_how_often_training_has_them(small: Path) -> None:
    assert DATASETS.get("PythonStdlibWords") is PythonStdlibWords
    assert words.words_of(FILES["a.py"]) == [
        "def", "f", "(", "x", ")", ":", "\n", "return", "f", "(", "x", ",", "12.5", ")", "\n\n\n"
    ]  # fmt: skip
    train, validation = PythonStdlibWords(3), PythonStdlibWords(3, "validation")
    # x five times, a line's end three times, then what comes twice, then once: in the order of the characters
    order = ["?", "x", "\n", "(", ")", "f", "\n\n\n", ",", "12.5", ":", "=", "def", "return"]
    assert (train.num_words, train.vocab_size) == (12, 13)
    assert [order[each] for each in train.tokens] == [*words.words_of(FILES["a.py"]), "x", "=", "x", "\n", "x", "\n"]
    assert [order[each] for each in validation.tokens] == ["?", "=", "?", "x", "?", "\n"]
    assert "unknown here 50.0%" in validation.describe()
    few = PythonStdlibWords(3, vocab_size=5)
    assert few.tokens.tolist() == [each if each < 5 else 0 for each in train.tokens.tolist()]
    assert "vocabulary 5 (the text has 12 words; unknown here 42.9%)" in few.describe()
    many = PythonStdlibWords(3, vocab_size=99)
    assert (many.vocab_size, many.tokens.tolist()) == (99, train.tokens.tolist())


def test_pairs_are_of_a_word_and_the_one_before(small: Path) -> None:
    one, pairs = PythonStdlibWords(4), PythonStdlibWords(4, pairs=1 << 30)
    batch: Any = pairs.batch(np.array([2, 0]))
    assert torch.equal(batch["inputs"]["ids"], one.batch(np.array([2, 0]))["inputs"])
    assert torch.equal(batch["labels"], one.batch(np.array([2, 0]))["labels"])
    assert batch["inputs"]["pairs"].shape == (2, 4)
    whole = torch.cat([pairs[number]["inputs"]["pairs"] for number in range(len(pairs))]).tolist()
    tokens = one.tokens[: len(whole)].tolist()
    before = [0, *tokens[:-1]]
    by_pair: dict[Any, set[int]] = {}
    for key, bucket in zip(zip(before, tokens, strict=True), whole, strict=True):
        by_pair.setdefault(key, set()).add(bucket)
    assert all(len(found) == 1 for found in by_pair.values())
    assert len({bucket for (bucket,) in by_pair.values()}) == len(by_pair)  # 2^30 buckets for some pairs
    assert by_pair[0, tokens[0]] != by_pair.get((tokens[0], 0))
    # the same on every machine, in every version of numpy
    assert words.pair_buckets(np.array([3, 1, 4, 1]), 1000).tolist() == [785, 896, 561, 246]
