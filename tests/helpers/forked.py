"""``python -m <one of ours>`` as a forked process: real pids, pipes, signals and exit codes, without importing torch.

A launched run of two ranks imports torch three times, 6 to 9 processor seconds before the first step. Here the
launcher is forked from the tests' process, which has it, and the launcher's own ranks are forked from the launcher,
where it would start Python. What a new Python does by itself (``-m``, imports, the first signal handlers) is left
to the tests that say ``new_python=True``.
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import run as torchrun

from colossus.cli import main as cli
from colossus.comm import log
from colossus.launch import agent, worker  # here once, instead of in each forked launcher

if TYPE_CHECKING:
    from benchmarks.namespaces import Namespaces

MODULES = {"colossus": cli.main, "colossus.launch.worker": worker.main, "torch.distributed.run": torchrun.main}


class ForkedPython:
    """As much of `subprocess.Popen` as launchers and tests use; ``args`` are those of ``python [-u] -m MODULE ...``.

    ``outputs``: where it writes its output and its errors, in place of pipes that are read here. ``within``: namespaces
    in which the process is to be.
    """

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        pipes: bool = False,
        outputs: tuple[int, int] | None = None,
        start_new_session: bool = False,
        within: Namespaces | None = None,
    ) -> None:
        self.args = args
        self.returncode: int | None = None
        ends = [os.pipe() for _ in range(2 if pipes else 0)]
        reads, writes = [read for read, _ in ends], [write for _, write in ends]
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork() if within is None else within.fork()
        if self.pid == 0:
            code = 1
            gc.freeze()  # files of the tests' process that are garbage would close the same numbers once more, later
            try:
                for number, end in enumerate(outputs or writes, start=1):
                    os.dup2(end, number)
                os.closerange(3, 256)
                code = _be_python(args, env, cwd, start_new_session)
            finally:
                os._exit(code)
        for end in writes:
            os.close(end)
        self.outputs = [bytearray() for _ in reads]
        self._readers = [
            threading.Thread(target=_read, args=(end, output), daemon=True)
            for end, output in zip(reads, self.outputs, strict=True)
        ]
        for reader in self._readers:
            reader.start()

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = time.monotonic() + timeout if timeout is not None else None
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(0.01)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, signum: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, signum)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
            if reader.is_alive():  # a process below this one still holds the pipe
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
        out, err = (bytes(output).decode() for output in self.outputs)
        return out, err


def _read(end: int, output: bytearray) -> None:
    while piece := os.read(end, 1 << 16):
        output += piece
    os.close(end)


def _be_python(args: Sequence[str], env: Mapping[str, str], cwd: Path | None, start_new_session: bool) -> int:
    """What a new Python would find and do, in a forked one; its exit code."""
    if start_new_session:
        os.setsid()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for signum in (signal.SIGTERM, signal.SIGALRM):
        signal.signal(signum, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(env)
    if cwd is not None:
        os.chdir(cwd)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    warnings.resetwarnings()
    for category in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", category)
    warnings.showwarning = _warn
    # those of pytest write to files whose numbers are others' now: a socket of gloo's, say, or the rows of a run
    of_pytest = list(logging.root.handlers)
    for logger in (logging.root, *logging.root.manager.loggerDict.values()):
        for handler in of_pytest if isinstance(logger, logging.Logger) else ():
            logger.removeHandler(handler)
    logging.root.setLevel(logging.WARNING)
    tempfile.tempdir = None
    log.clear()
    agent.start_process = _start_process
    # torch's rendezvous asks for the stack at each of its events: with source lines it would go through all the modules
    # that tests have imported, for seconds
    inspect.stack = partial(inspect.stack, 0)
    flag, module, *words = [word for word in args[1:] if word != "-u"]
    assert flag == "-m", args
    sys.argv = [module, *words]
    try:
        code = MODULES[module](words) or 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def _start_process(module: str, words: Sequence[str], variables: Mapping[str, str]) -> ForkedPython:
    return ForkedPython([sys.executable, "-m", module, *words], env={**os.environ, **variables}, start_new_session=True)


def _warn(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: object = None,
) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
