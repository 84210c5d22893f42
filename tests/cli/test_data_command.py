"""``colossus data``: the tree of sources, rows with their documents, preparation, and refusals."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
from helpers.documents import write_rows

from colossus.cli.main import main

CONFIG = """
model = dict(type="GPT", num_layers=1, hidden_size=16, num_heads=2, vocab_size=256, seq_len=16)
data = dict(
    type="Packed", validation_fraction=0, source=dict(type="Text", source=dict(type="Jsonl", path="x.jsonl"), end=10)
)
train = dict(steps=1, global_batch_size=1)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("c.py").write_text(CONFIG)
    write_rows(Path("x.jsonl"), [{"text": text} for text in ("twelve bytes", "abc", "a long text of 25 bytes..")])


def test_rows_are_shown_with_their_documents(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "show", "c.py", "--rows", "9"]) == 0
    tree, *rows = capsys.readouterr().out.split("\n\n")
    lines = tree.splitlines()
    assert lines[0] == "Packed best_fit (train): 3 rows of 16, 3 documents, padding 10.42%, 1 long ones cut"
    assert lines[1].startswith("  Text, tokenizer bytes: 3 documents, 43 tokens, fingerprint ")
    assert lines[2].startswith("      Jsonl x.jsonl (")
    assert [row.strip() for row in rows[:3]] == [
        "row 0: 1 documents, 16 tokens, 16 labels, 0 of padding\na long text of 2",
        "row 1: 2 documents, 14 tokens, 12 labels, 2 of padding\n5 bytes..\n|abc",
        "row 2: 1 documents, 13 tokens, 12 labels, 3 of padding\ntwelve bytes",
    ]


def test_documents_are_prepared_once_by_processes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "prepare", "c.py", "--processes", "2"]) == 0
    assert "3 documents, 43 tokens" in capsys.readouterr().out
    (prepared,) = (path for path in Path("cache/colossus/documents").iterdir() if path.is_dir())
    before = (prepared / "tokens.npy").stat().st_mtime_ns
    assert main(["data", "show", "c.py"]) == 0
    assert (prepared / "tokens.npy").stat().st_mtime_ns == before


def test_what_is_wrong_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*words: str) -> str:
        assert main(["data", *words]) == 2
        return capsys.readouterr().err

    assert "--from 3: the training data has the rows 0 to 2" in refused("show", "c.py", "--from", "3")
    assert "long='cut' or 'skip'" in refused("show", "c.py", "data.long=error")
    assert "a document of 26 tokens is longer than a row of 16" in refused("show", "c.py", "data.long=error")
    assert "x.jsonl, line 3: a document" in refused("prepare", "c.py", "data.long=error")
    with Path("x.jsonl").open("a") as file:
        file.write("{broken\n")
    assert "data: x.jsonl, line 4: it is no JSON" in refused("prepare", "c.py")
    assert "no source of documents named 'Json'. Did you mean 'Jsonl'?" in refused(
        "show", "c.py", "data.source.source.type=Json"
    )
    option = "data.source.source.skip: no such key; known keys of data.source.source: type, path"
    assert option in refused("show", "c.py", "data.source.source.skip=True")
    Path("d.py").write_text(f"{CONFIG}data = dict(type='Digits')\n")
    if find_spec("sklearn"):
        assert "rows of tokens are shown, but Digits has other samples" in refused("show", "d.py")
    assert "invalid choice: 'shew'" in refused("shew", "c.py")
