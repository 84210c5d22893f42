"""Ranks on a real device, and what is asked of the machine's devices before any test uses them."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from colossus.context.local_ranks import LocalRanks, RanksFailed, run_local_ranks

#: seconds after which a body writes the stacks of its threads and ends its process
BODY_SECONDS = 120
#: seconds without an answer and without processor time after which ranks are killed
PATIENCE = 45.0


@dataclass(frozen=True)
class Devices:
    """The CUDA devices of this machine.

    Attributes:
        count: number of devices that torch has.
        capability: compute capability of the first device, (0, 0) without one.
        has_bf16: whether the first device computes in bf16.
        name: name of the first device.
    """

    count: int = 0
    capability: tuple[int, int] = (0, 0)
    has_bf16: bool = False
    name: str = "no CUDA device"


def find_devices() -> Devices:
    """Return the devices of this machine; a forked process asks, since a process that has asked cannot be forked."""
    return run_local_ranks(1, _describe)[0]


def _describe(rank: int) -> Devices:
    count = torch.cuda.device_count()
    if count == 0:
        return Devices()
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return Devices(count, torch.cuda.get_device_capability(0), has_bf16, torch.cuda.get_device_name(0))


class _Rank:
    """A rank that runs one function after the other."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        faulthandler.dump_traceback_later(BODY_SECONDS, exit=True, file=2)
        try:
            return body(self.rank, self.device, *args)
        finally:
            faulthandler.cancel_dump_traceback_later()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


class DeviceRanks:
    """Processes that run the bodies of tests on a device.

    Each rank has a device of its own under NCCL where the machine has enough of them; else all ranks share the first
    device under gloo. The ranks of a world stay alive for the next body, since a device costs each process seconds. A
    body that raises, crashes or hangs fails its own test: its ranks are killed, and the next body gets new ones.

    Args:
        device: ``cuda:0`` or ``cpu``.
        num_devices: number of CUDA devices of the machine.
    """

    def __init__(self, device: torch.device, num_devices: int = 0) -> None:
        self.device, self.num_devices = device, num_devices
        self._pools: dict[int, LocalRanks] = {}
        torch.set_num_threads(1)  # a process that has run threads cannot be forked

    def backend(self, world: int) -> str:
        """Return the backend that joins so many ranks."""
        return "nccl" if 1 < world <= self.num_devices else "gloo"

    def comm(self, world: int) -> dict[str, Any]:
        """Return the ``comm`` section of a config for so many ranks."""
        return {"backend": self.backend(world)} if self.device.type == "cuda" else {}

    def run(self, world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results of ``body(rank, device, *args)`` by rank; ``body`` is a function of a module.

        Raises:
            RanksFailed: the traceback of the first rank that raised, or the exit codes of those that crashed.
        """
        if world not in self._pools:
            self.close(but=1)
            if torch.cuda.is_initialized():
                raise RuntimeError("the process of the tests has used CUDA and cannot be forked: let a body do that")
            self._pools[world] = LocalRanks(
                world, lambda rank: self._make(rank, world), patience=PATIENCE, backend=self.backend(world),
                collective_timeout=PATIENCE, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
            )  # fmt: skip
        try:
            return self._pools[world].call("run", body, args)
        except RanksFailed:
            self._pools.pop(world).close()
            raise

    def run_one(self, body: Callable[..., Any], *args: Any) -> Any:
        """Return the result of ``body(0, device, *args)`` in a process of its own."""
        return self.run(1, body, *args)[0]

    def _make(self, rank: int, world: int) -> _Rank:
        return _Rank(rank, torch.device("cuda", rank) if self.backend(world) == "nccl" else self.device)

    def close(self, but: int | None = None) -> None:
        """End the ranks of all worlds but one."""
        for world in [world for world in self._pools if world != but]:
            self._pools.pop(world).close()


def forget_launcher() -> None:
    """Remove what a launcher around the tests has put into the environment."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
