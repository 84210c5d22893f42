"""The process of a section: runs its cases one after the other and tells each row through a pipe, as lines of JSON.

It is forked: the runner has imported torch, so a section starts at once. What breaks a device for good (an illegal
access, a failed assertion in a kernel) ends the process, and the runner starts another behind the case that did it.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import signals
from benchmarks.gpu.section import Case, LeftOut, Row, Section

#: exit code: the rest of the cases wants another process
BROKEN_DEVICE = 75


def start(section: Section, device: str, budget: float, skip: Collection[str], log: Path) -> tuple[int, int]:
    """Forks the process of a section: its id, which is that of its process group, and the pipe's end to read from."""
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child:
        with contextlib.suppress(OSError):  # it has done so itself
            os.setpgid(child, child)
        os.close(write)
        return child, read
    code = 1
    try:
        os.setpgid(0, 0)
        signals.forget()
        os.close(read)
        _write_to(log)
        code = _run(section, torch.device(device), budget, skip, write, log)
    except BaseException as error:
        traceback.print_exc()
        os.write(write, (json.dumps({"raised": in_a_line(error)}) + "\n").encode())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise AssertionError("not reached")


def _write_to(log: Path) -> None:
    with log.open("ab") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115  where a test had put others
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)


def _run(section: Section, device: torch.device, budget: float, skip: Collection[str], pipe: int, log: Path) -> int:
    def tell(**message: Any) -> None:
        os.write(pipe, (json.dumps(message, default=str) + "\n").encode())

    ends = time.monotonic() + budget
    module = importlib.import_module(f"benchmarks.gpu.sections.{section.module}")
    seen: set[str] = set()
    for case in module.cases(device, budget):
        if case.name in seen:
            raise ValueError(f"section {section.name!r} has two cases {case.name!r}")
        seen.add(case.name)
        if case.name in skip:
            continue
        if time.monotonic() > ends:
            tell(postponed=case.name)
            continue
        tell(begin=case.name, seconds=case.seconds)
        print(f"\n=== {section.name}: {case.name}", flush=True)
        row, broken = _row_of(section, case, log)
        tell(row=row.as_json())
        if broken:
            return BROKEN_DEVICE
    tell(end=True)
    return 0


def _row_of(section: Section, case: Case, log: Path) -> tuple[Row, bool]:
    """Its row, and whether the process cannot go on after it."""
    begin = time.perf_counter()
    broken = False
    try:
        figures = dict(case.run() or {})
        row = Row(section.name, case.name, "passed", time.perf_counter() - begin, figures)
    except LeftOut as why:
        row = Row(section.name, case.name, "left out", time.perf_counter() - begin, detail=str(why))
    except BaseException as error:
        traceback.print_exc()
        row = Row(section.name, case.name, "failed", time.perf_counter() - begin, {}, in_a_line(error), str(log))
        broken = is_lasting(error)
        error.__traceback__ = None  # what its frames hold of the device's memory is not wanted any more
    gc.collect()
    if torch.cuda.is_initialized() and not broken:
        torch.cuda.empty_cache()
    return row, broken


def is_lasting(error: BaseException) -> bool:
    """Whether the device is lost to this process: every later call would fail for the same reason. Where the error
    holds the traceback of a rank it is another process's."""
    if "Traceback (most recent call last)" in str(error):
        return False
    return "CUDA error" in str(error) or isinstance(error, getattr(torch, "AcceleratorError", ()))


_RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:: .*)?$")


def in_a_line(error: BaseException, longest: int = 600) -> str:
    """The exception and what it says. Of an error that holds the tracebacks of ranks, that of the first of them."""
    text = str(error)
    if "Traceback (most recent call last)" in text:
        rank, _, rest = text.partition("\n")
        raised = [line for line in rest.splitlines() if _RAISED.match(line)]
        if raised:
            return _shortened(f"{rank.strip('- ')}: {raised[0]}", longest)
    told = " ".join(text.split())
    place = _place_of(error)
    return _shortened(f"{type(error).__name__}: {told}" if told else f"{type(error).__name__}{place}", longest)


def _place_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {Path(frames[-1].filename).name}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""


def _shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 4]} ..."
