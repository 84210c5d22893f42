"""Tests in several processes, forked from the one that has collected them: ``pytest --workers 3``.

What is imported and collected once, no worker imports again. A file is run by one worker, for what its tests share.
"""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
from helpers import forked_from

#: of the cache: the seconds of each file, for which the longest begin first
_SECONDS = "workers/seconds"


class _Sender:
    """A plugin of a worker that sends its reports."""

    def __init__(self, config: pytest.Config, pipe: Connection) -> None:
        self._config, self._pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._pipe.send(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def run(session: pytest.Session, number: int) -> bool:
    """Run the collected tests in so many workers; what they report, plugins of this process see."""
    config, cache = session.config, getattr(session.config, "cache", None)
    files: dict[str, list[pytest.Item]] = {}
    for item in session.items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    before = cache.get(_SECONDS, {}) if cache else {}
    #: files that nobody runs yet, and their first test to run
    waiting = [(file, 0) for file in sorted(files, key=lambda file: (before.get(file, 0.0), len(files[file])))]
    seconds: Counter[str] = Counter()
    #: the pipe of each worker, its id, and the test that it runs: a file and its index there
    workers: dict[Connection, tuple[int, tuple[str, int] | None]] = {}

    def start() -> None:
        here, there = Pipe()
        pid = os.fork()
        if not pid:
            code = 1
            try:
                here.close()
                _work(session, files, there)
                code = 0
            finally:
                os._exit(code)
        there.close()
        workers[here] = pid, None

    def hear(pipe: Connection) -> None:
        pid, running = workers[pipe]
        try:
            message = pipe.recv()
        except EOFError:
            del workers[pipe]
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if running is not None and code:
                file, index = running
                item, words = files[file][index], f"the worker has died, with exit code {code}"
                died = pytest.TestReport(item.nodeid, item.location, {}, "failed", words, "call")
                config.hook.pytest_runtest_logreport(report=died)
                waiting.append((file, index + 1))
                start()
            return
        if message is None:
            pipe.send(waiting.pop() if waiting and not session.shouldfail else None)
            workers[pipe] = pid, None
        elif isinstance(message, tuple):
            workers[pipe] = pid, message
        else:
            report: Any = config.hook.pytest_report_from_serializable(config=config, data=message)
            seconds[report.nodeid.partition("::")[0]] += report.duration
            config.hook.pytest_runtest_logreport(report=report)

    for _ in range(min(number, len(files))):
        start()
    while workers:
        for pipe in wait([*workers]):
            assert isinstance(pipe, Connection)
            hear(pipe)
    if cache and not session.shouldfail:
        cache.set(_SECONDS, {**before, **seconds})
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    return True


def _work(session: pytest.Session, files: dict[str, list[pytest.Item]], pipe: Connection) -> None:
    """Run a file after the other, as long as there are any."""
    config = session.config
    forked_from.make_pages_huge()
    reporter, capture = (config.pluginmanager.getplugin(name) for name in ("terminalreporter", "capturemanager"))
    reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115
    capture.stop_global_capturing()  # into files that all workers have
    capture.start_global_capturing()
    config.pluginmanager.register(_Sender(config, pipe))
    pipe.send(None)
    while (task := pipe.recv()) is not None:
        file, first = task
        items = [*files[file], None]
        for index in range(first, len(items) - 1):
            pipe.send((file, index))
            config.hook.pytest_runtest_protocol(item=items[index], nextitem=items[index + 1])
            if session.shouldfail:
                return
        pipe.send(None)
