"""Time and memory of what runs on a device; `benchmarks.common` knows none."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial

import torch

from benchmarks import common
from benchmarks.common import Series

#: a block of calls is long enough for clocks and launches, and short enough to take turns often
BLOCK_SECONDS = 0.25
BLOCKS, MOST_CALLS = (3, 11), 200


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that was queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(run: Callable[[], object], device: torch.device, calls: int) -> float:
    """Return the mean over some calls; the first is not timed: caches hold what another case left there."""
    run()
    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    synchronize(device)
    return (time.perf_counter() - begin) / calls


def compare(runners: Mapping[str, Callable[[], object]], device: torch.device, seconds: float) -> Series:
    """Return seconds of one call of each, as `take_turns`."""
    return take_turns({name: partial(seconds_per_call, run, device) for name, run in runners.items()}, seconds)


def take_turns(timed: Mapping[str, Callable[[int], float]], seconds: float) -> Series:
    """Return seconds of one call of each, in blocks in which all take turns, each for about as long.

    Args:
        timed: makes that many calls behind one that is not timed, and returns the seconds of one.
        seconds: for all; at least three blocks are taken, whatever they need.
    """
    once = {name: time_of(1) for name, time_of in timed.items()}
    calls = {name: max(1, min(MOST_CALLS, int(BLOCK_SECONDS / taken))) for name, taken in once.items()}
    of_a_block = sum(taken * (calls[name] + 1) for name, taken in once.items())
    fewest, most = BLOCKS
    blocks = max(fewest, min(most, int(seconds / of_a_block)))
    return common.alternate({name: partial(time_of, calls[name]) for name, time_of in timed.items()}, blocks)


class PeakOnDevice:
    """Bytes that tensors take at most on a CUDA device while this is entered, on top of those that were there before.

    Attributes:
        bytes: when it was left; None on a CPU, where torch counts none.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.bytes: int | None = None

    def __enter__(self) -> PeakOnDevice:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._before = torch.cuda.memory_allocated(self.device)
        return self

    def __exit__(self, *error: object) -> None:
        if self.device.type == "cuda":
            self.bytes = torch.cuda.max_memory_allocated(self.device) - self._before
