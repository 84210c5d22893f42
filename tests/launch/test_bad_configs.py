"""Configs that cannot train: each is refused before a process starts, with exit code 2 and words that help."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.bad_configs import BASE, TABLE

from colossus.launch import command


@pytest.fixture
def files(tmp_path: Path) -> None:
    """Data that the configs of the table name, in the working directory."""
    Path("empty").mkdir()
    Path("empty.bin").write_bytes(b"")
    Path("odd.bin").write_bytes(bytes(33))
    Path("broken.npy").write_bytes(b"no numpy")
    Path("ids.bin").write_bytes(np.r_[np.arange(400) % 250, 300].astype("uint16").tobytes())
    Path("short.bin").write_bytes(bytes(40))
    Path("small.bin").write_bytes(bytes(2 * 49))
    np.save("table.npy", np.zeros((20, 20), dtype=np.int64))
    np.save("negative.npy", np.r_[np.arange(400) % 250, -3, np.zeros(99)].astype(np.int64))


@pytest.mark.usefixtures("no_processes", "files")
@pytest.mark.parametrize("name", TABLE)
def test_a_bad_config_is_told_before_a_process_starts(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    if name == "cuda" and torch.cuda.is_available():
        pytest.skip("CUDA is here")
    row = TABLE[name]
    Path("user.py").write_text(BASE + textwrap.dedent(row.text))
    code = command.run("user.py", row.overrides, **row.options)
    printed = capsys.readouterr()
    assert code == 2, printed
    assert printed.err.startswith("colossus: "), printed.err
    for words in row.words:
        assert words in printed.err, printed.err
    assert "Traceback" not in printed.err
    assert printed.out == ""
    assert not Path("runs").exists()


@pytest.mark.usefixtures("no_processes", "files")
@pytest.mark.parametrize(
    "text",
    [
        "",
        "data = dict(type=_Samples, count=9, high=255)",
        "data = dict(type=lambda: DataLoader(_Samples(), batch_size=8))",
        "data = dict(type='TokenFile', path='ids.bin')\nmodel['vocab_size'] = 301",
        "data = dict(type=_Samples, validation=_Samples(3))",
        "data = (x for x in [1])",
        # what a user's own data code raises is shown by the ranks, with its traceback
        "class _Bug(_Samples):\n    def __init__(self):\n        raise ValueError('mine')\ndata = dict(type=_Bug)",
        "class _Bug(_Samples):\n    def __getitem__(self, i):\n        raise OSError('mine')\ndata = dict(type=_Bug)",
        "lr_schedule = lambda progress, ratio: torch.tensor(1.0)",
        "import numpy\nlr_schedule = lambda progress, ratio: numpy.float32(1.0)",
    ],
)
def test_what_is_right_is_started(text: str) -> None:
    Path("user.py").write_text(BASE + text)
    with pytest.raises(AssertionError, match="a process would have been started"):
        command.run("user.py", [])
