"""The search of the best plans: layouts best first, of each the plans that a lower bound leaves; those with the best
scores are estimated in full.

Layouts are nodes of a graph whose edges change one thing: twice or half the ranks that share a sequence or experts,
another mode or size of tensor parallelism, more activation checkpointing. The search begins with 1D tensor parallelism
of every size, and goes on from the layouts whose plans were best: no profile is taken of the hundreds that are far off.
It looks at the same plans on every machine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan
from colossus.hardware.hardware import Hardware
from colossus.planner.candidates import Candidate, plans
from colossus.planner.estimate import Estimator
from colossus.planner.lower_bounds import LowerBounds
from colossus.planner.model_layouts import ModelLayout, layouts
from colossus.planner.plan_estimate import PlanEstimate
from colossus.planner.score import Score, score
from colossus.planner.search_result import SearchResult
from colossus.progress import progress

#: layouts whose plans are scored at most, and plans of each
_MOST_LAYOUTS, _MOST_PLANS = 16, 24
#: a layout's neighbours are looked at where its best plan is at most so much slower than the best of all
_NEAR = 1.25
_CHECKPOINTS = ("none", "selective", "full")


def search(
    config: Config,
    hardware: Hardware,
    *,
    devices: int,
    hosts: int = 1,
    memory: float | None = None,
    top: int = 10,
    keep: Mapping[str, Any] | None = None,
) -> SearchResult:
    """The best plans of a model and its data.

    Args:
        config: its own plan counts for nothing but for what is kept; its global batch stays.
        hosts: over which the devices are spread equally.
        memory: bytes of a device; by default those of the hardware.
        top: plans of the result.
        keep: what stays as given, see `colossus.planner.kept.Kept`.

    Raises:
        ConfigError: for what is wrong with the config, and where no plan fits the arithmetic of model and batch.
    """
    return _Search(config, hardware, devices, hosts, memory or hardware.memory_bytes, top, keep).run()


@dataclass
class _Node:
    """A layout that has been looked at.

    Attributes:
        candidates: with their lower bounds, the least first.
        seconds: of the best of them, or infinite.
    """

    layout: ModelLayout
    candidates: list[tuple[float, int, Candidate]]
    seconds: float = float("inf")
    missing: float = float("inf")
    scores: list[tuple[float, Candidate, Score]] = field(default_factory=list)

    @property
    def bound(self) -> float:
        return self.candidates[0][0]


class _Search:
    def __init__(
        self,
        config: Config,
        hardware: Hardware,
        devices: int,
        hosts: int,
        memory: float,
        top: int,
        keep: Mapping[str, Any] | None,
    ) -> None:
        self._config, self._devices, self._hosts = config, devices, hosts
        self._memory, self._top, self._keep = memory, top, keep
        self._estimator = Estimator(hardware, hosts=hosts)
        self._bounds = LowerBounds(config, hardware, hosts=hosts)
        self._best = float("inf")
        self._tried = 0
        self._seen: set[ModelLayout] = set()
        self._refusals: list[ConfigError] = []
        self._nodes: list[_Node] = []
        #: of the plans that do not fit, the one that misses least
        self._nearest: tuple[float, Candidate] | None = None

    def run(self) -> SearchResult:
        began, stopped = time.monotonic(), False
        try:
            self._look()
        except KeyboardInterrupt:
            stopped = True
        found = self._estimates()
        nearest = None
        if not found and self._nearest is not None and not stopped:
            nearest = self._estimator.estimate(self._nearest[1].config, self._nearest[1].overrides)
        progress("")
        if not found and nearest is None and not stopped:
            raise self._nothing()
        return SearchResult(found[: self._top], self._tried, nearest, time.monotonic() - began, stopped)

    # -- layouts --------------------------------------------------------------------------------------------

    def _look(self) -> None:
        every = layouts(self._config, self._devices, hosts=self._hosts, keep=self._keep)
        self._every = every
        waiting: list[tuple[float, int, _Node]] = []
        for layout in _first(every):
            self._push(waiting, layout, None)
        looked = 0
        while waiting and looked < _MOST_LAYOUTS:
            _, _, node = heapq.heappop(waiting)
            if node.bound >= self._best:
                self._tried += len(node.candidates)
                continue
            looked += 1
            progress(f"layout {looked}: {describe_plan(node.candidates[0][2].config)}")
            self._score(node)
            if node.seconds <= _NEAR * self._best or self._best == float("inf"):
                for layout in _neighbours(node.layout, every):
                    self._push(waiting, layout, node)

    def _push(self, waiting: list[tuple[float, int, _Node]], layout: ModelLayout, of: _Node | None) -> None:
        """With how long its best plan may take, as far as the neighbour tells."""
        if layout in self._seen:
            return
        self._seen.add(layout)
        made = plans(self._config, self._devices, layout, hosts=self._hosts, keep=self._keep)
        found = []
        for number, candidate in enumerate(made):
            needed = self._bounds.memory(candidate.config)
            if needed > self._memory:
                self._tried += 1
                self._misses(needed, candidate)
                continue
            found.append((self._bounds.seconds(candidate.config), number, candidate))
        if not found:
            return
        found.sort(key=lambda each: each[:2])
        node = _Node(layout, found)
        likely = node.bound if of is None or not of.bound else node.bound * max(1.0, of.seconds / of.bound)
        heapq.heappush(waiting, (likely, len(self._seen), node))

    def _misses(self, needed: float, candidate: Candidate) -> None:
        if self._nearest is None or needed < self._nearest[0]:
            self._nearest = needed, candidate

    # -- plans ----------------------------------------------------------------------------------------------

    def _score(self, node: _Node) -> None:
        """Score the plans of a layout, the promising first: of plans that differ in ZeRO, the first two that fit."""
        fitting: dict[Any, int] = {}
        scored = 0
        for bound, _, candidate in node.candidates:
            self._tried += 1
            key = _but_zero(candidate.config)
            if scored >= _MOST_PLANS or bound >= self._best or fitting.get(key, 0) >= 2:
                continue
            scored += 1
            try:
                candidate = Candidate(*self._estimator.with_stated_split(candidate.config, candidate.overrides))
                found = self._scored(candidate, node)
            except ConfigError as error:
                self._refusals.append(error)
                continue
            except ValueError as error:
                self._refusals.append(ConfigError(str(error)))
                continue
            if found.seconds == float("inf"):
                self._misses(found.memory.fullest.total, candidate)
                continue
            fitting[key] = fitting.get(key, 0) + 1
            node.scores.append((found.seconds, candidate, found))
            node.seconds = min(node.seconds, found.seconds)
            self._best = min(self._best, found.seconds)
        self._nodes.append(node)

    def _scored(self, candidate: Candidate, node: _Node) -> Score:
        """By the profile of the layout's first plan."""
        first, config = node.candidates[0][2], candidate.config
        profile = self._estimator.profile(first.config, split_backward=False)
        times = candidate.samples / first.samples
        return score(config, profile, self._estimator.player(config, times), times=times, most=self._memory)

    def _estimates(self) -> list[PlanEstimate]:
        """Of the plans with the best scores, those that fit, best first."""
        scored = sorted((each for node in self._nodes for each in node.scores), key=lambda each: each[0])
        found: list[PlanEstimate] = []
        for seconds, candidate, _ in scored:
            if len(found) >= self._top and seconds > 1.05 * sorted(each.seconds for each in found)[self._top - 1]:
                break
            if len(found) >= 2 * self._top:
                break
            try:
                estimate = self._estimator.estimate(candidate.config, candidate.overrides)
            except ConfigError as error:
                self._refusals.append(error)
                continue
            if estimate.memory.fullest.total <= self._memory:
                found.append(estimate)
            else:
                self._misses(estimate.memory.fullest.total, candidate)
        return sorted(found, key=lambda each: each.seconds)

    def _nothing(self) -> ConfigError:
        if self._refusals:
            return self._refusals[0]
        batch = self._config.train.global_batch_size
        return ConfigError(
            f"no plan of {self._devices} devices fits this model and its batch of {batch} samples", self._config.source
        )


