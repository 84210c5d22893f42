"""``colossus show --memory``: the tables, the limit, and the numbers as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from colossus.cli.main import main

CONFIG = """
import torch

class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"inputs": torch.zeros(32, dtype=torch.int64), "labels": torch.zeros(32, dtype=torch.int64)}

parallel = dict(data=2, pipeline=2)
model = dict(type="GPT", num_layers=4, hidden_size=32, num_heads=2, vocab_size=64, seq_len=32)
data = Tokens()
train = dict(steps=10, global_batch_size=16)
schedule = dict(microbatches=4)
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def test_tables_limit_and_json(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config, "--memory", "--limit", "850KB"]) == 0
    head, kinds, stages = capsys.readouterr().out.split("\n\n")
    assert head.splitlines()[2].endswith("on pipeline rank 0 of 2, predicted")
    assert "850 KB: does not fit" in head
    assert "`colossus plan --memory 850KB` finds plans that fit" in head
    assert [line.split()[0] for line in kinds.splitlines()][-2:] == ["activations", "total"]
    assert len(stages.splitlines()) == 3
    assert main(["show", config, "--memory", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rank = found["ranks"][found["fullest"]]
    assert rank["total"] == sum(rank["bytes"].values())
    assert (rank["stages"], rank["in_flight"]) == ([0], 2)


def test_wrong_options(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", config, "--limit", "80GB"]) == 2
    assert "--limit and --json are options of --memory" in capsys.readouterr().err
    assert main(["show", config, "--memory", "--limit", "8x"]) == 2
    assert "--limit: '8x' is no size of memory; write 80GB" in capsys.readouterr().err
    assert main(["show", config, "--memory", "data=None"]) == 2
    assert "data: the config has none" in capsys.readouterr().err
