"""The search of the best plans: layouts best first, of each the plans that a lower bound leaves; those with the best
scores are estimated in full.

A profile takes a fraction of a second, and there are hundreds of layouts. They are put in order by formula: first one
of each kind and size of tensor parallelism, then the neighbours of the best, which differ in one thing. The same plans
are looked at on every machine.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from colossus.arithmetic import counted
from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan
from colossus.hardware.hardware import Hardware
from colossus.planner.candidates import Candidate, plans
from colossus.planner.estimate import Estimator
from colossus.planner.kept import Kept
from colossus.planner.layout_order import first_of_each_kind, neighbours, recomputed, representatives
from colossus.planner.lower_bounds import LowerBounds
from colossus.planner.model_layouts import ModelLayout, layouts
from colossus.planner.plan_estimate import PlanEstimate, are_alike
from colossus.planner.score import Score, score, seconds_by_count, seconds_of_microbatch
from colossus.planner.search_result import SearchResult
from colossus.progress import progress

#: layouts whose plans are scored at most: of different kinds to begin with, then in each round next to the best
_FIRST, _ROUNDS, _BEST_LAYOUTS, _MORE = 10, 2, 3, 3
#: how much slower than the best plan a layout may be thought to be, that its plans are scored
_FAR = 2.0
#: of a layout, products of replicas, stages, microbatches and schedules that are scored, and how much slower than its
#: best plan they may be thought to be
_MOST_SIZES, _NEAR = 10, 1.25
#: plans that are estimated at least, and beyond those of the result
_FEWEST, _SPARE = 10, 4
#: layouts and plans whose memory is looked at where none fits
_SMALLEST = 4


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
        scores: of those that fit.
        known: by overrides the seconds of all that were scored, infinite of those that do not fit.
    """

    layout: ModelLayout
    candidates: list[tuple[float, int, Candidate]]
    seconds: float = float("inf")
    scores: list[tuple[float, Candidate]] = field(default_factory=list)
    known: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        return self.candidates[0][0]

    @cached_property
    def profiled(self) -> Candidate:
        """The plan of whose layout a profile is taken: with the smallest microbatch."""
        return min((candidate for _, _, candidate in self.candidates), key=lambda each: each.samples)


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
        self._kept = Kept.of(config, keep)
        self._estimator = Estimator(hardware, hosts=hosts)
        self._bounds = LowerBounds(config, hardware, hosts=hosts)
        self._best = float("inf")
        self._tried = 0
        self._seen: set[ModelLayout] = set()
        self._refusals: list[ConfigError] = []
        self._nodes: list[_Node] = []
        self._every: Sequence[ModelLayout] = ()
        self._likely_of: dict[ModelLayout, float] = {}
        #: layouts with the least memory that they may need
        self._too_large: list[tuple[float, int, ModelLayout]] = []
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
        self._every = every = layouts(self._config, self._devices, hosts=self._hosts, keep=self._keep)
        self._visit(first_of_each_kind(every, self._likely), _FIRST)
        for _ in range(_ROUNDS):
            best = sorted(self._nodes, key=lambda node: node.seconds)[:_BEST_LAYOUTS]
            near = [other for node in best for other in neighbours(node.layout, every)]
            self._visit(near, _MORE)

    def _visit(self, some: Sequence[ModelLayout], most: int) -> None:
        """Score the plans of so many layouts that have not been, the likely ones first."""
        waiting = []
        for number, layout in enumerate(some):
            if layout not in self._seen:
                likely = self._likely(layout)
                if likely < float("inf"):
                    waiting.append((likely, number, layout))
        visited = 0
        for likely, _, layout in sorted(waiting, key=lambda each: each[:2]):
            if visited == most or likely > _FAR * self._best:
                break
            self._seen.add(layout)
            node = self._node(layout)
            if node is None or node.bound >= self._best:
                continue
            visited += 1
            self._score(node)
            if node.seconds == float("inf") and layout.activation_checkpoint.type == "none":
                self._visit(recomputed(layout, self._every), 1)

    def _likely(self, layout: ModelLayout) -> float:
        """Seconds of the best plan of a layout, by formula; infinite where none fits."""
        known = self._likely_of.get(layout)
        if known is None:
            rough = representatives(self._config, self._devices, layout)
            fitting = [config for config in rough if self._bounds.memory(config) <= self._memory]
            known = min(map(self._bounds.likely, fitting), default=0.0 if not rough else float("inf"))
            self._likely_of[layout] = known
            self._too_large += [(self._bounds.memory(config), len(self._likely_of), layout) for config in rough[-1:]]
        return known

    def _node(self, layout: ModelLayout) -> _Node | None:
        """The plans of a layout; None where it has none that fit."""
        found = []
        for number, candidate in enumerate(
            plans(self._config, self._devices, layout, hosts=self._hosts, keep=self._keep)
        ):
            if self._bounds.memory(candidate.config) > self._memory:
                self._tried += 1
            else:
                found.append((self._bounds.seconds(candidate.config), number, candidate))
        return _Node(layout, sorted(found, key=lambda each: each[:2])) if found else None

    def _misses(self, needed: float, candidate: Candidate) -> None:
        if self._nearest is None or needed < self._nearest[0]:
            self._nearest = needed, candidate

    def _look_at_the_smallest(self) -> None:
        """Of the layouts that their lower bounds rule out, how much the smallest need."""
        for _, _, layout in heapq.nsmallest(_SMALLEST, self._too_large):
            made = plans(self._config, self._devices, layout, hosts=self._hosts, keep=self._keep)
            made.sort(key=lambda candidate: self._bounds.memory(candidate.config))
            for candidate in made[:_SMALLEST]:
                self._first_that_fit(_Node(layout, [(0.0, 0, candidate)]), [candidate])

    # -- plans ----------------------------------------------------------------------------------------------

    def _score(self, node: _Node) -> None:
        """Score the plans of a layout that its profile makes likely: of those that differ in ZeRO only, the first two
        that fit."""
        progress(f"layout {len(self._nodes) + 1}: {describe_plan(node.candidates[0][2].config)}")
        self._nodes.append(node)
        self._tried += len(node.candidates)
        groups: dict[Any, list[Candidate]] = {}
        for _, _, candidate in node.candidates:
            groups.setdefault(candidate.all_but_zero, []).append(candidate)
        for group in groups.values():
            group.sort(key=lambda each: -self._bounds.memory(each.config))
        first = node.profiled
        try:
            profile = self._estimator.profile(first.config, split_backward=False)
        except ConfigError as error:
            self._refusals.append(error)
            return
        by_samples: dict[int, float] = {}

        def likely(of: Sequence[Candidate]) -> float:
            samples = of[0].samples
            if samples not in by_samples:
                player = self._estimator.player(first.config, samples / first.samples)
                by_samples[samples] = seconds_of_microbatch(profile, player)
            return seconds_by_count(of[0].config, by_samples[samples])

        plain = [group for group in groups.values() if group[0].config.schedule.type == "1f1b"]
        too_large = {group[0].size for group in plain if self._score_one(node, group[-1]) == float("inf")}
        scored = 0
        for group in sorted(groups.values(), key=likely):
            if group[0].size in too_large:  # other schedules keep as much, or more
                continue
            if scored == _MOST_SIZES or likely(group) > min(_NEAR * node.seconds, self._best * _FAR):
                break
            scored += self._first_that_fit(node, group) < float("inf")

    def _first_that_fit(self, node: _Node, candidates: Sequence[Candidate]) -> float:
        """Score plans that differ in ZeRO, those that need most first: of those that fit two, which send least. Gives
        the seconds of the faster, infinite where none fits."""
        low, high = 0, len(candidates) - 1  # the first that fits is looked for as in a sorted list
        tried = [self._score_one(node, candidates[high])]
        while low < high and tried[0] < float("inf"):
            middle = (low + high) // 2
            tried.append(self._score_one(node, candidates[middle]))
            low, high = (low, middle) if tried[-1] < float("inf") else (middle + 1, high)
        if tried[0] < float("inf"):
            tried += [self._score_one(node, other) for other in candidates[low + 1 : low + 2]]
        return min(tried)

    def _score_one(self, node: _Node, candidate: Candidate) -> float:
        """The seconds of a plan, infinite where it does not fit."""
        known = node.known.get(candidate.overrides)
        if known is None:
            known = node.known[candidate.overrides] = self._score_first(node, candidate)
        return known

    def _score_first(self, node: _Node, candidate: Candidate) -> float:
        try:
            config, overrides = self._estimator.with_stated_split(candidate.config, candidate.overrides)
            candidate = Candidate(config, tuple(overrides))
            found = self._scored(candidate, node)
        except ValueError as error:
            self._refusals.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
            return float("inf")
        if found.seconds == float("inf"):
            self._misses(found.memory.fullest.total, candidate)
        else:
            node.scores.append((found.seconds, candidate))
            node.seconds, self._best = min(node.seconds, found.seconds), min(self._best, found.seconds)
        return found.seconds

    def _scored(self, candidate: Candidate, node: _Node) -> Score:
        """By the profile of the layout with the smallest microbatch."""
        first, config = node.profiled, candidate.config
        profile = self._estimator.profile(first.config, split_backward=False)
        times = candidate.samples / first.samples
        return score(config, profile, self._estimator.player(config, times), times=times, most=self._memory)

    def _estimates(self) -> list[PlanEstimate]:
        """Of the plans with the best scores, those that fit, best first."""
        scored = sorted((each for node in self._nodes for each in node.scores), key=lambda each: each[0])
        found: list[PlanEstimate] = []
        most = max(self._top, _FEWEST)  # of few plans the best may be another than the best of many
        for seconds, candidate in scored:
            if len(found) >= most and seconds > 1.05 * sorted(each.seconds for each in found)[most - 1]:
                break
            if len(found) >= most + _SPARE:
                break
            try:
                estimate = self._estimator.estimate(candidate.config, candidate.overrides)
            except ConfigError as error:
                self._refusals.append(error)
                continue
            if estimate.memory.fullest.total <= self._memory:
                if all(not are_alike(estimate, other) for other in found):
                    found.append(estimate)
            else:
                self._misses(estimate.memory.fullest.total, candidate)
        return sorted(found, key=lambda each: each.seconds)

    def _nothing(self) -> ConfigError:
        if self._refusals:
            return self._refusals[0]
        batch = self._config.train.global_batch_size
        kept = f", and what is kept ({'; '.join(sorted(self._kept.keys))})" if self._kept.keys else ""
        return ConfigError(
            f"no plan of {counted(self._devices, 'device')} fits this model, its batch of {batch} samples{kept}: their "
            f"sizes do not divide",
            self._config.source,
        )
