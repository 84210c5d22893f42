"""The datasets that come with colossus: text as bytes, and files of token ids."""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossus.data import PythonStdlib, TextFolder, TokenFile, TokenWindows, TooLittleData

# Windows


@given(num_tokens=st.integers(2, 200), seq_len=st.integers(1, 30))
def test_every_token_but_the_first_is_a_label_once(num_tokens: int, seq_len: int) -> None:
    tokens = np.arange(num_tokens, dtype=np.uint8)
    if num_tokens < seq_len + 1:
        with pytest.raises(TooLittleData, match=rf"has {num_tokens} tokens.*seq_len \+ 1 = {seq_len + 1}"):
            TokenWindows(tokens, seq_len, name="x")
        return
    windows = TokenWindows(tokens, seq_len, name="x")
    batch = windows.batch(np.arange(len(windows)))
    assert batch["inputs"].dtype == batch["labels"].dtype == torch.int64
    assert batch["inputs"].shape == batch["labels"].shape == (len(windows), seq_len)
    assert batch["inputs"].flatten().tolist() == list(range(len(windows) * seq_len))
    assert batch["labels"].equal(batch["inputs"] + 1)
    assert num_tokens - 1 - len(windows) * seq_len < seq_len


def test_batch_is_the_samples_stacked() -> None:
    windows = TokenWindows(np.arange(100, dtype=np.int32), 7, name="x")
    order = np.array([3, 0, 13, 3])
    batch = windows.batch(order)
    for key in ("inputs", "labels"):
        assert batch[key].equal(torch.stack([windows[int(i)][key] for i in order]))
    assert windows[-1]["inputs"].equal(windows[len(windows) - 1]["inputs"])
    with pytest.raises(IndexError, match="sample 14 of a dataset of 14"):
        windows[14]


# The standard library


@pytest.fixture(scope="module")
def stdlib() -> dict[str, PythonStdlib]:
    return {split: PythonStdlib(128, split=split) for split in ("train", "validation")}


def test_stdlib_is_the_text_of_its_files_in_order_and_holds_out_whole_ones(stdlib: dict[str, PythonStdlib]) -> None:
    train, held = stdlib["train"], stdlib["validation"]
    root = Path(sysconfig.get_path("stdlib"))
    assert held.held_out == "files"
    assert not set(train.file_names) & set(held.file_names)
    assert 0.02 < len(held.tokens) / (len(held.tokens) + len(train.tokens)) < 0.15
    assert len(held.tokens) + len(train.tokens) == 8_000_000
    assert train.vocab_size == held.vocab_size == 256
    assert held.file_names == sorted(held.file_names)
    text = b"".join((root / name).read_bytes() for name in held.file_names)
    assert bytes(held.tokens) == text[: len(held.tokens)]
    left_out = {"test", "tests", "idle_test", "site-packages", "dist-packages"}
    for name in held.file_names + train.file_names:
        assert not left_out & set(Path(name).parts)
        assert "_sysconfigdata" not in name
    assert hashlib.sha256(bytes(train.tokens)).hexdigest()[:12] in train.describe()
    assert platform.python_version() in train.describe()


# A folder


def write_files(root: Path, count: int, size: int = 400) -> dict[str, bytes]:
    out = {}
    for number in range(count):
        name = f"part{number % 3}/file{number:03}.txt"
        out[name] = (f"[{number}]".encode() * size)[:size]
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(out[name])
    return out


def test_folder_holds_out_files_and_keeps_them_when_others_come(tmp_path: Path) -> None:
    contents = write_files(tmp_path, 100)
    train, held = (TextFolder(tmp_path, 16, split=split) for split in ("train", "validation"))
    assert held.held_out == "files"
    assert sorted(train.file_names + held.file_names) == sorted(contents)
    assert bytes(held.tokens) == b"".join(contents[name] for name in held.file_names)
    assert bytes(train.tokens) == b"".join(contents[name] for name in train.file_names)
    write_files(tmp_path, 130)
    again = TextFolder(tmp_path, 16, split="validation")
    assert set(held.file_names) <= set(again.file_names)


def test_folder_errors(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("x" * 10)
    markdown = dict(path=tmp_path, pattern="*.md")
    for options, words in (
        (dict(path=tmp_path / "nowhere"), "does not exist"),
        (dict(path=tmp_path / "a.md"), "is a file, not a folder"),
        (dict(path=tmp_path), r"no file in .* matches '\*\*/\*.txt'"),
        ({**markdown, "validation_fraction": 0}, r"has 10 tokens.*= 17"),
        ({**markdown, "validation_fraction": 1.5}, r"validation_fraction = 1\.5"),
    ):
        with pytest.raises(ValueError, match=words):
            TextFolder(seq_len=16, **options)  # type: ignore[arg-type]


# Token files


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_token_file_raw_and_npy(tmp_path: Path, dtype: str) -> None:
    tokens = (np.arange(1000) % 251).astype(dtype)
    tokens.tofile(tmp_path / "a.bin")
    np.save(tmp_path / "a.npy", tokens)
    for file, said in (("a.bin", dtype), ("a.npy", None)):
        train = TokenFile(tmp_path / file, 10, dtype=said)
        held = TokenFile(tmp_path / file, 10, dtype=said, split="validation")
        assert isinstance(train.tokens, np.memmap)
        assert np.concatenate([train.tokens, held.tokens]).tolist() == tokens.tolist()
        assert len(held.tokens) == 50
        assert held[0]["inputs"].tolist() == tokens[950:960].tolist()
        assert held[0]["labels"].tolist() == tokens[951:961].tolist()


def test_token_file_checks_the_ids_it_reads(tmp_path: Path) -> None:
    np.array([1, 2, 3, 300, 4, 5], dtype=np.uint16).tofile(tmp_path / "a.bin")
    good = TokenFile(tmp_path / "a.bin", 2, validation_fraction=0, vocab_size=301)
    assert good[1]["labels"].tolist() == [300, 4]
    bad = TokenFile(tmp_path / "a.bin", 2, validation_fraction=0, vocab_size=300)
    assert bad[0]["labels"].tolist() == [2, 3]
    with pytest.raises(ValueError, match=r"token id 300, but the vocabulary has 300 .*model.vocab_size to 301"):
        bad[1]
    np.array([1, -2, 3], dtype=np.int32).tofile(tmp_path / "b.bin")
    with pytest.raises(ValueError, match="token id -2"):
        TokenFile(tmp_path / "b.bin", 2, dtype="int32", validation_fraction=0)[0]


def test_token_file_errors(tmp_path: Path) -> None:
    for name, content in (("empty", b""), ("odd", b"1234567"), ("short", b"12345678")):
        (tmp_path / name).write_bytes(content)
    np.save(tmp_path / "b.npy", np.zeros((3, 4), dtype=np.uint16))
    for name, dtype, words in (
        ("none.bin", None, "does not exist"),
        ("", None, "is a folder"),
        ("empty", None, "is empty"),
        ("odd", None, r"7 bytes, which is not a multiple of 2 \(one uint16 token\)"),
        ("short", None, r"has 4 tokens.*= 5"),
        ("short", "float32", r"has float32; tokens are integers in one dimension"),
        ("short", "nonsense", "data.dtype = 'nonsense' is no type"),
        ("b.npy", None, r"has uint16 \[3, 4\]"),
    ):
        with pytest.raises(ValueError, match=words):
            TokenFile(tmp_path / name, 4, dtype=dtype)
