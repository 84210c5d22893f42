"""What a plan costs: the seconds of a step, its bytes, its memory. One estimate for all commands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.context.grid import build_grid
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.candidates import samples_of
from colossus.planner.layout_blocks import LayoutProfile
from colossus.planner.layout_profile import profile_layout
from colossus.planner.memory import memory_of
from colossus.planner.plan_estimate import AxisCost, PlanEstimate, extended
from colossus.planner.plan_stages import layout_config, layout_key, splits_backward, stages_of
from colossus.planner.rank_memory import PlanMemory
from colossus.planner.step_timeline import RankTimeline, play_step
from colossus.planner.time_split import split_by_time
from colossus.planner.trace import AttentionCall, Product, Trace
from colossus.planner.trace_seconds import TracePlayer, update_seconds
from colossus.registry import STRATEGIES
from colossus.schedule.simulate import Simulation, Span

#: a pipeline is in its steady state after so many microbatches for each rank: more of them take as long, each
_FEW = 2


class Estimator:
    """Estimates plans of one model and its data on devices of one kind. Profiles of layouts are kept.

    Args:
        hosts: over which the devices of a plan are spread equally, in the order of ranks.
    """

    def __init__(self, hardware: Hardware, *, hosts: int = 1) -> None:
        self.hardware, self.hosts = hardware, hosts
        self._profiles: dict[Any, LayoutProfile | ConfigError] = {}
        self._players: dict[Any, TracePlayer] = {}
        self._other: LayoutProfile | None = None

    def estimate(self, config: Config, overrides: Sequence[str] = ()) -> PlanEstimate:
        """Of a resolved config.

        Args:
            overrides: with which a user has this plan.

        Raises:
            ConfigError: for what cannot be built under the plan, and for strategies that keep replicas apart.
        """
        _require_exact(config)
        config, overrides = self.with_stated_split(config, overrides)
        ranks, number = config.parallel.pipeline.size, config.schedule.microbatches
        if number <= (_FEW + 1) * ranks:
            return self._played(config, overrides)
        few, more = (self._played(_with_microbatches(config, times * ranks)) for times in (_FEW, _FEW + 1))
        estimate = extended(few, more, (number - _FEW * ranks) / ranks)
        flops = self.flops_per_sample(config) * config.train.global_batch_size
        return replace(estimate, config=config, overrides=tuple(overrides), flops=flops or None)

    def with_stated_split(self, config: Config, overrides: Sequence[str] = ()) -> tuple[Config, Sequence[str]]:
        """Stages that are to be equal in time as numbers of blocks; any other config as it is.

        Raises:
            ConfigError: for a model that cannot be cut into so many stages.
        """
        pipeline = config.parallel.pipeline
        if pipeline.split != "time" or pipeline.size == 1:
            return config, overrides
        try:
            counts = split_by_time(config, self.profile(config, split_backward=False), self.player(config))
        except ValueError as error:
            raise ConfigError(getattr(error, "problems", str(error)), config.source) from error
        parallel = config.parallel.model_copy(update={"pipeline": pipeline.model_copy(update={"split": counts})})
        stated = f"parallel.pipeline.split={list(counts)}".replace(" ", "")
        return config.model_copy(update={"parallel": parallel}), (*overrides, stated)

    def _played(self, config: Config, overrides: Sequence[str] = ()) -> PlanEstimate:
        profile = self.profile(config)
        ranks = stages_of(config, profile)
        memory = memory_of(config, profile, ranks)
        player = self.player(config)
        timelines = [RankTimeline.of(config, profile, rank, player) for rank in ranks]
        return _Composed(self, config, tuple(overrides), profile, timelines, memory, player).estimate()

    def profile(self, config: Config, *, split_backward: bool | None = None) -> LayoutProfile:
        """That of the config's layout.

        Args:
            split_backward: whether dgrad and wgrad are told apart; by default as the config's schedule does.

        Raises:
            ConfigError: see `profile_layout`.
        """
        split = splits_backward(config) if split_backward is None else split_backward
        key = layout_key(config), split
        if key not in self._profiles:
            try:
                self._other = profile_layout(layout_config(config), split_backward=split, other=self._other)
                self._profiles[key] = self._other
            except ConfigError as error:
                self._profiles[key] = error
        found = self._profiles[key]
        if isinstance(found, ConfigError):
            raise ConfigError(found.problems, found.source)
        return found

    def flops_per_sample(self, config: Config) -> float:
        """Of the model, forward and backward, without recomputation: those that utilisation is counted by
        (`colossus.monitor.mfu`)."""
        parallel = config.parallel
        alone = parallel.model_copy(
            update={
                "data": 1,
                "pipeline": parallel.pipeline.model_copy(update={"size": 1}),
                "tensor": type(parallel.tensor)(),
                "sequence": type(parallel.sequence)(),
                "expert": type(parallel.expert)(),
                "zero": type(parallel.zero)(),
            }
        )
        train = config.train.model_copy(
            update={"global_batch_size": 1, "activation_checkpoint": type(config.train.activation_checkpoint)()}
        )
        schedule = type(config.schedule)()
        one = config.model_copy(update={"parallel": alone, "train": train, "schedule": schedule})
        blocks = self.profile(one).blocks
        return sum(_counted_flops(trace) for block in blocks for trace in (block.forward, block.backward))

    def player(self, config: Config, times: float = 1.0) -> TracePlayer:
        """What plays traces on the ranks of a config.

        Args:
            times: see `TracePlayer`.
        """
        grid = build_grid(config.parallel)
        key = tuple(grid.sizes.items()), times
        if key not in self._players:
            self._players[key] = TracePlayer(self.hardware, Placement(grid, self.hosts), times)
        return self._players[key]


def _require_exact(config: Config) -> None:
    strategy = config.parallel.data_strategy
    if not STRATEGIES.build(strategy).exact:
        raise ConfigError(
            f"parallel.strategy = {strategy['type']!r} does not wait for all replicas: the time of its step depends on "
            f"who comes when, and is not predicted; all_reduce, hierarchical and zero are",
            config.source,
        )


def _with_microbatches(config: Config, number: int) -> Config:
    """So many of the same size."""
    batch = samples_of(config) * (config.parallel.data or 1) * number
    train = config.train.model_copy(update={"global_batch_size": batch, "batch_ramp": None})
    schedule = config.schedule.model_copy(update={"microbatches": number})
    return config.model_copy(update={"train": train, "schedule": schedule})


def _counted_flops(trace: Trace) -> float:
    """Attention as its products of whole squares, two in forward and four in backward."""
    out = 0.0
    for event in trace.events:
        if isinstance(event, Product):
            out += event.flops
        elif isinstance(event, AttentionCall):
            out += 4.0 * (2 if event.backward else 1) * event.heads * event.queries * event.keys * event.head_dim
    return out


# -- a step ---------------------------------------------------------------------------------------------------


class _Composed:
    """A plan put together."""

    def __init__(
        self,
        estimator: Estimator,
        config: Config,
        overrides: tuple[str, ...],
        profile: LayoutProfile,
        ranks: Sequence[RankTimeline],
        memory: PlanMemory,
        player: TracePlayer,
    ) -> None:
        self.estimator, self.config, self.overrides, self.profile = estimator, config, overrides, profile
        self.ranks, self.memory, self.player, self.hardware = ranks, memory, player, estimator.hardware

    def estimate(self) -> PlanEstimate:
        spans, sent = play_step(self.ranks, self.transfer)
        begins = max(rank.begin for rank in self.ranks)
        ends = [max(own[-1].end if own else 0.0, each) for own, each in zip(spans, sent, strict=True)]
        updates = [update_seconds(self.hardware, rank.stored, self._parameters) for rank in self.memory.ranks]
        alone = begins + max(ends) + max(
            rank.end + update for rank, update in zip(self.ranks, updates, strict=True)
        )  # fmt: skip
        busy = [self._busy(number, spans[number]) + updates[number] for number in range(len(self.ranks))]
        seconds = max(alone, self._shared(busy))
        costs = [rank.axes(own) for rank, own in zip(self.ranks, spans, strict=True)]
        messages = self._messages(spans)
        for cost, of_messages in zip(costs, messages, strict=True):
            if of_messages.bytes:
                cost["pipeline"] = cost.get("pipeline", AxisCost()) + of_messages
        fullest = max(range(len(busy)), key=busy.__getitem__)
        simulation = Simulation(spans)
        train = self.config.train
        flops = self.estimator.flops_per_sample(self.config) * train.global_batch_size
        return PlanEstimate(
            config=self.config,
            overrides=self.overrides,
            seconds=seconds,
            tokens=self.profile.tokens * train.global_batch_size,
            flops=flops or None,
            peak_flops=self._peak(),
            memory=self.memory,
            axes=_fullest(costs),
            parts=self._parts(fullest, spans[fullest], costs[fullest], updates[fullest], alone, seconds),
            bubble=simulation.bubble if len(self.ranks) > 1 else 0.0,
            spans=spans,
        )

    @cached_property
    def transfer(self) -> float:
        """Seconds of a message from stage to stage."""
        bounds = self.ranks[0].stages.bounds
        sizes = [self.profile.blocks[stop - 1].passed for stop in bounds[1:-1]]
        if len(self.ranks) == 1:
            return 0.0
        return self.player.placement.seconds(self.hardware, "send", "pipeline", max(sizes))

    def _messages(self, spans: Sequence[Sequence[Span]]) -> list[AxisCost]:
        """What each rank sends to others of its pipeline; what of it is waited for is in the bubble."""
        bounds = self.ranks[0].stages.bounds
        found = []
        for own in spans:
            cost = AxisCost()
            for span in own:
                action = span.action
                if action.kind == "send_activation":
                    size = self.profile.blocks[bounds[action.stage + 1] - 1].passed
                elif action.kind == "send_gradient":
                    size = self.profile.blocks[bounds[action.stage] - 1].passed_back
                else:
                    continue
                cost += AxisCost(float(size), self.transfer)
            found.append(cost)
        return found

    @property
    def _parameters(self) -> float:
        """Of a rank, in the mean."""
        return len(self.profile.facts.parameters) / len(self.ranks)

    def _busy(self, number: int, spans: Sequence[Span]) -> float:
        rank = self.ranks[number]
        of_spans = sum(span.end - span.start for span in spans)
        return of_spans + rank.begin + rank.end

    def _shared(self, busy: Sequence[float]) -> float:
        """Seconds that a step takes at least where ranks of a host share its cores."""
        at_once = self.hardware.at_once
        if at_once is None:
            return 0.0
        copies = world_size(self.config.parallel) / len(self.ranks)
        return sum(busy) * copies / self.estimator.hosts / at_once

    def _peak(self) -> float | None:
        peak = self.hardware.peak_flops(self.config.train.precision.compute)
        return None if peak is None else peak * world_size(self.config.parallel)

    def _parts(
        self,
        number: int,
        spans: Sequence[Span],
        costs: dict[str, AxisCost],
        update: float,
        alone: float,
        seconds: float,
    ) -> dict[str, float]:
        """Of one rank, which add up to ``seconds``."""
        rank = self.ranks[number]
        parts = dict.fromkeys(("forward", "backward", "recomputation"), 0.0)
        for span in spans:
            kind = span.action.kind
            if kind not in ("forward", "backward", "backward_input", "backward_weight"):
                continue
            cost = rank.cost(span.action)
            exposed = sum(each.exposed for each in cost.axes.values())
            parts["recomputation"] += cost.repeated
            parts["forward" if kind == "forward" else "backward"] += cost.computing - exposed - cost.repeated
        for axes, of_axes in sorted(costs.items()):
            if of_axes.exposed:
                parts[f"over {axes}"] = of_axes.exposed
        parts["optimizer"] = update
        parts["waiting for cores"] = seconds - alone
        parts["bubble"] = max(0.0, alone - sum(parts.values()) + parts["waiting for cores"])
        return {name: value for name, value in parts.items() if value}


def _fullest(costs: Sequence[dict[str, AxisCost]]) -> dict[str, AxisCost]:
    """By axes, of the rank that sends most there."""
    out: dict[str, AxisCost] = {}
    for of_rank in costs:
        for axes, cost in of_rank.items():
            if axes not in out or cost.bytes > out[axes].bytes:
                out[axes] = cost
    return out
