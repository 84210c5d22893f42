"""Ranks for sections: processes that share the device, joined by gloo; they stay for all cases that want as many."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Inherited:
    """Stands in a call of `RankPool.ask` for what `RankPool.inherited` had under this name when the ranks were forked:
    what is large is not sent to each."""

    name: str


class _Rank:
    """What lives in a rank: calls functions of the section's modules, or keeps an object that is asked."""

    def __init__(self, rank: int, device: torch.device, inherited: dict[str, Any]) -> None:
        self.rank, self.device, self.inherited = rank, device, inherited
        self.held: Any = None
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def run(self, body: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        try:
            return body(self.rank, self.device, *args)
        finally:
            self._give_back()

    def hold(self, make: Callable[[int], Any]) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None
            gc.collect()
            self._give_back()
        self.held = make(self.rank)

    def ask(self, method: str, args: tuple[Any, ...]) -> Any:
        given = [self.inherited[each.name] if isinstance(each, Inherited) else each for each in args]
        return getattr(self.held, method)(*given)

    def _give_back(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class RankPool:
    """Ranks for one case after the other: calls of functions, or of an object that they hold meanwhile.

    The ranks of one world are kept, as a device costs each of them a second; those of another world are ended first,
    and those among which one failed, so that the next case finds new ones.

    Args:
        device: of all ranks, with ``backend="gloo"``; rank i has ``cuda:i`` with ``backend="nccl"``.

    Attributes:
        inherited: what ranks that are started from here on can be asked about, see `Inherited`.
    """

    def __init__(self, device: torch.device, backend: str = "gloo") -> None:
        self.device, self.backend = device, backend
        self.inherited: dict[str, Any] = {}
        self._ranks: LocalRanks | None = None
        self._made_by: Callable[[int], Any] | None = None
        torch.set_num_threads(
            1
        )  # for good: what has run threads leaves its forked children without them, and they hang

    def run(self, world: int, body: Callable[..., Any], *args: Any) -> list[Any]:
        """``body(rank, device, *args)`` on every rank; their results by rank. ``body`` is a function of a module."""
        return self._call(world, "run", body, args)

    def hold(self, world: int, make: Callable[[int], Any]) -> None:
        """Let every rank hold ``make(rank)``, in the place of what it has held, which is closed. What the same ``make``
        has made is kept."""
        if self._ranks is None or self._ranks.world != world or self._made_by is not make:
            self._call(world, "hold", make)
            self._made_by = make

    def ask(self, method: str, *args: Any) -> list[Any]:
        """``held.method(*args)`` on every rank; the results by rank."""
        if self._ranks is None:
            raise RuntimeError(f"no ranks hold anything that could be asked for {method!r}")
        return self._call(self._ranks.world, "ask", method, args)

    def _call(self, world: int, what: str, *args: Any) -> list[Any]:
        if self._ranks is None or self._ranks.world != world:
            self.close()
            if torch.cuda.is_initialized():
                raise RuntimeError("this process has used CUDA, so it cannot be forked: let ranks do all that does")
            self._ranks = LocalRanks(
                world, self._make, patience=PATIENCE, backend=self.backend, collective_timeout=PATIENCE
            )
        try:
            return self._ranks.call(what, *args)
        except RanksFailed:
            self.close()
            raise

    def _make(self, rank: int) -> _Rank:
        device = torch.device("cuda", rank) if self.backend == "nccl" else self.device
        return _Rank(rank, device, self.inherited)

    def close(self) -> None:
        self._made_by = None
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None
