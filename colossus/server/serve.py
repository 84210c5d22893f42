"""The process of a server: ``python -m colossus.server.serve STATUS``, started by `colossus.server.process`.

It is told what it is by the first line of its standard input (so that the token is in no list of processes), says where
it is through the descriptor STATUS, and ends when it is told to, when its parent has gone, or by SIGTERM.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import resource
import select
import signal
import sys
from types import FrameType
from typing import Any

import torch

from colossus.server.local_server import LocalServer
from colossus.server.process import ServerSettings

_PR_SET_PDEATHSIG = 1
_LOOK_SECONDS = 0.5


class _Terminated(BaseException):
    pass


def _terminate(signum: int, frame: FrameType | None) -> None:
    raise _Terminated


def main() -> int:
    for ignored in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(ignored, signal.SIG_IGN)  # the run ends in order, which is its parent's to see to
    status = int(sys.argv[1])
    os.set_inheritable(status, False)
    told: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    parent = told.pop("parent")
    if told.pop("bind"):
        _end_with_parent()
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return _serve(told, parent, status)
    except _Terminated:
        return 128 + signal.SIGTERM
    except Exception as error:
        _say(status, {"failure": f"{type(error).__name__}: {error}"})
        logging.getLogger("colossus.server").exception("server %s could not be started", told.get("index"))
        return 1


def _serve(told: dict[str, Any], parent: int, status: int) -> int:
    with contextlib.suppress(OSError, ValueError):  # each connection is a file
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    index, token = told.pop("index"), bytes.fromhex(told.pop("token"))
    logging.basicConfig(format=f"server {index}: %(message)s")
    settings = ServerSettings.of(told)
    torch.set_num_threads(settings.threads)
    wake_read, wake_write = os.pipe()
    server = LocalServer(index, token, settings, lambda: os.write(wake_write, b"f"))
    _say(status, {"endpoint": server.endpoint})
    try:
        while server.failure is None and os.getppid() == parent:
            ready, _, _ = select.select([sys.stdin, wake_read], [], [], _LOOK_SECONDS)
            if sys.stdin in ready:  # it says close, or is closed
                break
    finally:
        if server.failure is not None:
            _say(status, {"failure": server.failure})
        server.close()
    return 0 if server.failure is None else 1


def _end_with_parent() -> None:
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _say(status: int, what: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        os.write(status, json.dumps(what).encode() + b"\n")


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)  # threads of torch need no farewell
