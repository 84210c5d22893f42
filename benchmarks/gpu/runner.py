"""Runs sections one after the other, each in a process of its own, with a time-out for every case."""

from __future__ import annotations

import json
import os
import select
import signal
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import child
from benchmarks.gpu.section import Row, Section

#: for what a section does before its first case: imports, references
SET_UP_SECONDS = 120.0
#: after which a silent process is looked at: ranks that outlive it hold its end of the pipe open
LOOK_SECONDS = 0.5
#: in which the stacks of what hangs are written
DUMP_SECONDS = 3.0


class Runner:
    """Yields rows as they come.

    Cases for which a section has no time left come again when all sections are through, if there is time then.

    Args:
        budget: seconds for all sections. A section has its share of what is left; what runs at the end is ended.
        logs: folder with a file for each section.
    """

    def __init__(self, device: str, budget: float, logs: Path) -> None:
        self.device, self.budget, self.logs = device, budget, logs
        self.ends = time.monotonic() + budget
        #: names of cases, by section
        self._done: dict[str, set[str]] = defaultdict(set)
        self._postponed: dict[str, list[str]] = defaultdict(list)

    def run(self, sections: Sequence[Section]) -> Generator[Row]:
        yield from self._run_all(sections)
        late = [section for section in sections if self._postponed[section.name]]
        if late and self.ends > time.monotonic():
            yield from self._run_all(late)
        for section in sections:
            for name in self._postponed[section.name]:
                yield self._out_of_time(section, name)

    def _run_all(self, sections: Sequence[Section]) -> Iterator[Row]:
        for index, section in enumerate(sections):
            left = self.ends - time.monotonic()
            if left <= 0:
                if not self._postponed[section.name]:
                    yield self._out_of_time(section, "all")
                continue
            share = section.seconds / sum(later.seconds for later in sections[index:])
            yield from self._run_section(section, time.monotonic() + left * share)

    def _out_of_time(self, section: Section, name: str) -> Row:
        return Row(section.name, name, "left out", detail=f"no time in {self.budget:g} s; give more with --budget")

    def _run_section(self, section: Section, ends: float) -> Iterator[Row]:
        log = self.logs / f"{section.name}.log"
        done, postponed = self._done[section.name], self._postponed[section.name]
        while True:
            process, pipe = child.start(section, self.device, max(ends - time.monotonic(), 0.0), done, log)
            told = _Told(process, pipe)
            postponed.clear()
            try:
                for row in told.rows(self.ends):
                    done.add(row.name)
                    yield row
            finally:
                told.close()
            postponed.extend(told.postponed)
            if told.is_complete:
                return
            if told.exit_code == child.BROKEN_DEVICE:
                continue
            name = told.begun or "set-up"
            if told.is_cut_off:
                yield self._out_of_time(section, f"{name}, and what follows")
                return
            yield Row(section.name, name, "failed", told.waited, {}, told.raised or told.end_in_words(), str(log))
            if told.begun is None:
                return
            done.add(told.begun)


class _Told:
    """What the process of a section tells, until it ends, hangs or has used up the time.

    Attributes:
        begun: the case that it is in.
        postponed: the cases for which there was no time.
        is_complete: it was through with all cases.
        is_cut_off: the time of all sections was over.
        raised: what it has raised outside of its cases.
        exit_code: when it has ended: negative is the number of a signal.
    """

    def __init__(self, process: int, pipe: int) -> None:
        self.process, self.pipe = process, pipe
        self.begun: str | None = None
        self.postponed: list[str] = []
        self.is_complete = False
        self.exit_code: int | None = None
        self.raised: str | None = None
        self.since = time.monotonic()
        self.allowed = SET_UP_SECONDS
        self.waited = 0.0
        self.is_cut_off = self._is_hung = False

    def rows(self, ends: float) -> Iterator[Row]:
        text = b""
        while True:
            now = time.monotonic()
            limit = min(self.since + self.allowed, ends)
            if now >= limit:
                self._is_hung, self.is_cut_off = limit < ends, limit >= ends
                self.waited = now - self.since
                return
            if not select.select([self.pipe], [], [], min(limit - now, LOOK_SECONDS))[0]:
                if self._has_ended():
                    self.waited = now - self.since
                    return
                continue
            read = os.read(self.pipe, 1 << 16)
            if not read:
                self.waited = time.monotonic() - self.since
                return
            *lines, text = (text + read).split(b"\n")
            for line in lines:
                row = self._take(json.loads(line))
                if row is not None:
                    yield row

    def _take(self, message: dict[str, Any]) -> Row | None:
        self.since = time.monotonic()
        self.raised = message.get("raised", self.raised)
        if "begin" in message:
            self.begun, self.allowed = message["begin"], message["seconds"]
        elif "row" in message:
            self.begun, self.allowed = None, SET_UP_SECONDS
            return Row(**message["row"])
        elif "postponed" in message:
            self.postponed.append(message["postponed"])
        elif "end" in message:
            self.is_complete = True
        return None

    def _has_ended(self) -> bool:
        return os.waitid(os.P_PID, self.process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def close(self) -> None:
        """Ends the process and those that it started; what hangs writes its stacks first."""
        try:
            if self._is_hung or self.is_cut_off:
                os.killpg(self.process, signal.SIGUSR1)
                time.sleep(DUMP_SECONDS)
            os.killpg(self.process, signal.SIGKILL)
        except ProcessLookupError:
            pass  # gone with all that it had started
        os.close(self.pipe)
        self.exit_code = os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])

    def end_in_words(self) -> str:
        if self._is_hung:
            return f"did not end within {self.allowed:g} s and was killed; the log has the stacks"
        if self.exit_code is not None and self.exit_code < 0:
            return f"its process was ended by {signal.Signals(-self.exit_code).name}"
        return f"its process ended with exit code {self.exit_code}"
