"""Servers as processes: how they are started, watched and ended, and how workers find them. No torch.

A server is a new Python process (`colossus.server.rpc_server`), never a fork. It ends when its parent ends, for
whatever reason. The launcher sets two environment variables, from which workers learn the servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from colossus.python_process import kill_with_children, start_python

#: a JSON list of endpoints, in the order of the servers
SERVERS = "COLOSSUS_SERVERS"
#: the key of the run, hexadecimal
TOKEN = "COLOSSUS_SERVER_TOKEN"

#: shortest silence after which a server counts as dead: each end sends a sign of life within a second
LEAST_TIMEOUT_SECONDS = 3.0
#: longest start of a server, which imports torch, perhaps from a slow disk beside many others
_START_SECONDS = 120.0
_KILL_SECONDS = 5.0


def new_token() -> bytes:
    """Return a new key of a run; the launcher makes one."""
    return secrets.token_bytes(32)


def write_environment(
    endpoints: Sequence[Mapping[str, Any]], token: bytes, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Set both variables for the processes that are started with this environment."""
    variables[SERVERS] = json.dumps([dict(endpoint) for endpoint in endpoints])
    variables[TOKEN] = token.hex()


def has_servers(variables: Mapping[str, str] = os.environ) -> bool:
    """Return whether the variables are set."""
    return SERVERS in variables


def read_environment(variables: Mapping[str, str] = os.environ) -> tuple[list[dict[str, Any]], bytes]:
    """Return the endpoints of the servers by index, dict(index, host, port, process), and the token of the run.

    Raises:
        ValueError: if a variable is missing.
    """
    for name in (SERVERS, TOKEN):
        if name not in variables:
            raise ValueError(
                f"{name} is not set: `colossus launch` sets it for its workers if it starts servers (strategy "
                "type='server')"
            )
    return json.loads(variables[SERVERS]), bytes.fromhex(variables[TOKEN])


class ServerFailed(RuntimeError):
    """A server could not be started."""


class ServerProcess:
    """A server that is a child of this process.

    Args:
        index: index of the server.
        token: key of the run; see `new_token`.
        host: address to listen at; see `RpcServer`.
        timeout_seconds: see `RpcServer`.
        log: file to which its output is appended; None: the output of the parent.

    Attributes:
        index: index of the server.
        process: process id.
        log: the file of its output, if it has one.
        endpoint: its endpoint, once it is ready.
    """

    def __init__(
        self,
        index: int,
        token: bytes,
        *,
        host: str | None = None,
        timeout_seconds: float = 60.0,
        log: Path | None = None,
    ) -> None:
        self.index, self.log = index, log
        self.endpoint: dict[str, Any] = {}
        status, status_of_child = os.pipe()
        self._status = os.fdopen(status, "rb")
        variables = {name: value for name, value in os.environ.items() if name not in (SERVERS, TOKEN)}
        variables["OMP_NUM_THREADS"] = "1"
        try:
            with contextlib.nullcontext() if log is None else log.open("ab") as output:
                self._child = start_python(
                    "colossus.server.rpc_server", str(status_of_child), stdin=subprocess.PIPE, stdout=output,
                    stderr=output, env=variables, pass_fds=[status_of_child],
                )  # fmt: skip
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(status_of_child)
        self.process = self._child.pid
        settings = {"index": index, "token": token.hex(), "host": host, "timeout_seconds": timeout_seconds}
        self._write_line(json.dumps(settings | {"parent": os.getpid()}))

    def wait_until_ready(self) -> None:
        """Wait until the server is ready; raise `ServerFailed` if it does not start."""
        ready, _, _ = select.select([self._status], [], [], _START_SECONDS)
        status = json.loads((ready and self._status.readline()) or b"{}")
        self._status.close()
        if "endpoint" in status:
            self.endpoint = status["endpoint"]
            return
        self.close()
        how = status.get("failure", f"it ended with exit code {self.returncode}" if ready else "it did not come up")
        raise ServerFailed(f"server {self.index} could not be started: {how}")

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def returncode(self) -> int | None:
        """Exit code, None while it lives; the negative number of a signal that has killed it."""
        return self._child.poll()

    def close(self, patience_seconds: float = 0.0) -> None:
        """End the server, in order or by force. Idempotent.

        Args:
            patience_seconds: longest wait until connected workers have left.
        """
        assert self._child.stdin is not None
        self._write_line(str(patience_seconds))
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(patience_seconds + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            kill_with_children(self._child)
        self._status.close()

    def _write_line(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()


def start_servers(number: int, token: bytes) -> list[ServerProcess]:
    """Start servers as children of this process. If one does not start, all are ended.

    Raises:
        ServerFailed: if one does not start.
    """
    started: list[ServerProcess] = []
    try:
        started.extend(ServerProcess(index, token) for index in range(number))
        for server in started:
            server.wait_until_ready()
    except BaseException:
        for server in started:
            server.close()
        raise
    return started
