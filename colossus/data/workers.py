"""Worker processes that read a dataset ahead: what can be sent to them, how they start, and how they end."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from multiprocessing import resource_tracker
from multiprocessing.reduction import ForkingPickler
from pickle import PicklingError
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import MP_STATUS_CHECK_INTERVAL
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from colossus.config.schema import ReadingOptions
from colossus.data.batch import Batch
from colossus.random import GLOBAL_RNG

#: seconds between two checks whether a worker has ended
_POLL_SECONDS = 1.0
_SHARED_MEMORY = "/dev/shm"


def start_method(options: ReadingOptions) -> str:
    """Return the start method of workers."""
    return options.multiprocessing_context or multiprocessing.get_start_method()


def require_sendable(parts: Mapping[str, Any], options: ReadingOptions) -> None:
    """Raise ValueError, before a worker starts, if a part cannot be sent to a worker with an interpreter of its own.

    Args:
        parts: the dataset and the function that collates, by name.
        options: how data is read.

    Raises:
        ValueError: with the name of the part that cannot be pickled.
    """
    if not options.num_workers or start_method(options) == "fork":
        return
    for name, part in parts.items():
        if (problem := _problem(part)) is not None:
            name, culprit, problem = _innermost(name, part, problem)
            raise ValueError(
                f"data.num_workers = {options.num_workers}: {name} is {_described(culprit)}, which cannot be sent to "
                f"workers that {start_method(options)!r} starts ({problem}): make it a function or class of a module "
                f"(the config file is one), or set data.multiprocessing_context='fork'"
            )


class _DryPickler(ForkingPickler):
    """A pickler that only raises errors. Tensors and arrays can be sent; their bytes are not touched."""

    def __init__(self) -> None:
        super().__init__(self)

    def write(self, data: Any) -> int:
        return len(data)

    def reducer_override(self, leaf: Any) -> Any:
        return (int, ()) if isinstance(leaf, torch.Tensor | np.ndarray) else NotImplemented


def _problem(part: Any) -> str | None:
    try:
        _DryPickler().dump(part)
    except (PicklingError, AttributeError, TypeError) as error:
        return str(error)
    except Exception:  # an object that is sent only while a process starts (a lock), or a user's own error
        return None
    return None


def _innermost(name: str, part: Any, problem: str) -> tuple[str, Any, str]:
    """Return the name of the innermost attribute or entry that cannot be pickled, itself, and why."""
    if isinstance(part, Mapping):
        entries = {f"{name}[{key!r}]": value for key, value in part.items()}
    elif isinstance(part, list | tuple):
        entries = {f"{name}[{index}]": value for index, value in enumerate(part)}
    else:
        entries = {f"{name}.{key}": value for key, value in getattr(part, "__dict__", {}).items()}
    for inner, value in entries.items():
        if not isinstance(part, type) and (reason := _problem(value)) is not None:
            return _innermost(inner, value, reason)
    return name, part, problem


def _described(culprit: Any) -> str:
    code = getattr(culprit, "__code__", None)
    if code is None:
        return f"a {type(culprit).__name__}"
    return f"the function {code.co_name} of {os.path.basename(code.co_filename)}, line {code.co_firstlineno}"


def start_workers(batches: Dataset[Any], steps: Iterable[int], options: ReadingOptions, seed: int) -> Iterator[Batch]:
    """Return the batches of steps; ``seed`` is the base seed of the workers, from which torch derives theirs."""
    method = start_method(options)
    loader: DataLoader[Any] = DataLoader(
        batches,
        batch_size=None,
        sampler=steps,
        num_workers=options.num_workers,
        collate_fn=_unchanged,
        worker_init_fn=_outlive_stop_signals,
        multiprocessing_context=method,
        timeout=options.worker_timeout,
    )
    # torch draws the workers' base seed from the global generator
    with GLOBAL_RNG.preserved(seed), nullcontext() if method == "fork" else _blocked_sigterm():
        loader.check_worker_number_rationality()
        try:
            return _Workers(loader)
        except OSError as error:
            require_shared_memory(options, error)
            raise


def require_shared_memory(options: ReadingOptions, error: BaseException) -> None:
    """Raise RuntimeError if an error of workers, or of their start, says that shared memory is used up.

    Raises:
        RuntimeError: with the size of shared memory, and how to get more.
    """
    is_of_start = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if (is_of_start or "shared memory" in str(error)) and os.path.isdir(_SHARED_MEMORY):
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
        raise RuntimeError(
            f"data.num_workers = {options.num_workers}: workers send batches through {_SHARED_MEMORY}, which is too "
            f"small: {total / 1e6:.3g} MB, {free / 1e6:.3g} MB of it free. Start the container with more "
            f"(docker run --shm-size=8g, or --ipc=host), or set data.num_workers=0"
        ) from None


class _Workers(_MultiProcessingDataLoaderIter):
    """Workers whose end is seen within seconds.

    torch checks once, after its whole timeout, and is informed by a signal only if the worker is a child of this
    process, which a worker of ``forkserver`` is not.
    """

    def __del__(self) -> None:
        if hasattr(self, "_workers"):  # else they could not be started, and torch's method would raise
            super().__del__()

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout
        while (remaining := deadline - time.monotonic()) > 0:
            success, batch = super()._try_get_data(min(remaining, _POLL_SECONDS))
            if success:
                return True, batch
        return False, None


def _unchanged(item: Any) -> Any:
    return item


def _outlive_stop_signals(worker: int) -> None:
    """Let only the rank's SIGTERM end a worker.

    A batch system signals all processes, but the rank still has a step to finish.
    """
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # macOS does not tell who has sent it
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_by_rank, name="colossus-sigterm", daemon=True).start()


def _end_by_rank() -> None:
    rank = multiprocessing.parent_process()  # not the parent process, if a fork server has forked this one
    assert rank is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        pass
    os._exit(0)


@contextmanager
def _blocked_sigterm() -> Iterator[None]:
    """Start processes in the block with SIGTERM blocked, if they have an interpreter of their own.

    The threads that their imports start inherit it; any thread that takes the signal would end the process.
    """
    resource_tracker.ensure_running()  # the first process needs it, and its start unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
