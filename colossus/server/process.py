"""Servers as processes of their own: started, watched and ended by who needs them. No torch.

A server is a new Python (`colossus.server.serve`), never a fork. It ends with its parent, whatever ends that one.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from colossus.server import environment

#: in which a server must have come up: torch is imported, perhaps from a slow disk by many at once
_START_SECONDS = 120.0
_KILL_SECONDS = 5.0


@dataclass(frozen=True)
class ServerSettings:
    """What a server is told; all of it can be data of JSON.

    Attributes:
        handler: ``module:name`` of a class; an object of it is made with ``options`` as keyword arguments. Its
            ``handle(request)`` is called for each `Request`, ``on_gone(worker, reason)`` when a worker has gone, and
            ``close()`` at the end, where it has the latter two.
        host: address to listen at; see `RpcServer`, as for the seconds.
        threads: of torch's operations.
        log: file to which its output is appended; None: that of the parent.
    """

    handler: str = "colossus.server.store:ShardStore"
    options: dict[str, Any] = field(default_factory=dict)
    host: str | None = None
    timeout_seconds: float = 60.0
    threads: int = 1
    log: str | None = None

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> ServerSettings:
        """Raises `ValueError` for what is no setting."""
        known = [one.name for one in fields(cls)]
        for name in settings:
            if name not in known:
                raise ValueError(f"a server has no setting {name!r}; there are {', '.join(known)}")
        made = cls(**settings)
        if made.handler.count(":") != 1:
            raise ValueError(f"handler = {made.handler!r} is not 'module:name'")
        return made


class ServerFailed(RuntimeError):
    """A server could not be started."""


class ServerProcess:
    """A server that is a child of this process.

    Attributes:
        index: of the server.
        process: its number in the system.
        failure: the error that has ended it, in words; None while there is none, or where it was killed.
    """

    def __init__(self, index: int, token: bytes, settings: ServerSettings) -> None:
        self.index = index
        self._endpoint: dict[str, Any] | None = None
        self._failure: str | None = None
        self._told = b""
        self._status, theirs = os.pipe()
        os.set_blocking(self._status, False)
        variables = dict(os.environ, OMP_NUM_THREADS=str(settings.threads))
        for name in (environment.SERVERS, environment.TOKEN):
            variables.pop(name, None)
        try:
            with contextlib.nullcontext() if settings.log is None else Path(settings.log).open("ab") as log:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "colossus.server.serve", str(theirs)],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=variables,
                    pass_fds=[theirs],
                    start_new_session=True,  # Ctrl-C and signals to the group are its parent's to answer
                )
        except BaseException:
            os.close(self._status)
            raise
        finally:
            os.close(theirs)
        self.process = self._child.pid
        # the thread that starts it may end long before this process does, which the system takes for its parent's end
        lives_long = threading.current_thread() is threading.main_thread()
        told = {"index": index, "token": token.hex(), "parent": os.getpid(), "bind": lives_long, **asdict(settings)}
        self._tell(json.dumps(told))

    def wait_until_ready(self, seconds: float = _START_SECONDS) -> None:
        """Raises `ServerFailed` when it has not come up."""
        deadline = time.monotonic() + seconds
        while self._endpoint is None and self._failure is None:
            left = deadline - time.monotonic()
            ready, _, _ = select.select([self._status], [], [], max(0.0, left))
            if not ready:
                self.kill()
                raise ServerFailed(f"server {self.index} did not come up within {seconds:g} s")
            if not self._read_status():
                break
        if self._endpoint is None:
            self.close(1.0)
            how = self._failure or f"it ended with {_exit_words(self.returncode)}"
            raise ServerFailed(f"server {self.index} could not be started: {how}")

    @property
    def endpoint(self) -> dict[str, Any]:
        assert self._endpoint is not None
        return self._endpoint

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it lives; the negative number of a signal that has killed it."""
        return self._child.poll()

    @property
    def failure(self) -> str | None:
        self._read_status()
        return self._failure

    def close(self, seconds: float = _KILL_SECONDS) -> None:
        """End it: in order, after ``seconds`` by force. Idempotent."""
        self._tell("close")
        with contextlib.suppress(OSError):
            if self._child.stdin is not None:
                self._child.stdin.close()
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._clean()

    def kill(self) -> None:
        """As a crash would."""
        self._child.send_signal(signal.SIGKILL)
        self._child.wait()
        self._clean()

    def _clean(self) -> None:
        self._read_status()
        if self._status >= 0:
            os.close(self._status)
            self._status = -1
        if self._child.stdin is not None:
            with contextlib.suppress(OSError):
                self._child.stdin.close()

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()

    def _read_status(self) -> bool:
        """Read what it says; False at the end of it."""
        while self._status >= 0:
            try:
                received = os.read(self._status, 1 << 16)
            except BlockingIOError:
                return True
            if not received:
                return False
            self._told += received
            *lines, self._told = self._told.split(b"\n")
            for line in lines:
                said = json.loads(line)
                self._endpoint = said.get("endpoint", self._endpoint)
                self._failure = said.get("failure", self._failure)
        return False

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def start_server(index: int, token: bytes, settings: Mapping[str, Any]) -> ServerProcess:
    """Start a server as a child of this process.

    Args:
        token: of the run; `environment.new_token`.
        settings: of `ServerSettings`.

    Raises:
        ServerFailed: it did not come up.
        ValueError: a setting that is none.
    """
    return start_servers([index], token, settings)[0]


def start_servers(indices: Sequence[int], token: bytes, settings: Mapping[str, Any]) -> list[ServerProcess]:
    """As `start_server`, several at once; none is left when one does not come up."""
    wanted = ServerSettings.of(settings)
    started: list[ServerProcess] = []
    try:
        for index in indices:
            started.append(ServerProcess(index, token, wanted))
        for server in started:
            server.wait_until_ready()
    except BaseException:
        for server in started:
            server.kill()
        raise
    return started


def _exit_words(code: int | None) -> str:
    if code is not None and code < 0:
        return f"signal {signal.Signals(-code).name}"
    return f"exit code {code}"
