"""Every command line of README.md and docs/*.md that starts with ``colossus`` does what the page says.

They run in this process, in a folder that has the repository's configs and the files and runs that the pages take for
a user's. What would take long ends early: `launch`, `compare`, `profile` and `bench` get ``--dry-run``, the others less
to do.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import torch
from helpers.hf_folders import GPT2, make_folder
from helpers.quick_measure import shorten
from helpers.tokenizer import VOCABULARY, make_tokenizer
from helpers.verified import launch_forked

import colossus
from colossus.cli.main import COMMANDS, main
from colossus.doctor import network
from colossus.verify import record
from colossus.verify import run_verify as verify

ROOT = Path(colossus.__file__).parent.parent
#: command -> words that leave it less to do
SHORTER = {
    "launch": ["--dry-run"],
    "compare": ["--dry-run"],
    "profile": ["--dry-run"],
    "bench": ["--dry-run"],
    "plan": shlex.split("--devices 4 --top 2 --keep schedule.type=1f1b sequence=1 tensor=1")
    + ["train.activation_checkpoint=none"],
    "evaluate": ["train.eval_batches=1"],
    "generate": ["--max-tokens", "2"],
    "verify": ["--steps", "1", "model.num_layers=1", "model.hidden_size=32", "model.seq_len=16", "checkpoint.every=0"],
}
#: lines that the pages show for their refusal
REFUSED = ("parallel.strategy.graph=[[0.5,0.5],[0.4,0.5]]",)
TIME = "20260101-000000"
CONFIG = """
model = dict(type="GPT", num_layers=2, hidden_size=16, num_heads=4, vocab_size=256, seq_len=16)
data = dict(type="PythonStdlib")
train = dict(steps=600, global_batch_size=8)
"""
MINE = """
from colossus.models.gpt import GPT

class Mine(GPT):
    pass

model = dict(type=Mine, num_layers=1, hidden_size=16, num_heads=2, vocab_size=256, seq_len=16)
data = dict(type="PythonStdlib", seq_len=16)
train = dict(steps=600, global_batch_size=8)
"""


def commands() -> list[str]:
    """In blocks of the pages, fenced or indented: the lines without a comment, one that goes on in the next joined."""
    documented: dict[str, None] = {}
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        if page.name == "tutorial.md":  # see test_tutorial.py
            continue
        text = page.read_text().replace("\\\n", " ")
        for is_fenced, part in zip(itertools.cycle([False, True]), text.split("```"), strict=False):
            indent = " *" if is_fenced else "    +"
            lines = re.findall(rf"^{indent}(?:\$ )?(?:\.venv/bin/)?(colossus .+)$", part, re.MULTILINE)
            documented |= dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines)
    return list(documented)


def test_there_are_commands() -> None:
    assert {shlex.split(line)[1] for line in commands()} == set(COMMANDS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the commands run."""
    here = tmp_path_factory.mktemp("commands")
    for name in ("configs", "examples"):
        (here / name).symlink_to(ROOT / name)
    for name, text in {"config.py": CONFIG, "c.py": CONFIG, "mine.py": MINE}.items():
        (here / name).write_text(text)
    (here / "books").mkdir()
    (here / "books" / "one.txt").write_text("It was a bright cold day in April, and the clocks struck.\n" * 600)
    runs = {
        "x": "config.py", "y": "config.py", "base": "config.py", f"config-{TIME}": "config.py", "mine": "mine.py",
        f"gpt_stdlib-{TIME}": "configs/gpt_stdlib.py", f"llama_stdlib-{TIME}": "configs/llama_stdlib.py",
        f"finetune-{TIME}": "configs/llama_stdlib.py",
    }  # fmt: skip
    path = list(sys.path)
    for run, file in runs.items():
        checkpoints = here / "runs" / run / "checkpoints"
        engine = colossus.initialize(
            here / file, overrides=["parallel.data=1", "parallel.tensor=1", f"checkpoint.dir={checkpoints}"]
        )
        engine.run.completed_steps = 500
        engine.checkpoints.save(background=False).wait()
        engine.close()
        row = dict(step=1, loss=5.5, grad_norm=1.0, memory_bytes=1e9, tokens=64, step_seconds=0.1)
        (here / "runs" / run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    sys.path[:] = path
    layer = torch.nn.Linear(2, 2)
    for name in ("fsdp", "one"):
        layer.zero_grad()
        with record(here / f"{name}.verify", layer, steps=1) as recording:
            layer(torch.ones(1, 2)).sum().backward()
            recording.gradients()
    make_tokenizer(make_folder(here / "models" / "gpt2", GPT2 | dict(vocab_size=VOCABULARY)))
    return here


@pytest.mark.parametrize("line", commands())
def test_a_command_of_the_pages_runs(
    line: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(network, "LARGE_BYTES", 1 << 20)
    shorten(monkeypatch)
    monkeypatch.setattr(verify, "_launch", launch_forked)
    words = shlex.split(line)[1:]
    shorter = [] if words[1:2] and Path(words[1]).suffix == ".verify" else SHORTER.get(words[0], [])
    code = main([*words, *shorter])
    out, err = capfd.readouterr()
    assert code == (2 if any(word in line for word in REFUSED) else 0), out + err
