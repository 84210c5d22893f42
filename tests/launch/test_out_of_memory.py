"""Out of memory: the failure report says what takes less, from this config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import grid

from colossus.config import load_config
from colossus.launch import failure, rank_failure
from colossus.launch.causes import rank_causes
from colossus.launch.out_of_memory import advise, is_out_of_memory
from colossus.launch.rank_failure import RankRun
from colossus.launch.report import block
from colossus.launch.stop import StopSignals

CUDA = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of 79.10 GiB of which 1 GiB is free. "
    "Process 4711 has 12.50 GiB memory in use. Including non-PyTorch memory, this process has 65.40 GiB memory in use. "
    "Of the allocated memory {used} GiB is allocated by PyTorch, and {held} is reserved by PyTorch but unallocated. If "
    "reserved but unallocated memory is large try setting PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True."
)


def config_of(*overrides: str) -> Any:
    given = {"parallel": {"data": 4}, "train": {"steps": 3, "global_batch_size": 24}}
    return load_config(given, list(overrides))


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError(CUDA.format(used=60, held="1 MiB")), True),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:119] . DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            True,
        ),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
    ],
)
def test_which_errors_are_about_memory(error: BaseException, is_one: bool) -> None:
    outer = ValueError("in block 3")
    outer.__cause__ = error
    assert is_out_of_memory(failure.messages_of(outer)) == is_one


def test_advice_is_of_this_config() -> None:
    lines = advise(config_of(), CUDA.format(used="48.00", held="14.30 GiB"), 7).splitlines()
    assert lines == [
        "out of memory in step 7; what takes less:",
        "  - other processes hold 12.50 GiB of this device: `nvidia-smi` names them",
        "  - 14.30 GiB are reserved in pieces too small: PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "  - train.activation_checkpoint=full: a block's activations are computed again in backward",
        "  - more schedule.microbatches (now 1): fewer samples at a time, the same batch",
        "  - train.precision=bf16: activations of half the size",
        "  - parallel.zero.stage=1 (now 0): more is sharded over 4 data ranks",
        "  - a larger parallel.tensor.size (now 1) or parallel.pipeline.size (now 1)",
    ]


def test_nothing_is_advised_that_is_done_already() -> None:
    used = ["train.activation_checkpoint=full", "parallel.zero=3", "schedule.microbatches=6", "train.precision=bf16"]
    text = advise(config_of(*used), CUDA.format(used="60", held="800.00 MiB"), 7)
    for absent in ("activation_checkpoint", "zero.stage", "microbatches", "precision", "expandable_segments"):
        assert absent not in text
    before = advise(config_of("parallel.strategy=sgp"), "out of memory", None)
    assert before.startswith("out of memory while the model was made or loaded")
    assert "activations" not in before
    assert "zero" not in before


def test_the_block_has_the_advice(tmp_path: Path) -> None:
    run = RankRun(1, StopSignals(), tmp_path, has_launcher=True, folder=tmp_path, grid=grid(data=4), step=3)
    run.config = config_of()
    assert rank_failure.fail(run, torch.OutOfMemoryError(CUDA.format(used="60", held="1 MiB"))) == 1
    records = failure.read_all(tmp_path)
    text = block(rank_causes(records, {}), grid(data=4), tmp_path)
    assert "raised OutOfMemoryError" in text
    assert "\nout of memory in step 3; what takes less:\n  - other processes hold 12.50 GiB" in text
