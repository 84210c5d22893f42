"""``colossus show --lr``: the learning rate and the batch of each step, as numbers, as a chart and in a file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from colossus.cli.main import main

CONFIG = """
model = dict(type="GPT", num_layers=1, hidden_size=16, num_heads=2, vocab_size=256, seq_len=8)
optimizer = dict(type="AdamW", lr=2e-3)
lr_schedule = dict(type="wsd", warmup_steps=10, decay=0.5)
schedule = dict(microbatches=4)
train = dict(steps=100, global_batch_size=16, batch_ramp=dict(start=4, steps=30))
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "rates.py"
    path.write_text(CONFIG)
    return str(path)


def test_the_numbers_and_the_charts(config: str) -> None:
    code = (
        f"import sys; from colossus.cli.main import main; code = main(['show', {config!r}, '--lr', 'train.steps=80'])\n"
        "sys.exit(code or ('torch is loaded' if {'torch', 'matplotlib'} & sys.modules.keys() else 0))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    head, rate, batch = run.stdout.split("\n\n")
    assert head.splitlines() == [
        "rates",
        "schedule       wsd, warmup_steps 10, decay 0.5",
        "learning rate  0.0002 in step 1, at most 0.002 (step 10), 5e-05 in step 80",
        "batch          4 sequences, 16 from step 31 on",
        "in all         80 steps, 1,040 sequences, 8,320 tokens",  # 10 x (4 + 8 + 12) + 50 x 16
    ]
    assert "learning rate" in rate
    assert "batch (sequences)" in batch


def test_a_picture(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'plot' is not installed")
    path = tmp_path / "out.svg"
    assert main(["show", config, "--lr", str(path)]) == 0
    assert capsys.readouterr().out.endswith(f"drawn in {path}\n")
    assert path.read_bytes().startswith(b"<?xml")
    assert main(["show", config, "--lr", str(tmp_path / "out.gif")]) == 2
    assert "colossus: --lr: " in capsys.readouterr().err
