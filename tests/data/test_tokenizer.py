"""Text datasets with a tokenizer of Hugging Face: the same ids as the library gives, once; errors in words."""

from __future__ import annotations

import pickle
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.tokenizer import TEXT, make_tokenizer

from colossus.data import TextFolder, build_loaders
from colossus.data.tokenizer import DatasetTokenizer, dataset_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    return tmp_path / "cache" / "colossus" / "tokens"


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(24):
        (folder / f"{number}.txt").write_bytes(TEXT.encode() * (1 + number % 3) + b"caf\xc3\xa9 \xff\xfe end")
    return folder


def of_library(path: Path, texts: list[bytes]) -> list[int]:
    library: Any = pytest.importorskip("tokenizers")
    encoder = library.Tokenizer.from_file(str(path))
    return [
        number
        for text in texts
        for number in encoder.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
    ]


def test_ids_are_those_of_the_library_file_by_file(
    tmp_path: Path, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("colossus.data.tokenizer._AT_ONCE", 5)
    tokenizer = make_tokenizer(tmp_path / "model")
    for given in (tokenizer, tokenizer.parent, str(tokenizer)):
        train, held = (TextFolder(texts, 8, split=split, tokenizer=given, validation_fraction=0.3)
                       for split in ("train", "validation"))  # fmt: skip
        for part in (train, held):
            wanted = of_library(tokenizer, [(texts / name).read_bytes() for name in part.file_names])
            assert part.tokens.tolist() == wanted
            assert part.tokens.dtype == np.uint16
            assert part.vocab_size == max(wanted) + 1 <= 300
            assert part.tokenizer == DatasetTokenizer("tokenizer.json", tokenizer.read_bytes(), tokenizer)
            assert f"tokenizer {tokenizer} ({part.tokenizer.sha256[:12]})" in part.describe()
    assert len(list(cache.iterdir())) == 2  # of either split, once
    assert set(train.file_names) & set(held.file_names) == set()
    assert pickle.loads(pickle.dumps(train)).tokens.tolist() == train.tokens.tolist()


def test_ids_are_made_once(tmp_path: Path, texts: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another text, or another tokenizer, is made anew; a damaged file is, too; no place for it is no matter."""
    tokenizer = make_tokenizer(tmp_path)
    other = make_tokenizer(tmp_path / "other", 290)
    first = TextFolder(texts, 8, tokenizer=tokenizer).tokens.tolist()
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "tokenizers", None)  # not needed for what is kept
        again = TextFolder(texts, 8, tokenizer=tokenizer)
        assert isinstance(again.tokens, np.memmap)
        assert again.tokens.tolist() == first
        with pytest.raises(ValueError, match=r"needs the library tokenizers.*pip install colossus\[hf\]"):
            TextFolder(texts, 8, tokenizer=other)
    (kept,) = cache.iterdir()
    whole = kept.read_bytes()
    zeros = whole[:60] + bytes(60) + whole[120:]
    for number, damaged in enumerate((b"", whole[:20], zeros, whole[:-10], whole.replace(b"<u2", b"<f2"))):
        kept.write_bytes(damaged)
        assert TextFolder(texts, 8, tokenizer=tokenizer).tokens.tolist() == first, number
        assert kept.read_bytes() == whole
    (texts / "0.txt").write_text("something else " * 9)
    assert TextFolder(texts, 8, tokenizer=tokenizer).tokens.tolist() != first
    assert len(list(cache.iterdir())) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(texts / "0.txt"))  # no folder
    assert len(TextFolder(texts, 8, tokenizer=tokenizer).tokens)


def test_datasets_of_users_may_say_theirs(tmp_path: Path) -> None:
    class Mine(list[Any]):
        tokenizer: Any = None

    tokenizer = make_tokenizer(tmp_path)
    other = Path(shutil.copy(tokenizer, tmp_path / "mine.json"))
    for given, name in (
        ("bytes", "bytes"),
        (tokenizer, "tokenizer.json"),
        (str(tokenizer.parent), "tokenizer.json"),
        (other, "tokenizer.json"),
        ("gpt2", None),
        (object(), None),
    ):
        data = Mine([{"inputs": [1], "labels": [2]}] * 4)
        data.tokenizer = given
        loaders = build_loaders(data, seed=0, global_batch_size=2, data_rank=0, data_size=1)
        assert (None if loaders.tokenizer is None else loaders.tokenizer.name) == name


def test_validation_data_of_other_tokens_is_refused(tmp_path: Path, texts: Path) -> None:
    tokenizer, same, other = (
        make_tokenizer(tmp_path / name, size) for name, size in (("a", 300), ("b", 300), ("c", 280))
    )

    def build(**validation: Any) -> None:
        data = dict(type="TextFolder", path=texts, tokenizer=tokenizer)
        own = dict(type="TextFolder", path=texts, split="train", **validation)
        build_loaders({**data, "validation": own}, seed=0, global_batch_size=2, data_rank=0, data_size=1, seq_len=8)

    build(tokenizer=same)
    for given, named in (({}, "bytes"), ({"tokenizer": other}, str(other))):
        with pytest.raises(
            ValueError, match=f"data.validation: its ids are of {named}, those of the training data of "
        ):
            build(**given)


def test_errors(tmp_path: Path, texts: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer = '/nowhere': No such file.*looked from"):
        dataset_tokenizer("/nowhere", "TextFolder")
    with pytest.raises(ValueError, match=r"has no tokenizer.json"):
        dataset_tokenizer(texts, "TextFolder")
    with pytest.raises(ValueError, match=r"0.txt is no tokenizer.json \(it is no JSON object\)"):
        dataset_tokenizer(texts / "0.txt", "TextFolder")
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ValueError, match=r"TextFolder '.*': tokenizer '.*' cannot be read"):
        TextFolder(texts, 8, tokenizer=tmp_path)
