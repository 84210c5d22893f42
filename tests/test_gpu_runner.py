"""``scripts/test-gpu``: whatever a case does, its row says so, and the rows behind it come."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import types
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.gpu import __main__ as program  # noqa: E402
from benchmarks.gpu import signals  # noqa: E402
from benchmarks.gpu.runner import Runner  # noqa: E402
from benchmarks.gpu.section import Row, Section  # noqa: E402

PROGRAM = """
import os, signal, sys, time
import torch
from benchmarks.gpu.section import Case, LeftOut

def cases(device, budget):
    def fine():
        return {"gap": 1e-9, "budget": budget, "device": str(device)}
    def wrong():
        print("said before it failed")
        raise AssertionError("12.5 is not 13")
    def left_out():
        raise LeftOut("wants two devices")
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    def crash():
        os.kill(os.getpid(), signal.SIGSEGV)
    def leave():
        os._exit(7)
    def hang():
        if os.fork() == 0:
            time.sleep(1000)  # a rank that outlives its parent
        time.sleep(1000)
    yield Case("fine", fine)
    yield Case("wrong", wrong)
    yield Case("left out", left_out)
    yield Case("broken", broken)
    yield Case("crash", crash)
    yield Case("hang", hang, seconds=0.3)
    yield Case("leave", leave)
    yield Case("last", fine)
"""


def section_of(text: str, monkeypatch: pytest.MonkeyPatch, name: str = "planted") -> Section:
    module = types.ModuleType(name)
    exec(text, module.__dict__)
    monkeypatch.setitem(sys.modules, f"benchmarks.gpu.sections.{name}", module)
    return Section(name, name, 10, "of this test")


def rows_of(*sections: Section, folder: Path, budget: float = 60.0) -> list[Row]:
    return list(Runner("cpu", budget, folder).run(sections))


@pytest.mark.long
def test_each_way_to_fail_costs_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = section_of(PROGRAM, monkeypatch)
    rows = rows_of(section, folder=tmp_path)
    assert [(row.name, row.result) for row in rows] == [
        ("fine", "passed"),
        ("wrong", "failed"),
        ("left out", "left out"),
        ("broken", "failed"),
        ("crash", "failed"),
        ("hang", "failed"),
        ("leave", "failed"),
        ("last", "passed"),
    ]
    said = {row.name: row.detail for row in rows}
    assert said["wrong"] == "AssertionError: 12.5 is not 13"
    assert said["left out"] == "wants two devices"
    assert "illegal memory access" in said["broken"]
    assert said["crash"] == "its process was ended by SIGSEGV"
    assert said["hang"] == "did not end within 0.3 s and was killed; the log has the stacks"
    assert said["leave"] == "its process ended with exit code 7"
    assert rows[0].figures == {"gap": 1e-9, "budget": pytest.approx(60, abs=5), "device": "cpu"}
    log = (tmp_path / "planted.log").read_text()
    assert all(row.log == str(tmp_path / "planted.log") for row in rows if row.result == "failed")
    assert "said before it failed" in log
    assert "in hang" in log  # of the stacks


def test_a_section_that_cannot_begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = section_of("def cases(device, budget):\n    raise KeyError('sizes')\n", monkeypatch)
    missing = Section("missing", "no_such_module", 1, "")
    after = section_of(
        "from benchmarks.gpu.section import Case\ndef cases(d, b): return [Case('x', dict)]", monkeypatch, "y"
    )
    rows = rows_of(broken, missing, after, folder=tmp_path)
    assert [(row.section, row.name, row.result) for row in rows] == [
        ("planted", "set-up", "failed"),
        ("missing", "set-up", "failed"),
        ("y", "x", "passed"),
    ]
    assert rows[0].detail == "KeyError: 'sizes'"
    assert "No module named" in rows[1].detail
    assert "KeyError: 'sizes'" in (tmp_path / "planted.log").read_text()
    assert "no_such_module" in (tmp_path / "missing.log").read_text()


def test_what_was_done_is_written_whatever_ends_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "gpu.json"
    ended_by = []
    for error in (None, signal.SIGTERM, signal.SIGINT, OSError("the pipe is gone")):
        closed = False

        def made(error: Any = error) -> Generator[Row]:
            nonlocal closed
            try:
                assert json.loads(file.read_text())["rows"] == []  # there from the first moment on
                yield Row("plans", "late", "passed")
                yield Row("layers", "one", "failed", detail="1 is not 2")
                if isinstance(error, int):
                    os.kill(os.getpid(), error)
                elif error is not None:
                    raise error
            finally:
                closed = True

        usual = signal.getsignal(signal.SIGTERM)
        with signals.as_errors():
            if isinstance(error, OSError):
                with pytest.raises(OSError, match="the pipe"):
                    program.collect(made(), file, {"device": "cpu"})
            else:
                rows, code = program.collect(made(), file, {"device": "cpu"})
                assert (len(rows), code) == (2, 0 if error is None else 128 + error)
        assert closed
        assert signal.getsignal(signal.SIGTERM) is usual
        found = json.loads(file.read_text())
        assert [row["name"] for row in found["rows"]] == ["late", "one"]
        ended_by.append(found["ended by"])
        said = capsys.readouterr().out
        assert "1 passed, 1 failed, 0 left out" in said
        assert said.index("layers") < said.index("plans")
        file.unlink()
    assert ended_by == [None, "SIGTERM", "SIGINT", "OSError: the pipe is gone"]


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "scripts" / "test-gpu"), *arguments], capture_output=True, text=True, timeout=200, check=False,
        env={**os.environ, "INSTALL": "no", "PYTHON": sys.executable, **environment},
    )  # fmt: skip


@pytest.mark.long
def test_the_program_without_a_device(tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    done = run("--device", "cpu", "--only", "device", "--json", str(out), "--logs", str(tmp_path / "logs"))
    assert done.returncode == 0, done.stderr
    assert "nothing of this was run on a GPU: --device cpu" in done.stdout
    found: dict[str, Any] = json.loads(out.read_text())
    assert (found["passed"], found["failed"], found["left out"]) == (1, 0, 1)
    assert {row["section"] for row in found["rows"]} == {"device"}
    assert "no CUDA device" in found["rows"][0]["detail"]
