"""The config of docs/hooks.md, launched."""

from __future__ import annotations

import csv
import json
import re
import sys
from pathlib import Path

from helpers.launching import ROOT, finish, rows_of, start

#: a model whose validation loss soon gets worse, and a run as short as can be
OWN = """
model = dict(type="GPT", num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, seq_len=8)
data = dict(type="PythonStdlib")
optimizer = dict(type="SGD", lr=1e-9)
"""
SHORTER = ["train.eval_every=1", "train.global_batch_size=4", "train.eval_batches=1"]


def test_the_example_does_what_the_page_says(tmp_path: Path) -> None:
    section = (ROOT / "docs" / "hooks.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", section, flags=re.DOTALL | re.MULTILINE)
    changed = block.replace("every=100", "every=4").replace("patience=5", "patience=5, min_delta=0.1")
    (tmp_path / "c.py").write_text(OWN + changed)
    command = [sys.executable, "-m", "colossus", "launch", "c.py", "--run-dir", "run", "parallel.data=2"]
    code, out, err = finish(start([*command, *SHORTER], tmp_path))
    assert code == 0, err
    run = tmp_path / "run"
    # the first evaluation is the best; five are no better, and one step follows
    assert "stopped early after step 7: validation_loss was no better" in out
    assert "stopped after step 7; metrics are in run/metrics.jsonl; the latest checkpoint is run/checkpoints/" in out
    assert len(rows_of(run)) == 7
    assert out.count("{'validation_loss': ") == 2 * 6  # of each rank
    with (run / "metrics.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == list("1234567")
    best = (run / "checkpoints" / "best").read_text().split()
    assert sorted(best) == sorted(path.name for path in (run / "checkpoints").glob("step-*"))
    assert len(best) == 2
    histograms = [json.loads(line) for line in (run / "histograms.jsonl").read_text().splitlines()]
    assert {row["step"] for row in histograms} == {4}
    assert {row["kind"] for row in histograms} == {"gradients", "weights"}
