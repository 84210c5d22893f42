"""``colossus show --strategy``: each table's alpha, the bytes of each way, the choice, and what it is beside others."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossus.cli.main import main

FILE = """
import torch
from torch import nn
from colossus import layers

class _Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(4000, 8, sparse=True)
        self.few = nn.Embedding(3, 4000, sparse=True)
        self.tied = nn.Embedding(50, 4000, sparse=True)
        self.out = nn.Linear(4000, 50, bias=False)
        self.out.weight = self.tied.weight
        self.linear = nn.Linear(8, 4000)
    def forward(self, ids):
        return self.out(self.linear(self.embedding(ids)) + self.few(ids % 2) + self.tied(ids % 50))
    def loss(self, y, batch):
        return y.sum(), y.shape[0]

name = "words"
parallel = dict(data=4, strategy="hybrid")
model = _Words
# each rank has 2 samples of 5 ids, of which neighbours share one
data = [torch.arange(number, number + 5) * 7 for number in range(0, 32, 4)]
optimizer = dict(type="SGD", lr=0.1)
train = dict(global_batch_size=8)
"""
HEAD = """\
strategy    hybrid (exact: tables by rows)
            Exact. Dense gradients are all-reduced in buckets; tables (sparse=True) are held and updated by
            ranks that own their rows, which sends the fewest bytes, after Parallax (1808.02621).
plan        data 4
bytes       that a rank sends in a step; rows alone, without their ids
"""
#: of embedding.weight w = 128 KB, dense 2 w 3/4 = 192 KB, gather 3 alpha w; few.weight has fewer rows than ranks, and
#: no integer of a batch is one of them
TABLE = """\
parameter           shape      on a rank  alpha             dense  gather  owners  way
embedding.weight    4000 x 8   1000 x 8   0.0025 (batch)   192 KB   960 B   480 B  owners
few.weight          3 x 4000   3 x 4000   unknown         72.0 KB  144 KB       -  dense
tied.weight         50 x 4000  50 x 4000  1 (tied)        1.20 MB       -       -  dense
2 dense parameters  -          144 KB     -                216 KB       -       -  dense

in all
  this plan                              1.49 MB
  all dense (all_reduce, DDP)            1.68 MB  x 1.13
  rows gathered (DDP with sparse=True)   1.56 MB  x 1.05
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "words.py"
    path.write_text(FILE)
    return str(path)


def _show(config: str, capsys: pytest.CaptureFixture[str], *overrides: str) -> str:
    code = main(["show", config, "--strategy", *overrides])
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


def test_the_ways_of_tables(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _show(config, capsys)
    assert printed.startswith(HEAD + "\n" + TABLE), printed
    assert "tied.weight: dense: tied to out (Linear), which touches every row" in printed
    assert "few.weight: dense: 3 rows, fewer than the 4 ranks that would own them" in printed
    assert "here the different integers of the first batch" in printed
    assert "an unknown alpha is taken for 1" in printed


def test_every_strategy_says_what_it_does(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _show(config, capsys, "parallel.strategy=all_reduce")
    assert "strategy    all_reduce" in printed
    assert "embedding.weight: dense: hybrid: owners" in printed
    assert main(["show", config, "--strategy", "parallel.strategy=sgp"]) == 2
    assert "'embedding.weight' has sparse=True, but SGP takes dense gradients only" in capsys.readouterr().err
    model = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, seq_len=4)\n"
    Path(config).write_text(f"parallel = dict(data=4)\ntrain = dict(global_batch_size=8)\n{model}")
    for override, name in (("parallel.strategy=diloco", "diloco"), ("parallel.zero=2", "zero = 2")):
        printed = _show(config, capsys, override)
        assert f"strategy    {name}" in printed
        assert "dense parameters, " in printed
