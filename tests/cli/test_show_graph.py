"""``colossus show --graph``: peers by step, contraction, steps to consensus, and the picture."""

from __future__ import annotations

import subprocess
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

sends to    peers 1, repeats after 2 steps; everything kept or sent has weight 1/2
  replica  step 0  step 1
        0       1       2
        1       2       3
        2       3       0
        3       0       1

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
    assert shown(capsys, "--graph", config, "parallel.strategy.peers=1") == GOLDEN


def test_weights_that_differ(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, config, "--graph", "parallel.strategy.graph=star", "parallel.strategy.overlap=2")
    assert "strategy    sgp, what is sent travels 2 steps\n" in text
    assert "        0  1:1/4 2:1/4 3:1/4\n        1              0:1/4\n" in text
    assert "contraction 0.75 in 1 step " in text
    assert "consensus   within 1e-06 after 49 steps, mixing alone\n            within 1e-06 after 67 steps with" in text
    columns = "parallel.strategy.graph=[[0.5,0.25,0,0],[0.5,0.25,0,0],[0,0.5,0.5,0.5],[0,0,0.5,0.5]]"
    assert main(["show", config, "--graph", columns]) == 2
    assert "not connected" in capsys.readouterr().err
    columns = columns.replace("0.5,0.5]]", "0.5,0.25]]").replace("0.25,0,0],[0.5", "0.25,0,0.25],[0.5")
    text = shown(capsys, config, "--graph", columns)
    assert "graph       matrices over data 4" in text
    assert "2-norm of the de-biased product minus the mean" in text
    assert "weights     become unequal" in text


def test_many(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, config, "--graph", "parallel.strategy.peers=3")
    assert "sends to    peers 3, the same in every step; everything kept or sent has weight 1/4" in text
    assert "  replica  step 0\n        0   1 2 3\n" in text
    many = ["parallel.data=40", "train.global_batch_size=40", "parallel.strategy.graph=linear"]
    text = shown(capsys, config, "--graph", *many)
    assert "  (8 more replicas and 8 more steps left out)" in text


def test_what_has_no_graph(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config, "--graph", "parallel.strategy.type=all_reduce"]) == 2
    assert "--graph: strategy 'all_reduce' has no graph" in capsys.readouterr().err
    assert main(["show", config, "--graph", "parallel.data=1"]) == 2
    assert "--graph: data 1 is one replica" in capsys.readouterr().err


def test_it_loads_no_torch(config: str) -> None:
    code = (
        "import sys; from colossus.cli.main import main; "
        f"code = main(['show', {config!r}, '--graph']); sys.exit(code or 'torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0
