"""Advice for a run that has met a limit of its machine: memory, open files or the disk. No torch."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from colossus import machine
from colossus.comm.peer_gone import OPEN_FILES_ERROR
from colossus.config import Config

#: words in errors of torch's allocators, CUDA, cuBLAS and cuDNN
_MEMORY_ERRORS = ("out of memory", "can't allocate memory", "_ALLOC_FAILED")
_DISK_ERRORS = tuple(map(os.strerror, machine.DISK_IS_FULL))


def advise(messages: Sequence[str], config: Config, step: int | None, folder: Path | None) -> str:
    """Return lines on what to do about an error; empty where it does not come from a limit of the machine.

    Args:
        messages: the messages of the error and of its causes.
        config: the config of the run.
        step: the step that was running, None before the first.
        folder: the run folder.
    """
    if is_out_of_memory(messages):
        return memory_advice(config, " ".join(messages), step)
    if any(OPEN_FILES_ERROR in message for message in messages):
        return open_files_advice()
    if any(word in message for message in messages for word in _DISK_ERRORS):
        return _disk_advice([folder, config.checkpoint.dir, tempfile.gettempdir(), "/dev/shm"])
    return ""


def open_files_advice() -> str:
    """Return the limit of open files, and how to raise it."""
    return (
        f"a process may open {machine.open_files()} files here (ulimit -n), which are too few: each group of ranks and "
        f"each peer takes some.\nRaise the hard limit: ulimit -Hn 65536, LimitNOFILE= of a service, docker run "
        f"--ulimit nofile=65536"
    )


def has_few_open_files() -> bool:
    """Return whether the limit of open files may be too low for a usual plan."""
    limit = machine.open_files()
    return limit is not None and limit < machine.FEW_OPEN_FILES


def _disk_advice(folders: Iterable[str | os.PathLike[str] | None]) -> str:
    """Return a line that names the folders whose disk is full."""
    full = []
    for folder in folders:
        if (
            folder is not None
            and os.path.isdir(folder)
            and (free := shutil.disk_usage(folder).free) < machine.LITTLE_ROOM
        ):
            full.append(f"{os.path.abspath(folder)} ({free} bytes are free)")
    return f"full: the disk of {', and of '.join(full)}" if full else "a disk is full, or a quota is used up"


def is_out_of_memory(messages: Iterable[str]) -> bool:
    """Return whether the message of an error, or of a cause of it, says that memory ran out."""
    return any(word in message for message in messages for word in _MEMORY_ERRORS)


def memory_advice(config: Config, message: str, step: int | None) -> str:
    """Return lines on changes of this config that take less memory, the most useful first.

    Args:
        config: the config of the run.
        message: the message of the error, from which numbers of bytes are taken.
        step: the step that was running, None before the first.
    """
    train, parallel, microbatches = config.train, config.parallel, config.schedule.microbatches
    data, stage, size = parallel.data or 1, parallel.zero.stage, parallel.tensor.size
    ways = []
    if others := re.findall(r"Process \d+ has ([\d.]+ [KMGT]?i?B) memory in use", message):
        ways.append(f"other processes hold {', '.join(others)} of this device: `nvidia-smi` names them")
    if reserved := re.search(r"([\d.]+ [GT]iB) is reserved by PyTorch but unallocated", message):
        ways.append(f"{reserved[1]} are reserved in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True")
    if step is not None:
        if train.activation_checkpoint.type != "full":
            ways.append("train.activation_checkpoint=full: a block's activations are computed again in backward")
        if train.global_batch_size // data > microbatches:
            ways.append(f"more schedule.microbatches (now {microbatches}): fewer samples at a time, the same batch")
        if train.precision.name == "fp32":
            ways.append("train.precision=bf16: activations of half the size")
    if data > 1 and stage < 3 and (stage or parallel.strategy.type in ("all_reduce", "hierarchical")):
        ways.append(f"parallel.zero.stage={stage + 1} (now {stage}): more is sharded over {data} data ranks")
    ways.append(f"a larger parallel.tensor.size (now {size}) or parallel.pipeline.size (now {parallel.pipeline.size})")
    when = "while the model was made or loaded" if step is None else f"in step {step}"
    return "\n".join([f"out of memory {when}; what takes less:", *(f"  - {way}" for way in ways)])
