"""The commands of docs/tutorial.md pass one after the other, as a reader types them, for fewer steps."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

import pytest
from helpers.launching import finish, rows_of, start

ROOT = Path(__file__).parents[2]
SHORTER = {
    "train.steps=100": "train.steps=2",
    "train.steps=150": "train.steps=3",
    "steps=100": "steps=2",
    "steps=10 ": "steps=2 ",
}


@pytest.mark.long
def test_the_tutorial_runs_from_its_first_command_to_its_last(tmp_path: Path) -> None:
    (tmp_path / "configs").mkdir()
    config = (ROOT / "configs" / "gpt_stdlib.py").read_text()
    (tmp_path / "configs" / "gpt_stdlib.py").write_text(config.replace("eval_batches=90", "eval_batches=1"))
    text = (ROOT / "docs" / "tutorial.md").read_text().split("## Train", 1)[1]  # what precedes installs
    for long, short in SHORTER.items():
        assert long in text
        text = text.replace(long, short)
    outputs = []
    for kind, body in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if kind == "python" and (named := re.match(r"# (\w+\.py)\n", body)):
            (tmp_path / named[1]).write_text(body)
        for line in body.splitlines() if kind == "" else ():
            program, *words = shlex.split(line)
            assert program == "colossus"
            words += ["--dry-run"] if words[0] == "compare" else []  # test_compare.py runs it
            code, out, err = finish(start([sys.executable, "-m", "colossus", *words], tmp_path))
            assert code == 0, f"{line}\n{out}{err}"
            outputs.append(out)
    verified, resumed = outputs[7], outputs[8]
    first, grid = ([row["loss"] for row in rows_of(tmp_path / "runs" / run)] for run in ("first", "grid"))
    assert max(abs(loss - other) for loss, other in zip(first, grid, strict=False)) < 1e-5
    assert "AGREE" in verified
    assert "saved under data 2 x tensor 2" in resumed
