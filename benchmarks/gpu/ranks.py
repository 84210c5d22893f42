"""Ranks for sections: processes that share the device, joined by gloo; they stay for all cases that want as many."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from colossus.context.local_ranks import LocalRanks, RanksFailed, run_local_ranks

#: seconds without a sign of life, after which ranks are given up
PATIENCE = 45.0


@cache
def count_devices() -> int:
    """CUDA devices of this machine, as a process says that is forked for it: who asks may not be able to fork then."""
    (count,) = run_local_ranks(1, lambda rank: torch.cuda.device_count())
    return int(count)


class _Rank:
    """What lives in a rank: calls functions of the section's modules."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return body(self.rank, self.device, *args)
        finally:
            if self.device.type == "cuda":
                torch.cuda.empty_cache()


class RankPool:
    """``run(world, body, *args)``: ``body(rank, device, *args)`` on every rank; their results by rank.

    The ranks of one world are kept, as a device costs each of them a second; those of another world are ended first,
    and those among which one failed, so that the next case finds new ones. ``body`` is a function of a module.

    Args:
        device: of all ranks, with ``backend="gloo"``; rank i has ``cuda:i`` with ``backend="nccl"``.
    """

    def __init__(self, device: torch.device, backend: str = "gloo") -> None:
        self.device, self.backend = device, backend
        self._ranks: LocalRanks | None = None

    def run(self, world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        if self._ranks is None or self._ranks.world != world:
            self.close()
            if torch.cuda.is_initialized():
                raise RuntimeError("this process has used CUDA, so it cannot be forked: let ranks do all that does")
            self._ranks = LocalRanks(
                world, self._make, patience=PATIENCE, backend=self.backend, collective_timeout=PATIENCE
            )
        try:
            return self._ranks.call("run", body, args)
        except RanksFailed:
            self.close()
            raise

    def _make(self, rank: int) -> _Rank:
        return _Rank(rank, torch.device("cuda", rank) if self.backend == "nccl" else self.device)

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
