"""Worker processes that read a dataset ahead: what they can be given, how they begin, who ends them."""

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

#: seconds after which it is seen that a worker has ended
_LOOK_SECONDS = 1.0
_SHARED_MEMORY = "/dev/shm"


def start_method(options: ReadingOptions) -> str:
    """Return how workers are started."""
    return options.multiprocessing_context or multiprocessing.get_start_method()


def require_sendable(parts: Mapping[str, Any], options: ReadingOptions) -> None:
    """Refuse, before a worker starts, what one that begins with an interpreter of its own cannot be given.

    Args:
        parts: by name, what workers read with: the dataset, and what collates.

    Raises:
        ValueError: with the name of what cannot be pickled.
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


class _Nowhere(ForkingPickler):
    """Pickles what workers get, for its errors alone. Tensors and arrays can be sent; their bytes are not touched."""

    def __init__(self) -> None:
        super().__init__(self)

    def write(self, data: Any) -> int:
        return len(data)

    def reducer_override(self, leaf: Any) -> Any:
        return (int, ()) if isinstance(leaf, torch.Tensor | np.ndarray) else NotImplemented


def _problem(part: Any) -> str | None:
    try:
        _Nowhere().dump(part)
    except (PicklingError, AttributeError, TypeError) as error:
        return str(error)
    except Exception:  # what is sent while a process starts alone (a lock of multiprocessing), or a user's own error
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
    """The batches of steps; ``seed`` is of what workers draw, as torch derives it."""
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
    """Say so where an error of workers, or of their start, is of shared memory that is used up.

    Raises:
        RuntimeError: with what of it there is, and how to have more.
    """
    is_of_start = isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None
    if (is_of_start or "shared memory" in str(error)) and os.path.isdir(_SHARED_MEMORY):
        total, _, free = shutil.disk_usage(_SHARED_MEMORY)
        raise RuntimeError(
            f"data.num_workers = {options.num_workers}: workers give batches through {_SHARED_MEMORY}, which is too "
            f"small: {total / 1e6:.3g} MB, of which {free / 1e6:.3g} MB are free. Start the container with more "
            f"(docker run --shm-size=8g, or --ipc=host), or set data.num_workers=0"
        ) from None


class _Workers(_MultiProcessingDataLoaderIter):
    """Sees within seconds that a worker has ended. torch looks once, when all its time is over, and hears of a signal
    only where the worker is a child of this process, as one that ``forkserver`` starts is not.
    """

    def __del__(self) -> None:
        if hasattr(self, "_workers"):  # torch's would raise where they could not be started
            super().__del__()

    def _try_get_data(self, timeout: float = MP_STATUS_CHECK_INTERVAL) -> tuple[bool, Any]:
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            success, batch = super()._try_get_data(min(left, _LOOK_SECONDS))
            if success:
                return True, batch
        return False, None


def _unchanged(item: Any) -> Any:
    return item


def _outlive_stop_signals(worker: int) -> None:
    """Let a worker end by its rank's SIGTERM only: a batch system tells all processes, but a rank has a step to end."""
    for signum in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(signum, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):  # on macOS who has sent it cannot be known
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_when_told, name="colossus-sigterm", daemon=True).start()


def _end_when_told() -> None:
    rank = multiprocessing.parent_process()  # not the process above where a server has forked this one
    assert rank is not None
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank.pid:
        pass
    os._exit(0)


@contextmanager
def _blocked_sigterm() -> Iterator[None]:
    """Processes that are started here, with an interpreter of their own, begin with SIGTERM blocked, and so do the
    threads that their imports start: any thread that takes it ends the process.
    """
    resource_tracker.ensure_running()  # which the first process started needs, and whose start unblocks it
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
