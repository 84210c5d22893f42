"""That a save is under way is known: while ranks wait for each other, and while a large file is written."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from helpers.ranks import run_ranks

from colossus.checkpoint import messages, tensor_file
from colossus.checkpoint.messages import Messages
from colossus.context.parallel_context import ParallelContext


def _wait(context: ParallelContext, seconds: float) -> int:
    """How many signs of life a rank has heard that waited for the other one."""
    heard = []
    ours = Messages(context, lambda: heard.append(1))
    ours.begin()
    if context.rank == 1:
        time.sleep(seconds)
        ours.tell_part({})
        ours.share_outcome(None, lambda: True)
    else:
        assert list(ours.hear_parts(lambda: True)) == [{}]
        ours.share_outcome({}, lambda: True)
    return len(heard)


def test_who_waits_hears_that_the_other_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "_SIGN_EVERY", 0.2)
    waited, _ = run_ranks(2, _wait, 2.0)
    assert waited >= 3


def test_a_large_file_is_flushed_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushes: list[int] = []
    monkeypatch.setattr(tensor_file, "FLUSH_BYTES", 1000)
    monkeypatch.setattr(tensor_file, "BLOCK_BYTES", 400)
    monkeypatch.setattr(os, "fsync", lambda file: flushes.append(os.fstat(file).st_size))
    tensors = [torch.arange(500.0), torch.arange(3.0), torch.arange(500.0)]
    names = [(str(number), tensor.dtype, tuple(tensor.shape)) for number, tensor in enumerate(tensors)]
    blocks: list[int] = []
    header = tensor_file.make_header(names)
    tensor_file.write_file(tmp_path / "file", header, tensors, lambda: blocks.append(1))
    assert (tmp_path / "file").stat().st_size == header.num_bytes
    assert flushes == sorted(flushes)
    *on_the_way, last = flushes
    assert last == header.num_bytes
    assert len(on_the_way) == 3
    assert all(after - before >= 1000 for before, after in zip([0, *on_the_way], on_the_way, strict=False))
    assert len(blocks) > len(flushes)
