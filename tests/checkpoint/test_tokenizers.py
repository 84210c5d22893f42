"""The tokenizer of a run is in each of its checkpoints, checked like all of its files."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks
from helpers.tokenizer import TEXT, make_tokenizer

import colossus
from colossus.checkpoint.errors import DamagedCheckpoint
from colossus.checkpoint.folder import checkpoint_steps, locate
from colossus.checkpoint.manifest import read_manifest
from colossus.checkpoint.reader import CheckpointReader
from colossus.cli.main import main

MODEL: dict[str, Any] = dict(type="GPT", num_layers=1, hidden_size=8, num_heads=2, vocab_size=300, seq_len=8)


def train(rank: int, dir: Path, data: dict[str, Any], steps: int, tokenizer: Path | None, world: int) -> None:
    engine = colossus.initialize(
        dict(
            parallel=dict(data=world),
            model=MODEL,
            data=data,
            train=dict(global_batch_size=2),
            checkpoint=dict(dir=str(dir), keep_last=2),
            device="cpu",
        )
    )
    for _ in range(steps):
        engine.train_step(next(iter(engine.loader)))
        if tokenizer is not None:
            tokenizer.unlink(missing_ok=True)  # what was read when the run began is what counts
        engine.checkpoints.save().wait()
    engine.close()


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    folder = tmp_path / "text"
    folder.mkdir()
    (folder / "a.txt").write_text(TEXT * 40)
    return folder


def test_each_checkpoint_holds_the_file(text: Path, tmp_path: Path) -> None:
    path = make_tokenizer(tmp_path / "hf")
    content, runs = path.read_bytes(), tmp_path / "runs"
    data = dict(type="TextFolder", path=str(text), tokenizer=str(path.parent))
    run_ranks(2, train, runs, data, 3, path, 2, with_context=False)
    assert [*checkpoint_steps(runs).values()] == [2, 3]
    for folder in checkpoint_steps(runs):
        manifest = read_manifest(folder)
        assert manifest.tokenizer == "tokenizer.json"
        assert (folder / "tokenizer.json").read_bytes() == content
        assert manifest.files["tokenizer.json"].crc32 == zlib.crc32(content)
    latest = locate(runs)
    assert main(["checkpoint", "convert", str(runs), str(tmp_path / "colossus"), "--to", "colossus"]) == 0
    assert (tmp_path / "colossus" / "tokenizer.json").read_bytes() == content
    assert read_manifest(tmp_path / "colossus").tokenizer == "tokenizer.json"

    # damaged, it is as any other file: told, and passed over
    (latest / "tokenizer.json").write_bytes(b"[" + content[1:])
    with CheckpointReader(latest) as reader, pytest.raises(DamagedCheckpoint, match=r"tokenizer\.json is corrupted"):
        reader.verify()
    (latest / "tokenizer.json").unlink()
    assert locate(runs).name == "step-00000002"
