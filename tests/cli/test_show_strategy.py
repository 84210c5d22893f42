"""``colossus show --strategy``: the bytes of each way that a table can take, the choice, and the other parameters."""

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
#: of embedding.weight w = 128 KB: dense 2 w 3/4 = 192 KB, gather 3 alpha w = 384 KB alpha, owners 2 alpha w 3/4
SHOWN = """\
strategy    hybrid (exact: tables by rows)
plan        data 4

parameter           shape        dense          gather          owners  way
embedding.weight    4000 x 8    192 KB  384 KB x alpha  192 KB x alpha  owners: each of 4 ranks holds its rows
few.weight          3 x 4000   72.0 KB  144 KB x alpha               -  dense: 3 rows, fewer than the 4 ranks that \
would own them
tied.weight         50 x 4000  1.20 MB               -               -  dense: tied to out (Linear), which touches \
every row
2 dense parameters  -           216 KB               -               -  dense
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
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
    assert printed.startswith(SHOWN), printed
    assert "alpha: the part of a table's rows that a rank touches in a step" in printed


def test_every_strategy_says_what_it_does(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = _show(config, capsys, "parallel.strategy=all_reduce")
    assert "strategy    all_reduce" in printed
    assert "dense: sent whole" in printed
    assert main(["show", config, "--strategy", "parallel.strategy=sgp"]) == 2
    assert "'embedding.weight' has sparse=True, but SGP takes dense gradients only" in capsys.readouterr().err
    model = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, seq_len=4)\n"
    Path(config).write_text(f"parallel = dict(data=4)\ntrain = dict(global_batch_size=8)\n{model}")
    for override, name in (("parallel.strategy=diloco", "diloco"), ("parallel.zero=2", "zero = 2")):
        printed = _show(config, capsys, override)
        assert f"strategy    {name}" in printed
        assert "dense parameters  -" in printed
