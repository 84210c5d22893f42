"""``colossus show --graph`` and ``--strategy``: peers by step and consensus; the bytes of each way that a table can
take, the choice, and the other parameters."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossus.cli.main import main

REPLICAS = """
parallel = dict(data=4, strategy=dict(type="sgp"))
train = dict(global_batch_size=24)
"""
GOLDEN = """\
graph       exponential over data 4
strategy    sgp

sends to    peer:weight, repeats after 2 steps; a replica keeps the rest of the weight
  replica  step 0  step 1
        0   1:1/2   2:1/2
        1   2:1/2   3:1/2
        2   3:1/2   0:1/2
        3   0:1/2   1:1/2

contraction 0 in 2 steps (2-norm of the product minus the mean)
eigenvalue  0 (second-largest modulus: the contraction in the long run)
consensus   exact after 2 steps, mixing alone
"""
TABLES = """
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
plan        data 4: 4 processes

parameter           shape        dense          gather          owners  way
embedding.weight    4000 x 8    192 KB  384 KB x alpha  192 KB x alpha  owners: each of 4 ranks holds its rows
few.weight          3 x 4000   72.0 KB  144 KB x alpha               -  dense: 3 rows, fewer than the 4 ranks that \
would own them
tied.weight         50 x 4000  1.20 MB               -               -  dense: tied to out (Linear), which uses \
every row
2 dense parameters  -           216 KB               -               -  dense
"""


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(REPLICAS)
    return str(path)


@pytest.fixture
def tables(tmp_path: Path) -> str:
    path = tmp_path / "words.py"
    path.write_text(TABLES)
    return str(path)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["show", *arguments]) == 0
    return capsys.readouterr().out


def test_the_graph(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, config, "--graph") == GOLDEN
    many = ["parallel.data=40", "train.global_batch_size=40", "parallel.strategy.graph=linear"]
    assert "  (the first 32 replicas and 12 steps)" in shown(capsys, config, "--graph", *many)


def test_weights_that_differ(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, config, "--graph", "parallel.strategy.graph=star", "parallel.strategy.overlap=2")
    assert "strategy    sgp, messages travel for 2 steps\n" in text
    assert "        0  1:1/4 2:1/4 3:1/4\n        1              0:1/4\n" in text
    assert "contraction 0.75 in 1 step " in text
    assert "consensus   within 1e-06 after 49 steps, mixing alone\n            within 1e-06 after 67 steps with" in text
    columns = "parallel.strategy.graph=[[0.5,0.25,0,0],[0.5,0.25,0,0.25],[0,0.5,0.5,0.5],[0,0,0.5,0.25]]"
    text = shown(capsys, config, "--graph", columns)
    assert "graph       matrices over data 4" in text
    assert "2-norm of the de-biased product minus the mean" in text
    assert "weights     become unequal" in text


def test_what_has_no_graph(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    for override, words in {
        "parallel.strategy.type=all_reduce": "--graph: strategy 'all_reduce' has no graph",
        "parallel.data=1": "--graph: a single replica (data 1)",
        "parallel.strategy.graph=[[0.5,0.25,0,0],[0.5,0.25,0,0],[0,0.5,0.5,0.5],[0,0,0.5,0.5]]": "not connected",
    }.items():
        assert main(["show", config, "--graph", override]) == 2
        assert words in capsys.readouterr().err


def test_the_ways_of_tables(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, tables, "--strategy")
    assert printed.startswith(SHOWN), printed
    assert "alpha: the fraction of a table's rows that a rank uses in a step" in printed


def test_every_strategy_says_what_it_does(tables: str, capsys: pytest.CaptureFixture[str]) -> None:
    printed = shown(capsys, tables, "--strategy", "parallel.strategy=all_reduce")
    assert "strategy    all_reduce" in printed
    assert "dense: sent whole" in printed
    assert main(["show", tables, "--strategy", "parallel.strategy=sgp"]) == 2
    assert "'embedding.weight' has sparse=True, but SGP takes dense gradients only" in capsys.readouterr().err
    model = "model = dict(type='GPT', num_layers=1, hidden_size=8, num_heads=2, vocab_size=16, seq_len=4)\n"
    Path(tables).write_text(f"parallel = dict(data=4)\ntrain = dict(global_batch_size=8)\n{model}")
    for override, name in (("parallel.strategy=diloco", "diloco"), ("parallel.zero=2", "zero = 2")):
        printed = shown(capsys, tables, "--strategy", override)
        assert f"strategy    {name}" in printed
        assert "dense parameters  -" in printed
