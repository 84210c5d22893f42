"""Servers as processes of their own: started, watched and ended by who needs them; how workers find them. No torch.

A server is a new Python (`colossus.server.rpc_server`), never a fork. It ends with its parent, whatever ends that one.
Workers learn of the servers by two environment variables, which are set by who launches them.
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

from colossus.python_process import python_words

#: a JSON list of endpoints, in the order of the servers
SERVERS = "COLOSSUS_SERVERS"
#: the key of the run, hexadecimal
TOKEN = "COLOSSUS_SERVER_TOKEN"

#: of silence, after which a server can be taken for dead at the earliest: each end gives a sign of life in a second
LEAST_TIMEOUT_SECONDS = 3.0
#: in which a server must have come up: torch is imported, perhaps from a slow disk by many at once
_START_SECONDS = 120.0
_KILL_SECONDS = 5.0


def new_token() -> bytes:
    """The key of a run, made once, by who launches it."""
    return secrets.token_bytes(32)


def write_environment(
    endpoints: Sequence[Mapping[str, Any]], token: bytes, variables: MutableMapping[str, str] = os.environ
) -> None:
    """Set both variables, for the processes that are started with this environment."""
    variables[SERVERS] = json.dumps([dict(endpoint) for endpoint in endpoints])
    variables[TOKEN] = token.hex()


def has_servers(variables: Mapping[str, str] = os.environ) -> bool:
    """Whether the variables are set."""
    return SERVERS in variables


def read_environment(variables: Mapping[str, str] = os.environ) -> tuple[list[dict[str, Any]], bytes]:
    """The endpoints of the servers, by index: dict(index, host, port, process); and the token of the run.

    Raises:
        ValueError: a variable is missing.
    """
    for name in (SERVERS, TOKEN):
        if name not in variables:
            raise ValueError(
                f"{name} is not set: `colossus launch` sets it for its workers, where it starts servers (strategy "
                "type='server')"
            )
    return json.loads(variables[SERVERS]), bytes.fromhex(variables[TOKEN])


class ServerFailed(RuntimeError):
    """A server could not be started."""


class ServerProcess:
    """A server that is a child of this process.

    Args:
        token: of the run; see `new_token`.
        host: address to listen at; see `RpcServer`, as for the seconds.
        log: file to which its output is appended; None: that of the parent.

    Attributes:
        index: of the server.
        process: its number in the system.
        endpoint: where it is, once it is ready.
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
        self.index = index
        self.endpoint: dict[str, Any] = {}
        status, theirs = os.pipe()
        self._status = os.fdopen(status, "rb")
        variables = {name: value for name, value in os.environ.items() if name not in (SERVERS, TOKEN)}
        variables["OMP_NUM_THREADS"] = "1"
        try:
            with contextlib.nullcontext() if log is None else log.open("ab") as output:
                self._child = subprocess.Popen(
                    python_words("colossus.server.rpc_server", str(theirs)),
                    stdin=subprocess.PIPE,
                    stdout=output,
                    stderr=output,
                    env=variables,
                    pass_fds=[theirs],
                    start_new_session=True,  # Ctrl-C and signals to the group are its parent's to answer
                )
        except BaseException:
            self._status.close()
            raise
        finally:
            os.close(theirs)
        self.process = self._child.pid
        settings = {"index": index, "token": token.hex(), "host": host, "timeout_seconds": timeout_seconds}
        self._tell(json.dumps(settings | {"parent": os.getpid()}))

    def wait_until_ready(self) -> None:
        """Raises `ServerFailed` when it has not come up."""
        ready, _, _ = select.select([self._status], [], [], _START_SECONDS)
        said = json.loads((ready and self._status.readline()) or b"{}")
        self._status.close()
        if "endpoint" in said:
            self.endpoint = said["endpoint"]
            return
        self.close()
        how = said.get("failure", f"it ended with exit code {self.returncode}" if ready else "it did not come up")
        raise ServerFailed(f"server {self.index} could not be started: {how}")

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    @property
    def returncode(self) -> int | None:
        """None while it lives; the negative number of a signal that has killed it."""
        return self._child.poll()

    def close(self, patience_seconds: float = 0.0) -> None:
        """End it, in order or by force. Idempotent.

        Args:
            patience_seconds: for which it waits until workers that are connected have left.
        """
        assert self._child.stdin is not None
        self._tell(str(patience_seconds))
        with contextlib.suppress(OSError):
            self._child.stdin.close()
        try:
            self._child.wait(patience_seconds + _KILL_SECONDS)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._status.close()

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self._child.stdin.write(line.encode() + b"\n")
            self._child.stdin.flush()


def start_servers(number: int, token: bytes) -> list[ServerProcess]:
    """Start servers as children of this process; none is left when one does not come up.

    Raises:
        ServerFailed: one did not come up.
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