def _first(every: Sequence[ModelLayout]) -> Iterator[ModelLayout]:
    """Of 1D tensor parallelism of every size, and of every number of ranks that share experts, one; where there are
    none, the first of all."""
    found: dict[Any, ModelLayout] = {}
    for layout in every:
        if layout.tensor.mode == "1d" and layout.sequence.size == 1:
            key = layout.tensor.size, layout.expert
            known = found.get(key)
            is_better = known is not None and layout.tensor.sequence_sharded and not known.tensor.sequence_sharded
            if known is None or (is_better and layout.activation_checkpoint == known.activation_checkpoint):
                found[key] = layout
    yield from found.values() if found else every[:4]


def _neighbours(layout: ModelLayout, every: Sequence[ModelLayout]) -> Iterator[ModelLayout]:
    """The layouts that differ in one thing."""
    for other in every:
        if other == layout:
            continue
        changed = [
            other.tensor != layout.tensor,
            other.sequence != layout.sequence,
            other.expert != layout.expert,
            other.activation_checkpoint != layout.activation_checkpoint,
        ]
        if sum(changed) == 1 and _is_near(layout, other):
            yield other


def _is_near(one: ModelLayout, other: ModelLayout) -> bool:
    pairs = [(one.tensor.size, other.tensor.size), (one.sequence.size, other.sequence.size), (one.expert, other.expert)]
    return all(a <= 2 * b and b <= 2 * a for a, b in pairs)


def _but_zero(config: Config) -> Any:
    parallel, schedule = config.parallel, config.schedule
    return parallel.data, parallel.pipeline.size, schedule.type, tuple(schedule.options.items()), schedule.microbatches
