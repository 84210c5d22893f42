"""Named regions of a step on one rank, and the seconds of each part of a step.

A region belongs to a part (compute, a collective, ..). An interval counts for the part of its innermost region, so that
the parts of a step add up to the step.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch.profiler import record_function

from colossus.comm.step_regions import DATA_WAIT, GATHERS, OPTIMIZER, PIPELINE_IDLE, REST

#: parts of a step beside those over axes (`over`), in the order of tables
BEFORE_AXES = ("forward", "backward", "wgrad")
AFTER_AXES = (GATHERS, PIPELINE_IDLE, OPTIMIZER, DATA_WAIT, REST)


class HostClock:
    """Seconds of this process, for a device that computes synchronously."""

    def now(self) -> Any:
        return time.perf_counter()

    def seconds(self, began: Any, ended: Any) -> float:
        return float(ended - began)

    def settle(self) -> None:
        """Wait until `seconds` can be called."""


class DeviceClock:
    """Seconds of an accelerator's current stream, by events in it.

    It measures when the device reaches a region, not when the host does. A stream that is idle or waits for a
    collective counts in the region that the host has reached.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._module = device, torch.get_device_module(device)

    def now(self) -> Any:
        event = self._module.Event(enable_timing=True)
        event.record(self._module.current_stream(self._device))
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        return float(began.elapsed_time(ended)) / 1000

    def settle(self) -> None:
        self._module.synchronize(self._device)


class TimedRegions:
    """The regions of this rank, in steps and between them.

    Regions of other threads do not count, except those of a backward, for which the main thread waits.

    Args:
        device: device of the rank.

    Attributes:
        steps: part -> seconds, for each `step`.
    """

    def __init__(self, device: torch.device) -> None:
        self.steps: list[dict[str, float]] = []
        self._clock = HostClock() if device.type == "cpu" else DeviceClock(device)
        self._thread = threading.get_ident()
        #: (name, part) of the open regions, the innermost last
        self._open: list[tuple[str, str]] = []
        #: (time, part that begins then) in the running step
        self._marks: list[tuple[Any, str]] | None = None
        #: region of the wait for a batch
        self._data_wait = ExitStack()

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Count the block as a step."""
        self._marks = []
        with self.region(f"step {number}", REST):
            yield
        marks, self._marks = self._marks, None
        self._clock.settle()
        seconds: dict[str, float] = defaultdict(float)
        for (began, part), (ended, _) in pairwise(marks):
            seconds[part] += self._clock.seconds(began, ended)
        self.steps.append(dict(seconds))

    def wait_for_batch(self) -> None:
        """Begin the region of a wait for a batch, which `batch_is_here` ends."""
        self._data_wait.enter_context(self.region(DATA_WAIT, DATA_WAIT))

    def batch_is_here(self) -> None:
        self._data_wait.close()

    @contextmanager
    def region(self, name: str, part: str) -> Iterator[None]:
        """Count the block as a region, and show it in torch.profiler under its name if a profile is taken.

        A region inside of one of the same name is not opened again.
        """
        outer_name, outer_part = self._open[-1] if self._open else ("", REST)
        if outer_name == name or not self._counts_thread():
            yield
            return
        part = GATHERS if outer_part == GATHERS else part
        self._open.append((name, part))
        self._mark(part)
        try:
            with record_function(name):
                yield
        finally:
            self._open.pop()
            self._mark(outer_part)

    def _mark(self, part: str) -> None:
        if self._marks is not None:
            self._marks.append((self._clock.now(), part))

    def _counts_thread(self) -> bool:
        # the id is -1 in a thread that runs no backward
        return threading.get_ident() == self._thread or torch._C._current_graph_task_id() != -1


def in_order(parts: Sequence[str]) -> list[str]:
    """Return parts of steps in the order of tables: computation, axes by name, waits."""
    named, present = (*BEFORE_AXES, *AFTER_AXES), set(parts)
    axes = sorted(present - set(named))
    return [part for part in (*BEFORE_AXES, *axes, *AFTER_AXES) if part in present]
