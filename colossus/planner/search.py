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

#: layouts whose plans are scored at most
_MOST_LAYOUTS = 16
#: of a layout, products of replicas, stages and microbatches that are scored, the least bounds first; and of these the
#: best, with all schedules
_MOST_SIZES, _BEST_SIZES = 12, 3
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
    scores: list[tuple[float, Candidate]] = field(default_factory=list)

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
        #: plans that do not fit by their lower bound
        self._too_large: list[tuple[float, int, ModelLayout, Candidate]] = []
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
        if not found and not stopped:
            self._look_at_the_smallest()
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
                self._too_large.append((needed, len(self._too_large), layout, candidate))
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

    def _look_at_the_smallest(self) -> None:
        """Of those that their lower bounds rule out, how much the smallest need."""
        for _, _, layout, candidate in heapq.nsmallest(_MOST_SIZES, self._too_large):
            self._first_that_fit(_Node(layout, [(0.0, 0, candidate)]), [candidate])

    # -- plans ----------------------------------------------------------------------------------------------

    def _score(self, node: _Node) -> None:
        """Score plans of a layout: by numbers of replicas, stages and microbatches with the plainest schedule, then, of
        the best of these numbers, with all schedules."""
        groups: dict[Any, dict[Any, list[Candidate]]] = {}
        for bound, _, candidate in node.candidates:
            self._tried += 1
            if bound < self._best:
                kinds = groups.setdefault(_sizes(candidate.config), {})
                kinds.setdefault(_schedule(candidate.config), []).append(candidate)
        best: list[tuple[float, int, dict[Any, list[Candidate]]]] = []
        for number, kinds in enumerate([*groups.values()][:_MOST_SIZES]):
            plainest = min(kinds, key=_plainness)
            best.append((self._first_that_fit(node, kinds.pop(plainest)), number, kinds))
        for _, _, kinds in sorted(best, key=lambda each: each[:2])[:_BEST_SIZES]:
            for candidates in kinds.values():
                self._first_that_fit(node, candidates)
        self._nodes.append(node)

    def _first_that_fit(self, node: _Node, candidates: Sequence[Candidate]) -> float:
        """Score plans that differ in ZeRO, until two fit; the seconds of the faster, infinite where none does."""
        fastest, fitting = float("inf"), 0
        for candidate in candidates:
            try:
                config, overrides = self._estimator.with_stated_split(candidate.config, candidate.overrides)
                candidate = Candidate(config, tuple(overrides))
                found = self._scored(candidate, node)
            except ValueError as error:
                self._refusals.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
                break
            if found.seconds == float("inf"):
                self._misses(found.memory.fullest.total, candidate)
                continue
            node.scores.append((found.seconds, candidate))
            fastest, fitting = min(fastest, found.seconds), fitting + 1
            if fitting == 2:
                break
        node.seconds, self._best = min(node.seconds, fastest), min(self._best, fastest)
        return fastest

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
        for seconds, candidate in scored:
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


def _sizes(config: Config) -> Any:
    return config.parallel.data, config.parallel.pipeline.size, config.schedule.microbatches


def _schedule(config: Config) -> tuple[Any, ...]:
    return config.schedule.type, tuple(sorted(config.schedule.options.items())), config.parallel.pipeline.split


def _plainness(schedule: tuple[Any, ...]) -> tuple[bool, str]:
    return schedule[0] != "1f1b", repr(schedule)
