"""A hook that names a rank which computes slower than the others: ``train.stragglers = 1.5``.

Ranks that wait for each other need equally long for a step, so the time of a step without its waits is compared.
"""

from __future__ import annotations

import json
import logging
import socket
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from statistics import median
from typing import Any, NamedTuple

import torch.distributed as dist

from colossus.arithmetic import counted
from colossus.comm.step_regions import GATHERS, PIPELINE_IDLE, profiled
from colossus.config.training import StragglerSection
from colossus.context.grid import RankGrid
from colossus.engine.fit import Hook
from colossus.engine.results import StepResult
from colossus.monitor.timed_regions import TimedRegions

log = logging.getLogger("colossus.monitor")


class Slow(NamedTuple):
    """A slow rank: its seconds of a step, and the median of the other ranks of its stage."""

    rank: int
    seconds: float
    others: float

    @property
    def ratio(self) -> float:
        return self.seconds / self.others


class Stragglers(Hook):
    """The comparison of ranks by the time of one step for each row of the log, on the logging rank.

    Each rank writes its seconds to the store in which the process group was made, and the logging rank reads what is
    there: no collective, and no rank waits. If all ranks have written, rows of metrics have ``slowest_rank`` and
    ``slowest_ratio``, its time over the median of the other ranks of its pipeline stage. An accelerator is waited for
    after the timed step, by events of its stream. Steps of ``train.profile`` are not timed.
    """

    def __init__(self, section: StragglerSection) -> None:
        self._section = section
        self._profile, self._step = ExitStack(), ExitStack()
        self._regions: TimedRegions | None = None
        self._every, self._grid, self._rank, self._is_logging = 1, RankGrid({}, {}), 0, False
        self._first = 0
        self._hosts: dict[int, str] = {}
        #: by rank, the seconds of the last timed steps, and the number of the last of these
        self._seconds: dict[int, deque[float]] = defaultdict(lambda: deque(maxlen=section.rows))
        self._steps: dict[int, int] = {}
        self._named: set[int] = set()
        self._slowest: Slow | None = None

    def on_train_start(self, engine: Any) -> None:
        context = engine.context
        self._first = engine.completed_steps + 1
        self._every, self._grid = engine.config.train.log_every, context.grid
        self._rank, self._is_logging = context.rank, context.is_logging_rank

    def on_step_start(self, engine: Any) -> None:
        step = engine.completed_steps + 1
        is_warm = step > self._first  # in the first step ranks connect
        profile = engine.config.train.profile
        is_profiled = profile is not None and profile.steps[0] <= step <= profile.steps[1]
        if step % self._every == 0 and is_warm and not is_profiled and dist.is_initialized():
            self._regions = TimedRegions(engine.device)
            self._profile.enter_context(profiled(self._regions))
            self._step.enter_context(self._regions.step(step))

    def on_step_end(self, engine: Any, result: StepResult) -> None:
        if self._regions is None:
            return
        self._step.close()
        self._profile.close()
        (parts,), self._regions = self._regions.steps, None
        entry = json.dumps([result.step, computing(parts), socket.gethostname()])
        store = engine.context.store()
        store.set(_key(self._rank), entry)
        if self._is_logging:
            self._compare(store)

    def on_exception(self, engine: Any, error: BaseException) -> None:
        self._profile.close()  # ending the step would wait for a device that may be stuck

    def add_to_row(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        slowest, self._slowest = self._slowest, None
        return {} if slowest is None else {"slowest_rank": slowest.rank, "slowest_ratio": slowest.ratio}

    def _compare(self, store: dist.Store) -> None:
        """Read the entries of the ranks, and log those that are slow now and were not before."""
        absent = [rank for rank in range(self._grid.world_size) if rank not in self._steps]
        if absent and not store.check([_key(rank) for rank in absent]):
            absent = [rank for rank in absent if store.check([_key(rank)])]
        ranks = sorted((*self._steps, *absent))
        for rank, entry in zip(ranks, store.multi_get([_key(rank) for rank in ranks]), strict=True):
            step, seconds, host = json.loads(entry)
            if step != self._steps.get(rank):
                self._steps[rank], self._hosts[rank] = step, host
                self._seconds[rank].append(seconds)
        stages = {rank: self._grid.index(rank, "pipeline") for rank in ranks}
        compared = compare({rank: self._seconds[rank] for rank in ranks}, stages)
        self._slowest = max(compared, key=lambda entry: entry.ratio, default=None)
        slow = {
            entry.rank: entry
            for entry in compared
            if entry.ratio > self._section.factor and len(self._seconds[entry.rank]) == self._section.rows
        }
        for rank in slow.keys() - self._named:
            log.warning("%s", self._describe(slow[rank], sum(stage == stages[rank] for stage in stages.values()) - 1))
        self._named = set(slow)

    def _describe(self, slow: Slow, num_others: int) -> str:
        place = "; ".join(filter(None, (self._grid.where(slow.rank), f"host {self._hosts[slow.rank]}")))
        stage = " of its pipeline stage" if self._grid.size("pipeline") > 1 else ""
        others = counted(num_others, "other rank") + stage
        return (
            f"rank {slow.rank} ({place}) computes {slow.ratio:.2f} times as long as the {others}: {slow.seconds:.3g} s "
            f"of a step, without waits, against {slow.others:.3g} s in the median (train.stragglers)"
        )


def computing(parts: Mapping[str, float]) -> float:
    """Return the seconds of a step in which a rank does not wait for others.

    Args:
        parts: parts of the step, as in `colossus.comm.step_regions`.
    """
    waits = (PIPELINE_IDLE, GATHERS)
    return sum(seconds for part, seconds in parts.items() if part not in waits and not part.startswith("over "))


def compare(seconds: Mapping[int, Sequence[float]], stages: Mapping[int, int]) -> list[Slow]:
    """Compare each rank with the others of its stage, by medians; empty if there are no others.

    Args:
        seconds: seconds of the last steps of each rank.
        stages: pipeline stage of each rank.
    """
    medians = {rank: median(values) for rank, values in seconds.items() if values}
    compared = []
    for rank, own in medians.items():
        others = [value for other, value in medians.items() if other != rank and stages[other] == stages[rank]]
        if others and (middle := median(others)) > 0:
            compared.append(Slow(rank, own, middle))
    return compared


def _key(rank: int) -> str:
    return f"colossus/computing/{rank}"
