"""The order in which a search visits layouts, and the scores of the plans of one layout."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from colossus.config import ConfigError
from colossus.planner.candidates import Candidate
from colossus.planner.closed_form import ClosedForm
from colossus.planner.estimate import Estimator
from colossus.planner.model_layouts import SCOPES, ModelLayout
from colossus.planner.score import Score, block_seconds, score, seconds_by_count

#: the most ranks of a sequence in the first layouts: the profile of a ring takes as many steps
_FEW = 4


def is_plain(layout: ModelLayout) -> bool:
    """Return whether a search may begin with this layout.

    Such a layout has 1D tensor parallelism with activations split by tokens (which sends as much and saves less), or
    another mode that gathers weights once per step; a ring or Ulysses over few ranks; no or full checkpointing.
    """
    tensor, sequence = layout.tensor, layout.sequence
    if tensor.mode == "1d":
        is_plain_tensor = tensor.size == 1 or tensor.sequence_sharded
    else:
        is_plain_tensor = tensor.weights == "step"
    is_plain_sequence = sequence.mode != "hybrid" and sequence.size <= _FEW
    return is_plain_tensor and is_plain_sequence and layout.activation_checkpoint.type != "selective"


def first_of_each_kind(every: Sequence[ModelLayout], likely: Callable[[ModelLayout], float]) -> list[ModelLayout]:
    """Return the best plain layout of each mode of tensor parallelism, in 1D of each size, and number of expert ranks.

    Layouts without recomputation come before those with. Layouts without a plan that fits are left out. If no layout is
    plain, the first ones are returned.

    Args:
        every: all layouts.
        likely: likely seconds of a layout's best plan, infinite if none fits.
    """
    best: dict[Any, tuple[tuple[bool, float], ModelLayout]] = {}
    for layout in filter(is_plain, every):
        tensor = layout.tensor
        kind = tensor.mode, tensor.size if tensor.mode == "1d" else None, layout.expert
        rank = layout.activation_checkpoint.type != "none", likely(layout)
        if rank[1] < float("inf") and (kind not in best or rank < best[kind][0]):
            best[kind] = rank, layout
    return [layout for _, layout in best.values()] or [*every[:_FEW]]


def kind_of(layout: ModelLayout) -> tuple[str, bool, str | None]:
    """Return a key of layouts whose seconds exceed the closed form by about the same factor."""
    tensor = layout.tensor
    return tensor.mode, tensor.size > 1 and not tensor.sequence_sharded, layout.sequence.mode


def one_of_each_mode(some: Iterable[ModelLayout], likely: Callable[[ModelLayout], float]) -> list[ModelLayout]:
    """Return layouts with the likeliest of each mode of tensor parallelism first, then the second of each, and so on.

    The closed forms are nearer to each other within a mode than between modes: without this the variants of one mode
    would be all that is tried.
    """
    before: Counter[str] = Counter()
    places: list[tuple[int, ModelLayout]] = []
    for layout in sorted(some, key=likely):
        places.append((before[layout.tensor.mode], layout))
        before[layout.tensor.mode] += 1
    return [layout for _, layout in sorted(places, key=lambda place: place[0])]


def recomputed(layout: ModelLayout, every: Sequence[ModelLayout]) -> list[ModelLayout]:
    """Return the same layout with full checkpointing, if there is one."""
    return [
        other
        for other in every
        if (other.tensor, other.sequence, other.expert) == (layout.tensor, layout.sequence, layout.expert)
        and other.activation_checkpoint.type == "full"
    ]


def neighbours(layout: ModelLayout, every: Sequence[ModelLayout]) -> Iterator[ModelLayout]:
    """Yield the layouts that differ in one of tensor mode and size, sequence, expert ranks and checkpointing.

    Sizes differ at most by a factor of two.
    """
    for other in every:
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


#: for a layout, the most combinations of replicas, stages, microbatches and schedule that are scored
_MOST_SIZES = 10
#: the least part of a forward, which takes a third of a microbatch, that full recomputation repeats
_REPEATED = 0.6


@dataclass
class LayoutScores:
    """A layout that the search has visited.

    Attributes:
        layout: the layout.
        every: its plans.
        candidates: those that may fit by the lower bound of their memory.
        estimator: estimator of plans.
        form: closed forms of plans.
        memory: bytes of a device.
        scored: (seconds, plan) of the scored plans that fit.
        too_large: (bytes, plan) of those that do not.
        refusals: errors of plans that cannot be scored.
        is_recorded: whether the layout has a profile.
    """

    layout: ModelLayout
    every: Sequence[Candidate]
    estimator: Estimator
    form: ClosedForm
    memory: float
    scored: list[tuple[float, Candidate]] = field(default_factory=list)
    too_large: list[tuple[float, Candidate]] = field(default_factory=list)
    refusals: list[ConfigError] = field(default_factory=list)
    is_recorded: bool = False
    _tried: dict[tuple[str, ...], float] = field(default_factory=dict)
    _microbatches: dict[int, float] = field(default_factory=dict)

    @cached_property
    def candidates(self) -> list[Candidate]:
        return [candidate for candidate in self.every if self.form.memory(candidate.config) <= self.memory]

    @cached_property
    def profiled(self) -> Candidate:
        """Return the plan that is profiled for all: one with the smallest microbatch, and ZeRO if there is a choice."""
        return min(self.every, key=lambda candidate: (candidate.samples, not candidate.config.parallel.zero.stage))

    @property
    def seconds(self) -> float:
        """Return the seconds of its best plan, or infinite."""
        return min((seconds for seconds, _ in self.scored), default=float("inf"))

    def score_likely(self, candidates: Sequence[Candidate], most: Callable[[], float]) -> float:
        """Score the plans that are likely by the profile; of those that differ in ZeRO, the first that fit.

        Args:
            candidates: plans of the layout.
            most: returns the seconds that a plan may take to be of interest.

        Returns:
            The seconds of the best of these plans, infinite if none fits.
        """
        if not candidates:
            return float("inf")
        groups: dict[Any, list[Candidate]] = {}
        for candidate in candidates:
            groups.setdefault(candidate.all_but_zero, []).append(candidate)
        for group in groups.values():
            group.sort(key=self._size_of, reverse=True)
        try:
            self.is_recorded = bool(self.estimator.profile(self.profiled.config, split_backward=False))
        except ConfigError as error:
            self.refusals.append(error)
            return float("inf")

        def likely(group: Sequence[Candidate]) -> float:
            return seconds_by_count(group[0].config, self._microbatch(group[0].samples))

        #: plans of 1F1B with the least memory, by pipeline ranks and samples: other schedules save as much, or more
        smallest = {group[0].size: group[-1] for group in groups.values() if group[0].config.schedule.type == "1f1b"}

        def is_too_large(size: tuple[int, int]) -> bool:
            fewer = min((other for other in smallest if other[0] == size[0]), default=size)
            plain = [smallest[place] for place in (fewer, size) if place in smallest]
            return any(self.score(candidate) == float("inf") for candidate in plain)

        best, fitting = float("inf"), 0
        for group in sorted(groups.values(), key=likely):
            if fitting == _MOST_SIZES or likely(group) > most():
                break
            if not is_too_large(group[0].size):
                seconds = self._score_first_that_fit(group)
                best, fitting = min(best, seconds), fitting + (seconds < float("inf"))
        return best

    def _microbatch(self, samples: int, *, again: float = 0.0) -> float:
        """Return the seconds of a microbatch in all stages, and ``again`` times those of its forward."""
        if samples not in self._microbatches:
            profile = self.estimator.profile(self.profiled.config, split_backward=False)
            player = self.estimator.player(self.profiled.config, samples / self.profiled.samples)
            self._microbatches[samples] = sum(block_seconds(profile, player))
        return self._microbatches[samples] * (1 + again / 3)

    def least_seconds_of(self, other: LayoutScores) -> float:
        """Return a lower bound of the seconds of another layout's plans, which recomputes more and is else the same."""
        again = _REPEATED if other.layout.activation_checkpoint.type == "full" else 0.0
        return min(
            (seconds_by_count(own.config, self._microbatch(own.samples, again=again)) for own in other.candidates),
            default=float("inf"),
        )

    def score_smallest(self, candidates: Sequence[Candidate], number: int) -> None:
        """Score the plans that may need least, to find one that fits or how much is missing."""
        for candidate in sorted(candidates, key=self._size_of)[:number]:
            self.score(candidate)

    def _size_of(self, candidate: Candidate) -> tuple[float, int]:
        """Return a key of a plan's memory: the lower bound, and how long gathered weights stay."""
        return self.form.memory(candidate.config), SCOPES.index(candidate.config.parallel.tensor.weights)

    def _score_first_that_fit(self, candidates: Sequence[Candidate]) -> float:
        """Score the first plan that fits, by bisection, and the next one; return the seconds of the faster of the two.

        The plans differ in ZeRO. Those that need most memory, and send least, come first. If none fits, the result is
        infinite.
        """
        low, high = 0, len(candidates) - 1
        tried = [self.score(candidates[high])]
        while low < high and tried[0] < float("inf"):
            middle = (low + high) // 2
            tried.append(self.score(candidates[middle]))
            low, high = (low, middle) if tried[-1] < float("inf") else (middle + 1, high)
        if tried[0] < float("inf"):
            tried += [self.score(other) for other in candidates[low + 1 : low + 2]]
        return min(tried)

    def score(self, candidate: Candidate) -> float:
        """Return the seconds of a plan, infinite if it does not fit."""
        if candidate.overrides not in self._tried:
            self._tried[candidate.overrides] = self._score_new(candidate)
        return self._tried[candidate.overrides]

    def _score_new(self, candidate: Candidate) -> float:
        try:
            config, overrides = self.estimator.with_stated_split(candidate.config, candidate.overrides)
            candidate = Candidate(config, tuple(overrides))
            result = self._score_of(candidate)
        except ValueError as error:
            self.refusals.append(error if isinstance(error, ConfigError) else ConfigError(str(error)))
            return float("inf")
        if result.seconds == float("inf"):
            self.too_large.append((result.memory.fullest.total, candidate))
        else:
            self.scored.append((result.seconds, candidate))
        return result.seconds

    def _score_of(self, candidate: Candidate) -> Score:
        """Score a plan by the profile of its layout with the smallest microbatch."""
        first, config = self.profiled, candidate.config
        profile = self.estimator.profile(first.config, split_backward=False)
        times = candidate.samples / first.samples
        return score(config, profile, self.estimator.player(config, times), times=times, most=self.memory)
