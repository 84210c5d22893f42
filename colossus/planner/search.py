"""The search of the best plans.

The search visits layouts, the likely ones first. It scores the plans of a layout that the lower bounds allow, and
estimates those with the best scores in full.

A profile takes a fraction of a second, and there are hundreds of layouts. Formulas put them in order: first one of each
kind and size of tensor parallelism, then the neighbours of the best, which differ in one section. The search visits the
same plans on every machine.
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
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.layout_order import first_of_each_kind, fully_sharded, neighbours, recomputed, representatives
from colossus.planner.lower_bounds import LowerBounds
from colossus.planner.model_layouts import SCOPES, ModelLayout, layouts
from colossus.planner.plan_estimate import PlanEstimate, are_alike
from colossus.planner.score import Score, score, seconds_by_count, seconds_of_microbatch
from colossus.planner.search_result import SearchResult
from colossus.progress import progress

#: the most layouts scored at first; rounds of neighbours, the best layouts that they are neighbours of, and the most
#: layouts scored for each
_FIRST, _ROUNDS, _BEST_LAYOUTS, _MORE = 10, 2, 3, 3
#: a layout is scored if its likely seconds are at most this factor times those of the best plan
_FAR = 2.0
#: for a layout, the most combinations of replicas, stages, microbatches and schedule that are scored, and the factor of
#: its best plan's seconds that their likely seconds may reach
_MOST_SIZES, _NEAR = 10, 1.25
#: the fewest plans that are estimated, and how many beyond those of the result
_FEWEST, _SPARE = 10, 4
#: layouts, and plans of each, whose memory is predicted if no plan fits
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
    """Search the best plans of a model and its data.

    Args:
        config: the user's config; its own plan only counts for the keys in ``keep``; its global batch stays.
        hardware: speed of devices and links.
        devices: ranks of a plan.
        hosts: hosts over which the devices are spread evenly.
        memory: bytes of a device; by default those of the hardware.
        top: number of plans in the result.
        keep: keys that every plan has, see `colossus.planner.fixed_keys.FixedKeys`.

    Raises:
        ConfigError: the config is wrong, or the sizes of no plan divide the model and the batch.
    """
    return _Search(config, hardware, devices, hosts, memory or hardware.memory_bytes, top, keep).run()


@dataclass
class _Node:
    """A layout that the search has visited.

    Attributes:
        layout: the layout.
        candidates: (lower bound, number, plan), the least bound first.
        seconds: seconds of its best scored plan, or infinite.
        scores: (seconds, plan) of the scored plans that fit.
        tried: seconds of all scored plans by their overrides, infinite for those that do not fit.
    """

    layout: ModelLayout
    candidates: list[tuple[float, int, Candidate]]
    seconds: float = float("inf")
    scores: list[tuple[float, Candidate]] = field(default_factory=list)
    tried: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def bound(self) -> float:
        return self.candidates[0][0]

    @cached_property
    def profiled(self) -> Candidate:
        """Return the plan that is profiled for all: the one with the smallest microbatch."""
        return min((candidate for _, _, candidate in self.candidates), key=lambda candidate: candidate.samples)


class _Search:
    def __init__(self, config: Config, hardware: Hardware, devices: int, hosts: int, memory: float, top: int,
                 keep: Mapping[str, Any] | None) -> None:  # fmt: skip
        self._config, self._devices, self._hosts = config, devices, hosts
        self._memory, self._top, self._keep = memory, top, keep
        self._fixed = FixedKeys.of(config, keep)
        self._estimator = Estimator(hardware, hosts=hosts)
        self._bounds = LowerBounds(config, hardware, hosts=hosts)
        self._best = float("inf")
        self._tried = 0
        self._seen: set[ModelLayout] = set()
        self._refusals: list[ConfigError] = []
        self._nodes: list[_Node] = []
        self._every: Sequence[ModelLayout] = ()
        self._likely_of: dict[ModelLayout, float] = {}
        #: (bytes, number, layout) for each layout: the least memory that its plans may need
        self._least_memory: list[tuple[float, int, ModelLayout]] = []
        #: (bytes, plan) of the plan that exceeds the memory least
        self._nearest: tuple[float, Candidate] | None = None

    def run(self) -> SearchResult:
        began, stopped = time.monotonic(), False
        try:
            self._score_layouts()
        except KeyboardInterrupt:
            stopped = True
        estimates = self._estimates()
        nearest = None
        if not estimates and not stopped:
            self._score_smallest()
            estimates = self._estimates()
        if not estimates and self._nearest is not None and not stopped:
            nearest = self._estimator.estimate(self._nearest[1].config, self._nearest[1].overrides)
        progress("")
        if not estimates and nearest is None and not stopped:
            raise self._no_plan_error()
        return SearchResult(estimates[: self._top], self._tried, nearest, time.monotonic() - began, stopped)

    # -- layouts --------------------------------------------------------------------------------------------

    def _score_layouts(self) -> None:
        self._every = every = layouts(self._config, self._devices, hosts=self._hosts, keep=self._keep)
        self._visit(first_of_each_kind(every, self._likely), _FIRST)
        for _ in range(_ROUNDS):
            best = sorted(self._nodes, key=lambda node: node.seconds)[:_BEST_LAYOUTS]
            near = [other for node in best for other in neighbours(node.layout, every)]
            self._visit(near, _MORE)

    def _visit(self, some: Sequence[ModelLayout], most: int) -> None:
        """Score the plans of at most ``most`` new layouts, the likely ones first."""
        new = [(self._likely(layout), number, layout) for number, layout in enumerate(some) if layout not in self._seen]
        visited = 0
        for likely, _, layout in sorted(new, key=lambda numbered: numbered[:2]):
            if visited == most or likely == float("inf") or likely > _FAR * self._best:
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
        """Return the likely seconds of a layout's best plan, by formula; infinite if none fits."""
        if layout not in self._likely_of:
            rough = representatives(self._config, self._devices, layout)
            least = [self._bounds.memory(fully_sharded(config)) for config in rough]
            fitting = [config for config, size in zip(rough, least, strict=True) if size <= self._memory]
            self._likely_of[layout] = min(map(self._bounds.likely, fitting), default=0.0 if not rough else float("inf"))
            self._least_memory += [(min(least), len(self._likely_of), layout)] if least else []
        return self._likely_of[layout]

    def _node(self, layout: ModelLayout) -> _Node | None:
        """Return a layout with its plans that may fit, None without such plans."""
        candidates = []
        every = plans(self._config, self._devices, layout, hosts=self._hosts, keep=self._keep)
        for number, candidate in enumerate(every):
            if self._bounds.memory(candidate.config) > self._memory:
                self._tried += 1
            else:
                candidates.append((self._bounds.seconds(candidate.config), number, candidate))
        return _Node(layout, sorted(candidates, key=lambda numbered: numbered[:2])) if candidates else None

    def _record_too_large(self, needed: float, candidate: Candidate) -> None:
        if self._nearest is None or needed < self._nearest[0]:
            self._nearest = needed, candidate

    def _score_smallest(self) -> None:
        """Score the smallest plans of the layouts that may need least, to find one that fits or how much is missing."""
        for _, _, layout in heapq.nsmallest(_SMALLEST, self._least_memory):
            candidates = plans(self._config, self._devices, layout, hosts=self._hosts, keep=self._keep)
            candidates.sort(key=self._size_of, reverse=True)
            for candidate in candidates[-_SMALLEST:]:
                self._nodes.append(_Node(layout, [(0.0, 0, candidate)]))
                self._score_one(self._nodes[-1], candidate)

    def _size_of(self, candidate: Candidate) -> tuple[float, int]:
        """Return a key of a plan's memory: the lower bound, and how long gathered weights stay."""
        return self._bounds.memory(candidate.config), SCOPES.index(candidate.config.parallel.tensor.weights)

    # -- plans ----------------------------------------------------------------------------------------------

    def _score(self, node: _Node) -> None:
        """Score the plans of a layout that are likely by its profile; of plans that differ in ZeRO, the first that fit.

        See `_first_that_fit`.
        """
        progress(f"layout {len(self._nodes) + 1}: {describe_plan(node.candidates[0][2].config)}")
        self._nodes.append(node)
        self._tried += len(node.candidates)
        groups: dict[Any, list[Candidate]] = {}
        for _, _, candidate in node.candidates:
            groups.setdefault(candidate.all_but_zero, []).append(candidate)
        for group in groups.values():
            group.sort(key=self._size_of, reverse=True)
        first = node.profiled
        try:
            profile = self._estimator.profile(first.config, split_backward=False)
        except ConfigError as error:
            self._refusals.append(error)
            return
        by_samples: dict[int, float] = {}

        def likely(group: Sequence[Candidate]) -> float:
            samples = group[0].samples
            if samples not in by_samples:
                player = self._estimator.player(first.config, samples / first.samples)
                by_samples[samples] = seconds_of_microbatch(profile, player)
            return seconds_by_count(group[0].config, by_samples[samples])

        plain = [group for group in groups.values() if group[0].config.schedule.type == "1f1b"]
        too_large = {group[0].size for group in plain if self._score_one(node, group[-1]) == float("inf")}
        scored = 0
        for group in sorted(groups.values(), key=likely):
            if group[0].size in too_large:  # other schedules save as much, or more
                continue
            if scored == _MOST_SIZES or likely(group) > min(_NEAR * node.seconds, self._best * _FAR):
                break
            scored += self._first_that_fit(node, group) < float("inf")

    def _first_that_fit(self, node: _Node, candidates: Sequence[Candidate]) -> float:
        """Score the first plan that fits, by bisection, and the next one; return the seconds of the faster of the two.

        The plans differ in ZeRO. Those that need most memory, and send least, come first. If none fits, the result is
        infinite.
        """
        low, high = 0, len(candidates) - 1
        tried = [self._score_one(node, candidates[high])]
        while low < high and tried[0] < float("inf"):
            middle = (low + high) // 2
            tried.append(self._score_one(node, candidates[middle]))
            low, high = (low, middle) if tried[-1] < float("inf") else (middle + 1, high)
        if tried[0] < float("inf"):
            tried += [self._score_one(node, other) for other in candidates[low + 1 : low + 2]]
        return min(tried)

    def _score_one(self, node: _Node, candidate: Candidate) -> float:
        """Return the seconds of a plan, infinite if it does not fit."""
        if candidate.overrides not in node.tried:
            node.tried[candidate.overrides] = self._score_new(node, candidate)
        return node.tried[candidate.overrides]

    def _score_new(self, node: _Node, candidate: Candidate) -> float:
        try:
            config, overrides = self._estimator.with_stated_split(candidate.config, candidate.overrides)
            candidate = Candidate(config, tuple(overrides))
            result = self._score_of(candidate, node)
        except ValueError as error:
            self._refusals.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
            return float("inf")
        if result.seconds == float("inf"):
            self._record_too_large(result.memory.fullest.total, candidate)
        else:
            node.scores.append((result.seconds, candidate))
            node.seconds, self._best = min(node.seconds, result.seconds), min(self._best, result.seconds)
        return result.seconds

    def _score_of(self, candidate: Candidate, node: _Node) -> Score:
        """Score a plan by the profile of its layout with the smallest microbatch."""
        first, config = node.profiled, candidate.config
        profile = self._estimator.profile(first.config, split_backward=False)
        times = candidate.samples / first.samples
        return score(config, profile, self._estimator.player(config, times), times=times, most=self._memory)

    def _estimates(self) -> list[PlanEstimate]:
        """Estimate the plans with the best scores, and return those that fit, the best first."""
        scored = sorted((entry for node in self._nodes for entry in node.scores), key=lambda entry: entry[0])
        estimates: list[PlanEstimate] = []
        most = max(self._top, _FEWEST)  # also for a short list: a worse score may turn out to be the better plan
        for seconds, candidate in scored:
            if len(estimates) >= most and seconds > 1.05 * sorted(plan.seconds for plan in estimates)[most - 1]:
                break
            if len(estimates) >= most + _SPARE:
                break
            try:
                estimate = self._estimator.estimate(candidate.config, candidate.overrides)
            except ConfigError as error:
                self._refusals.append(error)
                continue
            if estimate.memory.fullest.total > self._memory:
                self._record_too_large(estimate.memory.fullest.total, candidate)
            elif not any(are_alike(estimate, other) for other in estimates):
                estimates.append(estimate)
        return sorted(estimates, key=lambda plan: plan.seconds)

    def _no_plan_error(self) -> ConfigError:
        if self._refusals:
            return self._refusals[0]
        batch = self._config.train.global_batch_size
        keys = f" and the fixed keys {', '.join(sorted(self._fixed.keys))}" if self._fixed.keys else ""
        return ConfigError(
            f"no plan for {counted(self._devices, 'device')} fits this model, its batch of {batch} samples{keys}: "
            f"their sizes do not divide",
            self._config.source,
        )
