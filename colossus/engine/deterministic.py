"""``train.deterministic``: torch's switches for algorithms that give the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: variables that cuBLAS reads when CUDA starts, with values for those that the user has not set
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@contextmanager
def deterministic_algorithms(is_enabled: bool) -> Iterator[None]:
    """Use torch's deterministic algorithms inside of a block, and restore the switches of the process after it.

    An operation without such an algorithm raises. cuDNN does not choose by timing. Uninitialised memory is not filled,
    as torch would do: that costs a write of each new tensor, and matters only for programs that wrongly read such
    memory.

    Raises:
        ValueError: if CUDA is already initialised and cuBLAS's variable was not set.
    """
    if not is_enabled:
        yield
        return
    for name, value in VARIABLES.items():
        if torch.cuda.is_initialized() and name not in os.environ:
            raise ValueError(
                f"train.deterministic = True needs the environment variable {name}={value} before CUDA is first used, "
                f"and this process has used it already: set it before Python starts"
            )
        os.environ.setdefault(name, value)  # it stays, as cuBLAS has read it
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    fills_memory, benchmarks = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = fills_memory, benchmarks


@contextmanager
def one_thread(is_enabled: bool) -> Iterator[None]:
    """Compute with one thread of the CPU inside of a block: threads divide sums, and the plan divides the cores."""
    if not is_enabled:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def add_switch(error: BaseException) -> None:
    """Add a note to torch's error about a nondeterministic operation: the config key that refuses it."""
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
        error.add_note(
            "(train.deterministic = True refuses it: use another operation in the model, or train.deterministic=False)"
        )
