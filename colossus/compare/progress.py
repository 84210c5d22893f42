"""Which run of how many, its step, and how long the rest will take: a live display, or lines where nobody watches."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from colossus.arithmetic import clock
from colossus.compare.jobs import Job
from colossus.launch import run_folder

#: seconds between two looks at a run, and between two lines where there is no terminal
_LOOK_SECONDS, _LINE_SECONDS = 1.0, 15.0


class Progress:
    """Follows the runs by the rows that they write.

    While a run goes on, standard output of this process is a file, so a stream of its own is written to.

    Args:
        total: number of runs.
        stream: a duplicate of standard output; None says nothing.
    """

    def __init__(self, total: int, stream: TextIO | None) -> None:
        self._total, self._stream = total, stream
        self._is_live = stream is not None and stream.isatty()
        self._width = len(str(total))
        self._durations: list[float] = []
        self._began = 0.0

    def skipped(self, number: int, job: Job) -> None:
        self._line(f"{self._head(number, job)}  complete already")

    def ended(self, number: int, job: Job, state: str, reason: str) -> None:
        seconds = time.monotonic() - self._began
        if state == "done":
            self._durations.append(seconds)
        told = f": {reason}" if reason else ""
        more = f"\n  what it printed: {job.output}" if state == "failed" else ""
        self._line(f"{self._head(number, job)}  {state} after {clock(seconds)}{told}{more}")

    @contextlib.contextmanager
    def of(self, number: int, job: Job, num_left: int) -> Iterator[None]:
        """Around one run, behind which so many are left."""
        self._began = time.monotonic()
        if self._stream is None:
            yield
            return
        over = threading.Event()
        live = self._make_live() if self._is_live else None
        watcher = threading.Thread(target=self._watch, args=(number, job, num_left, over, live), daemon=True)
        watcher.start()
        try:
            yield
        finally:
            over.set()
            watcher.join()

    def _make_live(self) -> Live:
        """What the launch prints meanwhile goes to its file, so nothing is redirected here."""
        console = Console(file=self._stream)
        return Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False, redirect_stderr=False)

    def _watch(self, number: int, job: Job, num_left: int, over: threading.Event, live: Live | None) -> None:
        """Until the run is over; nothing but the file's size is looked at before its ranks have begun."""
        path, steps = job.folder / run_folder.METRICS, job.config.train.steps
        before, first, last_line = size_of(path), 0, time.monotonic()
        if before:
            first = last_step(job)
        began: tuple[float, int] | None = None  # what comes before the first steps are seen is no step's
        with live or contextlib.nullcontext():
            while not over.wait(_LOOK_SECONDS):
                step = last_step(job) if size_of(path) != before else first
                if began is None and step > first:
                    began = time.monotonic(), step
                left = self._left(began, step, steps, num_left)
                text = f"{self._head(number, job)}  step {step}/{steps}{left}"
                if live is not None:
                    live.update(Text(text), refresh=True)
                elif step > first and time.monotonic() - last_line >= _LINE_SECONDS:
                    last_line = time.monotonic()
                    self._line(text)

    def _left(self, began: tuple[float, int] | None, step: int, steps: int, num_left: int) -> str:
        """Of this run and of all, once two looks have seen steps.

        Args:
            began: when steps were seen first, and how many had been done then.
        """
        now = time.monotonic()
        spent = now - self._began
        if began is None or step <= began[1]:
            return f"  {clock(spent)}"
        of_run = (now - began[0]) / (step - began[1]) * max(0, steps - step)
        whole = sum(self._durations) / len(self._durations) if self._durations else spent + of_run
        return f"  {clock(spent)}, left {clock(of_run)}, of all runs {clock(of_run + whole * num_left)}"

    def _head(self, number: int, job: Job) -> str:
        return f"run {number:>{self._width}} of {self._total}: {job.name}"

    def _line(self, text: str) -> None:
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_step(job: Job) -> int:
    """Of the last complete row of a job, 0 where there is none."""
    row = run_folder.last_metrics(job.folder)
    return int(row.get("step", 0)) if row is not None else 0
