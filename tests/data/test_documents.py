"""Sources of documents: what they read, their fingerprints, bad rows in words, and their preparation."""

from __future__ import annotations

import json
import pickle
import struct
import tarfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.documents import texts, write_rows
from helpers.tokenizer import make_tokenizer

from colossus.data.documents import encoder as documents_encoder
from colossus.data.documents import jsonl, piece_file, prepare
from colossus.data.documents.columns import HuggingFaceDataset, Parquet
from colossus.data.documents.encoder import Text
from colossus.data.documents.jsonl import Jsonl
from colossus.data.documents.packed import make_documents
from colossus.data.documents.prepare import prepared, preparing_with
from colossus.data.documents.row_source import RowSource
from colossus.data.documents.tars import WebDataset
from colossus.data.documents.text_rows import StdlibFiles, TextFiles
from colossus.data.documents.token_documents import MegatronDocuments, PreparedDocuments, TokenFileDocuments


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "colossus" / "documents"


def rows_of(source: RowSource) -> list[Any]:
    return [row for piece in source.pieces() for _, row in source.read(piece)]


def words(documents: Any) -> list[str]:
    return [bytes(ids.tolist()).decode() for ids in documents]


# -- sources ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_are_rows_with_their_numbers(tmp_path: Path, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if suffix.endswith("zst"):
        pytest.importorskip("zstandard")
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 100)
    rows = texts(40)
    lines: list[Any] = [*rows[:20], "", "  ", *rows[20:]]
    write_rows(tmp_path / f"b{suffix}", lines)
    write_rows(tmp_path / f"a{suffix}", rows[:3])
    source = Jsonl(tmp_path / f"*{suffix}")
    assert rows_of(source) == rows[:3] + rows
    assert (len(source.pieces()) > 10) == (suffix == ".jsonl")
    numbers = [number for piece in source.pieces()[1:] for number, row in source.read(piece) if row in rows[20:]]
    assert numbers[-20:] == [*range(23, 43)]


def test_damaged_and_missing_files_are_told_in_words(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "a.jsonl.gz", texts(200))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"a\.jsonl\.gz is damaged or cut off behind its line \d"):
        rows_of(Jsonl(file))
    with pytest.raises(ValueError, match=r"Jsonl: .*none.* has no file"):
        Jsonl(tmp_path / "none*.jsonl")
    with pytest.raises(ValueError, match="is a folder, not a file"):
        Jsonl(tmp_path)


def test_tables_are_rows(tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = texts(1000)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=300)
    source = Parquet(tmp_path / "a.parquet")
    assert rows_of(source) == rows
    assert [piece.line for piece in source.pieces()] == [1, 301, 601, 901]
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"b\.parquet cannot be read"):
        Parquet(tmp_path / "b.parquet").pieces()


