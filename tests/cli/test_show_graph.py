"""``colossus show --graph``: peers by step, contraction, steps to consensus."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from colossus.cli.main import main

FILE = """
parallel = dict(data=4, strategy=dict(type="sgp"))
train = dict(global_batch_size=24)
"""
GOLDEN = """\
graph       exponential over data 4
strategy    sgp

sends to    peer:weight, repeats after 2 steps; the rest is kept
  replica  step 0  step 1
        0   1:1/2   2:1/2
        1   2:1/2   3:1/2
        2   3:1/2   0:1/2
        3   0:1/2   1:1/2

contraction 0 in 2 steps (2-norm of the product minus the mean)
eigenvalue  0 (second-largest modulus: the contraction in the long run)
consensus   exact after 2 steps, mixing alone
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "small.py"
    path.write_text(FILE)
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
    assert "strategy    sgp, what is sent travels 2 steps\n" in text
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
        "parallel.data=1": "--graph: data 1 is one replica",
        "parallel.strategy.graph=[[0.5,0.25,0,0],[0.5,0.25,0,0],[0,0.5,0.5,0.5],[0,0,0.5,0.5]]": "not connected",
    }.items():
        assert main(["show", config, "--graph", override]) == 2
        assert words in capsys.readouterr().err
