"""The record of what a device is given in a step of the real engine: kernels, collectives, waits, reads of the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

import colossus
from colossus.comm import log
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.trace import AttentionCall, Operator, Product
from colossus.planner.trace_recorder import AwaitedEntry, work_of

#: operator of c10d, or of its functional form -> collective, and the position of its input
_COLLECTIVES = {
    "allreduce_": ("all_reduce", 0), "_allgather_base_": ("all_gather", 1), "alltoall_base_": ("all_to_all", 1),
    "_reduce_scatter_base_": ("reduce_scatter", 1), "broadcast_": ("broadcast", 0),
    "send": ("send", 0), "recv_": ("receive", 0),
    "all_reduce": ("all_reduce", 0), "all_gather_into_tensor": ("all_gather", 0),
    "reduce_scatter_tensor": ("reduce_scatter", 0), "all_to_all_single": ("all_to_all", 0),
}  # fmt: skip
_PACKAGE = f"{Path(colossus.__file__).parent}/"
#: files that wait for their callers
_COMMON = tuple(f"{_PACKAGE}{path}" for path in ("comm/", "planner/", "tensor_parallel/move_plan.py"))


@dataclass(frozen=True, slots=True)
class Call:
    """The start of a collective or of a message.

    Attributes:
        number: number that its `Wait` has, too.
        operation: ``all_gather``, .., ``send`` or ``receive``.
        axes: name of the group.
        communicator: name of the process group and the ranks of the world; of a message its two ranks.
        input_bytes: bytes of this rank's input, or of the message.
    """

    number: int
    operation: str
    axes: str
    communicator: tuple[str, tuple[int, ...]]
    input_bytes: float

    @property
    def is_message(self) -> bool:
        return self.operation in ("send", "receive")


@dataclass(frozen=True, slots=True)
class Wait:
    """The wait of the current stream for the calls with this number; ``site`` is the line that waits."""

    number: int
    site: str


@dataclass(frozen=True, slots=True)
class Read:
    """A wait of the host for what the current stream has been given.

    Attributes:
        site: line that reads.
        num_events: number of events of the step before the copy that is waited for; None: all.
    """

    site: str
    num_events: int | None = None


DeviceEvent = Product | AttentionCall | Operator | Call | Wait | Read


class DeviceRecord:
    """The events of a step in the order in which the host issues them.

    All kernels are on one stream: the engine has no other.
    """

    def __init__(self) -> None:
        self.events: list[DeviceEvent] = []
        self._numbers = 0
        self._axes = ""

    @contextmanager
    def recording(self, fake: CountedFakeTensors) -> Iterator[None]:
        """Record what runs under the fake mode inside the context."""
        fake.observer = self._observe
        _running.append(self)
        try:
            with patch.object(log, "record", self._log):
                yield
        finally:
            _running.remove(self)
            fake.observer = None

    def _observe(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2]
        if func.namespace in ("c10d", "_c10d_functional"):
            if name in _COLLECTIVES:
                self._call(name, args)
            return
        work = work_of(func, args, kwargs, out)
        if work is not None:
            self.events.append(work)  # type: ignore[arg-type]

    def _call(self, name: str, args: Any) -> None:
        operation, position = _COLLECTIVES[name]
        boxed = next((x for x in args if isinstance(x, torch.ScriptObject)), None)
        group = _resolve_process_group(args[-1]) if boxed is None else dist.ProcessGroup.unbox(boxed)
        ranks = tuple(dist.get_process_group_ranks(group))
        if name in ("send", "recv_"):
            ranks = tuple(sorted((dist.get_rank(), ranks[args[2]])))
        tensors = args[position] if isinstance(args[position], list | tuple) else [args[position]]
        size = float(sum(x.nbytes for x in tensors if isinstance(x, Tensor)))
        self.events.append(Call(self._numbers, operation, self._axes, (group.group_desc, ranks), size))

    def _log(self, operation: str, axes: str, shape: tuple[int, ...], dtype: object) -> log.Entry:
        """Return the entry of a collective, in place of `colossus.comm.log.record`; the entry records the wait."""
        self._numbers += 1
        number, self._axes = self._numbers, axes
        return AwaitedEntry(number, operation, axes, lambda: self.events.append(Wait(number, _site())))


#: the record that is being made
_running: list[DeviceRecord] = []


def num_events() -> int:
    """Return the number of events that have been recorded."""
    return sum(len(record.events) for record in _running)


def note_read(num_before: int | None = None) -> None:
    """Record that the host reads what a device has computed after this number of events, or after all of them."""
    for record in _running:
        record.events.append(Read(_site(), num_before))


def _site() -> str:
    """Return file and line of the innermost frame of the package outside of `_COMMON`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_COMMON):
            return f"{file.removeprefix(_PACKAGE)}:{frame.f_lineno}"
        frame = frame.f_back
    return "outside of the package"
