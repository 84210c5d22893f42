"""``train.deterministic``: torch's switches for algorithms that give the same bits each time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

#: what cuBLAS reads when CUDA starts, unless the user has set it
VARIABLES = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


@contextmanager
def deterministic_algorithms(wanted: bool) -> Iterator[None]:
    """Inside, torch takes deterministic algorithms where it has several, and raises where it has none; cuDNN does not
    choose by timing. The switches are of the whole process, and are afterwards as they were before.

    Memory that nobody has written to is not filled, as torch otherwise does then: that takes a write of each new
    tensor, and changes the numbers of a program only that reads such memory, which is a mistake.

    Raises:
        ValueError: CUDA runs already, and cuBLAS was not told how much memory to take.
    """
    if not wanted:
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
    filled, timed = memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = torch.backends.cudnn.benchmark = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        memory.fill_uninitialized_memory, torch.backends.cudnn.benchmark = filled, timed


def add_switch(error: BaseException) -> None:
    """Note on an error of torch about an operation without such an algorithm which key of the config asked for it."""
    if isinstance(error, RuntimeError) and "does not have a deterministic implementation" in str(error):
        error.add_note(
            "(train.deterministic = True refuses it: take another operation in the model, or train.deterministic=False)"
        )