def test_data_sets_of_hugging_face_are_rows(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = texts(700)
    whole = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": whole, "test": whole.select(range(5))}).save_to_disk(tmp_path / "set")
    assert rows_of(HuggingFaceDataset(whole)) == rows_of(HuggingFaceDataset(tmp_path / "set", "train")) == rows
    assert len(rows_of(HuggingFaceDataset(tmp_path / "set", "test"))) == 5
    with pytest.raises(ValueError, match="has the splits train, test: set split"):
        HuggingFaceDataset(tmp_path / "set")
    assert HuggingFaceDataset(whole).fingerprint != HuggingFaceDataset(whole.select(range(9))).fingerprint


def test_tars_of_webdataset_are_rows(tmp_path: Path) -> None:
    def write(members: dict[str, bytes]) -> WebDataset:
        with tarfile.open(tmp_path / "a.tar", "w") as tar:
            for name, content in members.items():
                (tmp_path / "member").write_bytes(content)
                tar.add(tmp_path / "member", name)
        return WebDataset(tmp_path / "a.tar")

    members = {"x/1.txt": b"eins", "x/1.json": b'{"n": 1}', "x/2.txt": b"zwei", "3.de.txt": b"drei"}
    rows = [{"__key__": "x/1", "txt": "eins", "json": {"n": 1}}, {"__key__": "x/2", "txt": "zwei"}]
    assert rows_of(write(members)) == [*rows, {"__key__": "3", "de.txt": "drei"}]
    assert words(make_documents(Text(write({"1.txt": b"a", "2.txt": b"bc"}), key="txt"))) == ["a", "bc"]
    assert rows_of(write({"1.jpg": b"\xff", "1.txt": b"a"})) == [{"__key__": "1", "jpg": b"\xff", "txt": "a"}]
    (bad,) = rows_of(write({"1.json": b"\xff"}))
    assert bad.kind == "broken"
    with pytest.raises(ValueError, match=r"a\.tar, row 2: 'txt' is no text in UTF-8.*skip=\['broken'\]"):
        make_documents(Text(write({"1.txt": b"a", "2.txt": b"\xff", "3.txt": b"b"}), key="txt"))
    source = write(members)
    source.files[0].write_bytes(source.files[0].read_bytes()[:700])
    with pytest.raises(ValueError, match=r"a\.tar is damaged or cut off behind its row"):
        rows_of(source)


def test_files_are_documents(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": "zwei", "sub/a.txt": "drei", "a.txt": "eins", "a.md": "nicht"}.items():
        (tmp_path / name).write_text(text)
    source = TextFiles(tmp_path)
    assert [row["text"] for row in rows_of(source)] == ["eins", "zwei", "drei"]
    assert source.place("title", 3).endswith("file sub/a.txt")
    assert sum(len(row["text"].encode()) for row in rows_of(StdlibFiles(50_000))) >= 50_000 - 3


def test_files_of_megatron_are_documents(tmp_path: Path) -> None:
    lengths = [3, 0, 5, 1]
    tokens = np.arange(9, dtype=np.int32)
    starts = np.concatenate(([0], np.cumsum(lengths)[:-1])) * 4
    head = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 4, 5)
    index = head + np.array(lengths, np.int32).tobytes() + starts.astype(np.int64).tobytes() + bytes(5 * 8)
    (tmp_path / "x.idx").write_bytes(index)
    tokens.tofile(tmp_path / "x.bin")
    documents = MegatronDocuments(tmp_path / "x")
    assert [ids.tolist() for ids in documents] == [[0, 1, 2], [], [3, 4, 5, 6, 7], [8]]
    tokens[:-1].tofile(tmp_path / "x.bin")
    with pytest.raises(ValueError, match=r"the index has 9 tokens, but .*x\.bin has 8"):
        MegatronDocuments(tmp_path / "x.bin")
    (tmp_path / "x.idx").write_bytes(b"no index")
    with pytest.raises(ValueError, match="no index of Megatron-LM"):
        MegatronDocuments(tmp_path / "x")


def test_an_end_token_cuts_a_file_of_ids(tmp_path: Path) -> None:
    np.array([5, 6, 0, 7, 0, 0, 8], np.uint16).tofile(tmp_path / "ids.bin")
    documents = TokenFileDocuments(tmp_path / "ids.bin", end=0)
    assert [ids.tolist() for ids in documents] == [[5, 6, 0], [7, 0], [0], [8]]


def test_fingerprints_follow_content_names_and_options_and_no_folder(tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
        write_rows(tmp_path / folder / "x.jsonl", texts(9))
    first, second = (Text(Jsonl(tmp_path / folder / "x.jsonl")).fingerprint for folder in "ab")
    assert first == second
    changed = [Text(Jsonl(tmp_path / "a" / "x.jsonl"), end=0), Text(Jsonl(tmp_path / "a" / "x.jsonl"), "number")]
    (tmp_path / "b" / "x.jsonl").write_bytes(
        (tmp_path / "a" / "x.jsonl").read_bytes().replace(b"document 3", b"d0cument 3")
    )
    changed.append(Text(Jsonl(tmp_path / "b" / "x.jsonl")))
    assert len({first, *(encoder.fingerprint for encoder in changed)}) == 4


# -- encoding and preparation -----------------------------------------------------------------------------------


def test_texts_become_bytes_or_ids_of_a_tokenizer_with_begin_and_end(tmp_path: Path) -> None:
    rows = texts(50)
    source = Jsonl(write_rows(tmp_path / "x.jsonl", rows))
    assert words(make_documents(source)) == [row["text"] for row in rows]
    marked = prepared(Text(source, begin=1, end=0))
    assert words(marked) == [f"\1{row['text']}\0" for row in rows]
    assert (marked.vocab_size, marked.tokens.dtype) == (0xE2 + 1, np.uint16)
    tokenizer = make_tokenizer(tmp_path / "model")
    encoded = prepared(Text(source, tokenizer=tokenizer, end="<|end|>"))
    library: Any = Text(source, tokenizer=tokenizer).library()
    assert [library.decode(ids[:-1].tolist()) for ids in encoded] == [row["text"] for row in rows]
    assert {int(ids[-1]) for ids in encoded} == {library.token_to_id("<|end|>")}
    with pytest.raises(ValueError, match=r"Text: end = '<eos>' is no token of the tokenizer"):
        Text(source, tokenizer=tokenizer, end="<eos>")


BAD: dict[str, tuple[Any, str]] = {
    "broken": ('{"text": "a', r"x\.jsonl, line 4: it is no JSON .*mend the row, or leave out .* by skip=\['broken'\]"),
    "missing": ({"txt": "a"}, r"x\.jsonl, line 4: 'text' is missing; it has 'txt'.*skip=\['missing'\]"),
    "empty": ({"text": ""}, r"x\.jsonl, line 4: 'text' is empty.*skip=\['empty'\]"),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_rows_are_told_by_file_and_line_and_left_out_only_if_asked(tmp_path: Path, kind: str) -> None:
    row, message = BAD[kind]
    rows = texts(6)
    source = Jsonl(write_rows(tmp_path / "x.jsonl", [*rows[:3], row, *rows[3:], row]))
    with pytest.raises(ValueError, match=message):
        make_documents(source)
    others = [other for other in BAD if other != kind]
    with pytest.raises(ValueError, match="line 4"):
        make_documents(Text(source, skip=others))
    documents: Any = make_documents(Text(source, skip=[kind]))
    assert (words(documents), documents.skipped) == ([row["text"] for row in rows], {kind: 2})
    assert documents.place(3).endswith("x.jsonl, line 5")
    assert len(make_documents(Text(source, skip=True))) == len(make_documents(Text(source, skip=kind))) == 6
    with pytest.raises(ValueError, match="skip has 'rest'; kinds are broken, missing, empty, chat, spans"):
        Text(source, skip=["rest"])


def test_a_preparation_that_was_stopped_goes_on(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 200)
    rows = texts(60)
    encoder = Text(Jsonl(write_rows(tmp_path / "x.jsonl", rows)))
    encoded, encode = [], piece_file.encode_piece

    def stopped(encoder: Any, piece: Any) -> Any:
        if len(encoded) == 5:
            raise KeyboardInterrupt
        encoded.append(piece)
        return encode(encoder, piece)

    monkeypatch.setattr(piece_file, "encode_piece", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepared(encoder)
    assert not (prepare.folder_of(encoder)).exists()
    monkeypatch.setattr(
        piece_file, "encode_piece", lambda *arguments: encoded.append(arguments[1]) or encode(*arguments)
    )
    documents = prepared(encoder)
    assert words(documents) == [row["text"] for row in rows]
    assert encoded == encoder.source.pieces()  # each once
    assert documents.place(59).endswith("line 60")
    assert words(prepared(encoder)) == words(documents)
    assert len(encoded) == len(encoder.source.pieces())
    assert sorted(entry.name for entry in cache.iterdir()) == [
        f"{prepare.folder_of(encoder).name}{end}" for end in ("", ".lock")
    ]


def test_several_processes_prepare_the_same(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonl, "PIECE_BYTES", 1000)
    encoder = Text(Jsonl(write_rows(tmp_path / "x.jsonl", texts(100))), end=0)
    alone = [ids.tolist() for ids in prepared(encoder)]
    (prepare.folder_of(encoder) / "documents.json").write_text("{}")  # one that cannot be read counts as none
    with preparing_with(2):
        assert [ids.tolist() for ids in prepared(encoder)] == alone
    folder = prepare.folder_of(encoder)
    by_name = PreparedDocuments(folder, "bytes")
    assert [ids.tolist() for ids in by_name] == alone
    assert by_name.place(7).endswith("x.jsonl, line 8")
    with pytest.raises(ValueError, match="its ids were made by another tokenizer"):
        PreparedDocuments(folder, make_tokenizer(tmp_path / "model"))
    about = json.loads((folder / "documents.json").read_text())
    (folder / "documents.json").write_text(json.dumps({**about, "version": 0}))
    with pytest.raises(ValueError, match="is of version 0, not 1: prepare it again"):
        PreparedDocuments(folder)
    with pytest.raises(ValueError, match=r"has no documents\.json that can be read"):
        PreparedDocuments(tmp_path)


def test_ranks_that_prepare_at_once_wait_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder, encoded, write = Text(Jsonl(write_rows(tmp_path / "x.jsonl", texts(50)))), [], prepare.write_piece
    monkeypatch.setattr(prepare, "write_piece", lambda *arguments: encoded.append(1) or write(*arguments))
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(prepared, [encoder] * 4)]
    assert len(encoded) == 1
    assert all(words(documents) == words(results[0]) for documents in results)


def test_a_cache_that_cannot_be_written_is_told_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(ValueError, match=r"documents cannot be prepared in .*set XDG_CACHE_HOME"):
        make_documents(Jsonl(write_rows(tmp_path / "x.jsonl", texts(2))))


def test_a_file_that_vanished_is_told_by_its_name_and_without_the_cache(tmp_path: Path) -> None:
    for end in (".jsonl", ".jsonl.gz"):
        source = Jsonl(write_rows(tmp_path / f"x{end}", texts(2)))
        source.files[0].unlink()
        with pytest.raises(ValueError, match=r"x\.jsonl.*(cannot be read|damaged).*No such file") as error:
            make_documents(source)
        assert "XDG" not in str(error.value)


def test_prepared_documents_are_those_of_the_versions_of_what_made_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = Jsonl(write_rows(tmp_path / "x.jsonl", texts(2)))
    encoders = Text(source), Text(source, tokenizer=make_tokenizer(tmp_path / "model"))
    before = [prepare.folder_of(encoder) for encoder in encoders]
    monkeypatch.setattr(documents_encoder, "library_version", lambda: "0.0.1")
    assert [prepare.folder_of(encoder) == folder for encoder, folder in zip(encoders, before, strict=True)] == [
        True,
        False,
    ]
    monkeypatch.setattr(prepare, "VERSION", 0)
    assert prepare.folder_of(encoders[0]) != before[0]


def test_a_file_of_ids_is_read_through_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.array([5, 6, 0, 7], np.uint16).tofile(tmp_path / "ids.bin")
    content = pickle.dumps(TokenFileDocuments(tmp_path / "ids.bin", end=0))
    monkeypatch.setattr(np, "flatnonzero", lambda *_: pytest.fail("the file is read again"))
    assert [ids.tolist() for ids in pickle.loads(content)] == [[5, 6, 0], [7]]
