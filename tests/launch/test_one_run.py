"""The ways of a value and of a failure through the code, which docs/one-run.md tells."""

from __future__ import annotations

from pathlib import Path

from helpers.launching import LAUNCH, finish, start
from helpers.page_links import calls_of_children, links
from helpers.restart_faults import CONFIG

LINKS = links("one-run", "A failure")
OF_A_VALUE = links("one-run", "A value of the config")
VALUE = """
model = dict(type="GPT", num_layers=1, hidden_size=8, num_heads=2, vocab_size=256, seq_len=8, dropout=0.1)
data = dict(type="PythonStdlib", max_bytes=20_000)
train = dict(steps=1, global_batch_size=4)
device = "cpu"
"""


def _calls(linked: list[tuple[str, str]], words: list[str], folder: Path, **environment: str) -> tuple[list[str], str]:
    """Return the linked functions that the processes of a launch call, and what it writes to stderr."""
    with calls_of_children(linked, folder / "calls"):
        launcher = start([*LAUNCH[:-1], *words, "--run-dir", "run"], folder, **environment)
    code, _, err = finish(launcher)
    assert code == 0, err
    return (folder / "calls").read_text().split(), err


def test_a_value_takes_the_way_that_the_page_tells(tmp_path: Path) -> None:
    """Up to `write_resolved` in the launcher, which builds the model on no device, too, and then in a rank."""
    (tmp_path / "own.py").write_text(VALUE)
    calls, err = _calls(OF_A_VALUE, ["own.py"], tmp_path)
    assert err == ""
    names = [name for name, _ in OF_A_VALUE]
    started = calls.index("write_resolved") + 1
    assert [name for name in dict.fromkeys(calls[:started]) if name in names[:5]] == names[:5]
    assert calls[started] == names[0]
    assert [*dict.fromkeys(calls[started + 1 :])] == names[5:]
    assert len({file for _, file in OF_A_VALUE}) <= 8


def test_a_failure_takes_the_way_that_the_page_tells(tmp_path: Path) -> None:
    words = [str(CONFIG), "train.steps=3", "--max-restarts", "1"]
    calls, err = _calls(LINKS, words, tmp_path, TROUBLES="raise@2")
    assert err.count("restart 1 of 1") == 1, err
    assert [*dict.fromkeys(calls)] == [name for name, _ in LINKS]
    assert len({file for _, file in LINKS}) <= 6
