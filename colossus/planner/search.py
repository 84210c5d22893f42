"""The search of the best plans.

The search visits layouts, the likely ones first. It scores the plans of a layout that may fit, and estimates those with
the best scores in full.

A profile takes a fraction of a second, and there are hundreds of layouts. Formulas put them in order: first one of each
kind and size of tensor parallelism, then the neighbours of the best, which differ in one section. The search visits the
same plans on every machine.
"""

from __future__ import annotations

import dataclasses
import gc
import heapq
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from colossus.arithmetic import counted
from colossus.config import Config, ConfigError
from colossus.config.plans import describe_plan
from colossus.hardware.hardware import Hardware
from colossus.planner.candidates import Candidate, fully_sharded, plans, representatives
from colossus.planner.closed_form import ClosedForm
from colossus.planner.estimate import Estimator
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.layout_scores import (
    LayoutScores,
    first_of_each_kind,
    kind_of,
    neighbours,
    one_of_each_mode,
    recomputed,
)
from colossus.planner.model_layouts import ModelLayout, UsualPlan, layouts, usual_plans
from colossus.planner.plan_estimate import PlanEstimate, SearchResult, are_alike
from colossus.progress import progress

#: the most layouts scored at first; rounds of neighbours; the most neighbours of the best layout, the second, ..
_FIRST, _ROUNDS, _MORE = 10, 2, (4, 1, 1)
#: a layout is likely to fit if the lower bound of its memory is at most this part of a device's
_FULL = 0.85
#: visited layouts after which the least of their slowdowns is expected of further ones
_ENOUGH = 4
#: the fewest plans that are estimated, and how many beyond those of the result
_FEWEST, _SPARE = 10, 4
#: plans of a usual kind that are estimated to find one that fits
_TRIES = 3
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
    usual: bool = False,
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
        usual: whether the result has the usual plans, too.

    Raises:
        ConfigError: the config is wrong, or the sizes of no plan divide the model and the batch.
    """
    return _Search(config, hardware, devices, hosts, memory or hardware.memory_bytes, top, keep).run(usual)


class _Search:
    def __init__(self, config: Config, hardware: Hardware, devices: int, hosts: int, memory: float, top: int,
                 keep: Mapping[str, Any] | None) -> None:  # fmt: skip
        self._config, self._devices, self._hosts = config, devices, hosts
        self._memory, self._top = memory, top
        self._fixed = FixedKeys.of(config, keep)
        self._estimator = Estimator(hardware, hosts=hosts)
        self._form = ClosedForm(config, hardware, hosts=hosts)
        self._every: Sequence[ModelLayout] = ()
        self._nodes: dict[ModelLayout, LayoutScores] = {}
        self._visited: set[ModelLayout] = set()
        self._likely_of: dict[ModelLayout, float] = {}
        #: (bytes, number, layout) for each layout: the least memory that its plans may need
        self._least_memory: list[tuple[float, int, ModelLayout]] = []
        #: the best plan of each usual kind, or the one that exceeds the memory least
        self._usual: dict[str, Candidate] = {}
        #: (bytes, plan) of plans whose score fits, but whose estimate does not
        self._too_large: list[tuple[float, Candidate]] = []
        #: estimates of plans by their overrides
        self._estimated: dict[tuple[str, ...], PlanEstimate] = {}
        self._refusals: list[ConfigError] = []

    def run(self, usual: bool) -> SearchResult:
        with _rare_garbage():
            return self._run(usual)

    def _run(self, usual: bool) -> SearchResult:
        began, stopped = time.monotonic(), False
        try:
            self._every = layouts(self._fixed, self._devices, hosts=self._hosts)
            for kind in usual_plans(self._devices // self._hosts):
                self._score_usual(kind, exact=usual)
            self._score_layouts()
        except KeyboardInterrupt:
            stopped = True
        estimates = self._estimates()
        if not estimates and not stopped:
            for _, _, layout in heapq.nsmallest(_SMALLEST, self._least_memory):
                node = self._node(layout)
                node.score_smallest(node.every, _SMALLEST)
            estimates = self._estimates()
        too_large = [*self._too_large, *(entry for node in self._nodes.values() for entry in node.too_large)]
        nearest = min(too_large, key=_number, default=None)
        least = None
        if not estimates and nearest is not None and not stopped:
            least = self._estimator.estimate(nearest[1].config, nearest[1].overrides)
            if least.memory.fullest.total <= self._memory:  # its score needed more
                estimates, least = [least], None
        named = {}
        if usual and not stopped:
            named = {name: estimate for name, own in self._usual.items() if (estimate := self._estimate(own))}
        progress("")
        if not estimates and least is None and not stopped:
            raise self._no_plan_error()
        tried = sum(len(node.every) for node in self._nodes.values())
        return SearchResult(estimates[: self._top], tried, least, time.monotonic() - began, stopped, named)

    def _most_seconds(self) -> float:
        """Return the seconds from which on a plan would not be estimated, as there are enough better ones."""
        seconds = {seconds for node in self._nodes.values() for seconds, _ in node.scored}
        enough = max(self._top, _FEWEST) + _SPARE
        return float("inf") if len(seconds) < enough else sorted(seconds)[enough - 1]

    # -- layouts --------------------------------------------------------------------------------------------

    def _score_usual(self, kind: UsualPlan, *, exact: bool) -> None:
        """Score the plans of a usual kind, with the least recomputation that fits; by their estimates if ``exact``."""
        smallest: tuple[LayoutScores, list[Candidate]] | None = None
        for layout in kind.layouts(self._every, self._devices // self._hosts):
            node = self._node(layout)
            own = [candidate for candidate in node.every if kind.allows(candidate.config.parallel)]
            if not own:
                continue
            smallest = node, own

            def scored(node: LayoutScores = node) -> list[tuple[float, Candidate]]:
                mine = (entry for entry in node.scored if kind.allows(entry[1].config.parallel))
                return sorted(mine, key=_number)

            likely = [own for own in node.candidates if kind.allows(own.config.parallel)]
            node.score_likely(likely, lambda: min(map(_number, scored()), default=float("inf")))
            for _, candidate in scored()[:_TRIES]:
                estimate = self._estimate(candidate) if exact else None
                if not exact or (estimate is not None and estimate.memory.fullest.total <= self._memory):
                    self._usual[kind.name] = candidate
                    return
        if smallest is not None:
            node, own = smallest
            node.score_smallest(own, 1)
            too_large = [entry for entry in node.too_large if kind.allows(entry[1].config.parallel)]
            if too_large:
                self._usual[kind.name] = min(too_large, key=_number)[1]

    def _score_layouts(self) -> None:
        self._visit(sorted(first_of_each_kind(self._every, self._likely), key=self._likely), _FIRST)
        for _ in range(_ROUNDS):
            best = sorted(self._nodes.values(), key=lambda node: node.seconds)
            for node, most in zip(best, _MORE, strict=False):
                near = neighbours(node.layout, self._every)
                self._visit(one_of_each_mode(near, self._expected), most)

    def _visit(self, some: Sequence[ModelLayout], most: int) -> None:
        """Score the plans of at most ``most`` new layouts, in this order."""
        visited = 0
        for layout in some:
            if visited == most:
                break
            expected = self._expected(layout)
            if layout in self._visited or expected == float("inf") or expected > self._most_seconds():
                continue
            self._visited.add(layout)
            node = self._node(layout)
            if not node.candidates or self._is_behind(node):
                continue
            visited += 1
            progress(f"layout {len(self._visited)}: {describe_plan(node.candidates[0].config)}")
            node.score_likely(node.candidates, self._most_seconds)
            if node.too_large and layout.activation_checkpoint.type == "none":  # memory leaves small microbatches
                self._visit(recomputed(layout, self._every), 1)

    def _expected(self, layout: ModelLayout) -> float:
        """Return the likely seconds of a layout, times the least slowdown of those visited (of its kind, if any)."""
        by_kind: dict[Any, list[float]] = defaultdict(list)
        for node in self._nodes.values():
            if node.seconds < float("inf") and (likely := self._likely(node.layout)):
                by_kind[kind_of(node.layout)].append(node.seconds / likely)
        every = [slowdown for own in by_kind.values() for slowdown in own]
        least = min(by_kind[kind_of(layout)], default=min(every) if len(every) >= _ENOUGH else 1.0)
        return self._likely(layout) * least

    def _is_behind(self, node: LayoutScores) -> bool:
        """Return whether the recording of the same layout with less recomputation shows that all plans are too slow."""
        if node.layout.activation_checkpoint.type == "none":
            return False
        for other in self._nodes.values():
            less = dataclasses.replace(node.layout, activation_checkpoint=other.layout.activation_checkpoint)
            if other.is_recorded and less == other.layout and other.layout.activation_checkpoint.type == "none":
                return other.least_seconds_of(node) > self._most_seconds()
        return False

    def _likely(self, layout: ModelLayout) -> float:
        """Return the likely seconds of a layout's best plan, by formula; infinite if none fits."""
        if layout not in self._likely_of:
            rough = representatives(self._fixed, self._devices, layout, hosts=self._hosts)
            least = [self._form.memory(fully_sharded(self._fixed, config)) for config in rough]
            most = _FULL * self._memory
            fitting = [config for config, size in zip(rough, least, strict=True) if size <= most]
            self._likely_of[layout] = min(map(self._form.seconds, fitting), default=float("inf") if rough else 0.0)
            self._least_memory += [(min(least), len(self._likely_of), layout)] if least else []
        return self._likely_of[layout]

    def _node(self, layout: ModelLayout) -> LayoutScores:
        if layout not in self._nodes:
            every = plans(self._fixed, self._devices, layout, hosts=self._hosts)
            self._nodes[layout] = LayoutScores(layout, every, self._estimator, self._form, self._memory)
        return self._nodes[layout]

    # -- estimates ------------------------------------------------------------------------------------------

    def _estimates(self) -> list[PlanEstimate]:
        """Estimate the plans with the best scores, and return those that fit, the best first."""
        scored = [(*entry, node.layout) for node in self._nodes.values() for entry in node.scored]
        estimates: list[PlanEstimate] = []
        listed: set[Any] = set()
        tries = 0
        most = max(self._top, _FEWEST)  # also for a short list: a worse score may turn out to be the better plan
        for seconds, candidate, layout in sorted(scored, key=_number):
            if len(estimates) >= most and seconds > 1.05 * sorted(plan.seconds for plan in estimates)[most - 1]:
                break
            if len(estimates) and tries >= most + _SPARE:
                break
            key = layout, candidate.all_but_zero, f"{seconds:.3g}"  # forms of ZeRO that take as long
            estimate = None if key in listed else self._estimate(candidate)
            if estimate is None:
                continue
            tries += 1
            if estimate.memory.fullest.total > self._memory:
                self._too_large.append((estimate.memory.fullest.total, candidate))
            elif not any(are_alike(estimate, other) for other in estimates):
                estimates.append(estimate)
                listed.add(key)
        return sorted(estimates, key=lambda plan: plan.seconds)

    def _estimate(self, candidate: Candidate) -> PlanEstimate | None:
        """Return the estimate of a plan, None if it is refused."""
        if candidate.overrides not in self._estimated:
            try:
                estimate = self._estimator.estimate(candidate.config, candidate.overrides)
            except ConfigError as error:
                self._refusals.append(error)
                return None
            self._estimated[candidate.overrides] = estimate
        return self._estimated[candidate.overrides]

    def _no_plan_error(self) -> ConfigError:
        refusals = [*self._refusals, *(error for node in self._nodes.values() for error in node.refusals)]
        if refusals:
            return refusals[0]
        batch = self._config.train.global_batch_size
        keys = f" and the fixed keys {', '.join(sorted(self._fixed.keys))}" if self._fixed.keys else ""
        return ConfigError(
            f"no plan for {counted(self._devices, 'device')} fits this model, its batch of {batch} samples{keys}: "
            f"their sizes do not divide",
            self._config.source,
        )


@contextmanager
def _rare_garbage() -> Iterator[None]:
    """Look for cycles of garbage rarely inside the context, among new objects: recordings make many of them."""
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def _number(entry: tuple[float, *tuple[Any, ...]]) -> float:
    return entry[0]
