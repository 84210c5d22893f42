"""Linux namespaces: new ones for a first process, and processes started in those that another one has.

Nothing here has a name in the file system. Namespaces live as long as a process is in them, so they are gone with
their processes, however these end. Needs root.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOUNTS, NAMES, IPC, PROCESSES, NETWORK = 0x00020000, 0x04000000, 0x08000000, 0x20000000, 0x40000000
"""Flags of clone(2). NAMES: the host name."""

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")


@dataclass(frozen=True)
class Namespaces:
    """The namespaces of a process.

    Attributes:
        pid: of the process, as the caller sees it.
        flags: which of them are its own.
    """

    pid: int
    flags: int

    def fork(self) -> int:
        """`os.fork`, the child in these namespaces."""
        with self._forking() as enter:
            pid = os.fork()
            if pid == 0:
                try:
                    enter()
                except BaseException:
                    os._exit(1)
        return pid

    @contextlib.contextmanager
    def _forking(self) -> Iterator[Callable[[], None]]:
        """Let what this thread forks be in the process namespace; it calls what is yielded to enter the others.

        The working directory stays. Threads cannot be started meanwhile.
        """
        pidfd = os.pidfd_open(self.pid)
        rest = self.flags & ~PROCESSES

        def enter() -> None:
            folder = os.getcwd()
            _call("setns", pidfd, rest)
            os.chdir(folder)

        try:
            if self.flags & PROCESSES:
                _call("setns", pidfd, PROCESSES)
            yield enter
        finally:
            _own_processes()
            os.close(pidfd)

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program in these namespaces; ``options`` are those of `subprocess.Popen`."""
        with self._forking() as enter:

            def begin() -> None:
                enter()
                _usual_signals()

            return subprocess.Popen(list(words), preexec_fn=begin, **options)

    def run(self, words: Sequence[str], text: str = "") -> str:
        """Return what a program in these namespaces prints.

        Raises:
            RuntimeError: with what it said, when it fails.
        """
        process = self.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        out, err = process.communicate(text)
        if process.returncode:
            raise RuntimeError(f"{' '.join(words)}: {(err or out).strip() or f'exit code {process.returncode}'}")
        return str(out)

    @property
    def network(self) -> Namespaces:
        """Return the network alone, for programs that name processes as the caller does."""
        return Namespaces(self.pid, NETWORK)

    def bytes_moved(self, interface: str) -> tuple[int, int]:
        """Return the bytes received and sent through an interface so far, headers of Ethernet, IP and TCP included."""
        for line in Path(f"/proc/{self.pid}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == interface:
                counts = numbers.split()
                return int(counts[0]), int(counts[8])
        raise RuntimeError(f"process {self.pid} has no interface {interface}")


@contextlib.contextmanager
def new(flags: int, setup: str) -> Iterator[Namespaces]:
    """Make namespaces, with a first process that does nothing; all processes in them end with the block.

    They also end when the thread that is in the block dies of anything, SIGKILL included.

    Args:
        setup: commands of sh, run in them before the block.

    Raises:
        RuntimeError: with what ``setup`` said, when it fails.
    """

    def begin() -> None:
        _call("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL)
        _call("unshare", flags & ~PROCESSES)
        os.setsid()  # Ctrl-C is not for it

    # processes whose parent has gone become the first process's children: its `wait` takes their ends
    script = f"set -e; {setup}\necho ready; sleep infinity & wait"
    assert flags & PROCESSES, "without a process namespace they would outlive their first process"
    _call("unshare", PROCESSES)
    try:
        first = subprocess.Popen(
            ["sh", "-c", script],
            preexec_fn=begin, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        _own_processes()
    assert first.stdout is not None
    assert first.stderr is not None
    try:
        if first.stdout.readline() != "ready\n":
            raise RuntimeError(f"a namespace could not be set up: {first.stderr.read().strip()}")
        yield Namespaces(first.pid, flags)
    finally:
        first.kill()  # the first process of a process namespace: all others go with it
        first.wait()
        first.stdout.close()
        first.stderr.close()


def _own_processes() -> None:
    """Let what this thread forks be in its own process namespace again."""
    own = os.open("/proc/self/ns/pid", os.O_RDONLY)
    try:
        _call("setns", own, PROCESSES)
    finally:
        os.close(own)


def _usual_signals() -> None:
    # what is started in the background has SIGINT ignored
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(signum, signal.SIG_DFL)
