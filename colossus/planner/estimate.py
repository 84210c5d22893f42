"""The estimate of a plan: the seconds of a step, its bytes, its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.config.schema import Parallel
from colossus.context.grid import build_grid
from colossus.hardware.hardware import Hardware
from colossus.hardware.host_placement import Placement
from colossus.planner.candidates import samples_of
from colossus.planner.layout_profile import LayoutProfile, profile_layout
from colossus.planner.memory import memory_of
from colossus.planner.plan_estimate import AxisCost, PlanEstimate, PlanMemory, extended
from colossus.planner.plan_stages import layout_config, layout_key, splits_backward, stages_of
from colossus.planner.rank_parameters import PlanAxes
from colossus.planner.score import split_by_time
from colossus.planner.step_timeline import RankTimeline, play_step, ranks_for
from colossus.planner.trace_seconds import TracePlayer, update_seconds
from colossus.registry import STRATEGIES
from colossus.schedule.actions import COMPUTE
from colossus.schedule.simulate import Simulation, Span

#: microbatches for each rank after which a pipeline is in its steady state: each more takes the same time
_FEW = 2


class Estimator:
    """Estimates plans of one model and its data on one kind of devices. It caches the profiles of layouts.

    Args:
        hardware: speed of devices and links.
        hosts: hosts over which the devices of a plan are spread evenly, in the order of ranks.
    """

    def __init__(self, hardware: Hardware, *, hosts: int = 1) -> None:
        self.hardware, self.hosts = hardware, hosts
        self._profiles: dict[Any, LayoutProfile | ConfigError] = {}
        self._players: dict[Any, TracePlayer] = {}
        self._other: LayoutProfile | None = None

    def estimate(self, config: Config, overrides: Sequence[str] = ()) -> PlanEstimate:
        """Estimate the plan of a resolved config.

        Args:
            config: the config.
            overrides: overrides of the user's file that give this plan.

        Raises:
            ConfigError: the model cannot be built under the plan, or the strategy does not wait for all replicas.
        """
        _require_exact(config)
        config, overrides = self.with_stated_split(config, overrides)
        ranks, number = config.parallel.pipeline.size, config.schedule.microbatches
        if number <= (_FEW + 1) * ranks:
            return self._simulate(config, overrides)
        more = self._simulate(_with_microbatches(config, (_FEW + 1) * ranks))
        few = self._simulate(_with_microbatches(config, _FEW * ranks), memory=more.memory)
        estimate = extended(few, more, (number - _FEW * ranks) / ranks)
        flops = self.flops_per_sample(config) * config.train.global_batch_size
        return replace(estimate, config=config, overrides=tuple(overrides), flops=flops or None)

    def _simulate(
        self, config: Config, overrides: Sequence[str] = (), *, memory: PlanMemory | None = None
    ) -> PlanEstimate:
        """Estimate a plan with all of its microbatches, with this memory if it is known."""
        profile, player, devices = self.profile(config), self.player(config), world_size(config.parallel)
        ranks = ranks_for(player, config, profile, stages_of(config, profile.facts))
        memory = memory_of(config, profile, ranks) if memory is None else memory
        lines = [RankTimeline(profile, rank, player) for rank in ranks]
        transfer = _transfer_seconds(lines, player)
        spans, sums_end = play_step(lines, transfer)
        parameters = len(profile.facts.parameters) / len(lines)
        updates = [update_seconds(self.hardware, rank.stored, parameters) for rank in memory.ranks]
        finishes = [line.end + update for line, update in zip(lines, updates, strict=True)]
        around = max(line.begin for line in lines) + max(finishes)
        alone = around + _end(spans, sums_end)
        busy = [
            sum(span.end - span.start for span in own) + line.begin + finish
            for own, line, finish in zip(spans, lines, finishes, strict=True)
        ]
        at_once = self.hardware.at_once
        #: ranks of a host that are at the same place of the pipeline
        copies = devices / len(lines) / self.hosts
        seconds = alone
        if at_once is not None and copies * len(lines) > at_once:  # they share cores (see `Hardware.slowdown`)
            shared = play_step(lines, transfer, copies=copies, at_once=at_once)
            slowest = around * max(1.0, copies / at_once) + _end(*shared)
            seconds = max(alone, slowest, sum(busy) * copies / at_once)
        costs = [line.axes(own, transfer) for line, own in zip(lines, spans, strict=True)]
        busiest = max(range(len(busy)), key=busy.__getitem__)
        parts = _parts(lines[busiest], spans[busiest], costs[busiest])
        parts |= {"optimizer": updates[busiest], "waiting for cores": seconds - alone}
        parts["bubble"] = max(0.0, seconds - sum(parts.values()))
        batch = config.train.global_batch_size
        peak = self.hardware.peak_flops(config.train.precision.compute)
        return PlanEstimate(
            config=config,
            overrides=tuple(overrides),
            seconds=seconds,
            tokens=profile.tokens * batch,
            flops=self.flops_per_sample(config) * batch or None,
            peak_flops=None if peak is None else peak * devices,
            memory=memory,
            axes=_fullest(costs),
            parts={name: value for name, value in parts.items() if value},
            bubble=Simulation(spans).bubble if len(lines) > 1 else 0.0,
            spans=spans,
        )

    def with_stated_split(self, config: Config, overrides: Sequence[str] = ()) -> tuple[Config, Sequence[str]]:
        """Return the config with ``parallel.pipeline.split = "time"`` as numbers of blocks, and its overrides.

        Any other config is returned as it is.

        Raises:
            ConfigError: the model cannot be cut into this many stages.
        """
        pipeline = config.parallel.pipeline
        if pipeline.split != "time" or pipeline.size == 1:
            return config, overrides
        try:
            counts = split_by_time(config, self.profile(config, split_backward=False), self.player(config))
        except ValueError as error:
            raise ConfigError(getattr(error, "problems", str(error)), config.source) from error
        parallel = config.parallel.model_copy(update={"pipeline": pipeline.model_copy(update={"split": counts})})
        split = f"parallel.pipeline.split={list(counts)}".replace(" ", "")
        return config.model_copy(update={"parallel": parallel}), (*overrides, split)

    def profile(self, config: Config, *, split_backward: bool | None = None) -> LayoutProfile:
        """Return the profile of a config's layout.

        Args:
            config: the config.
            split_backward: whether dgrad and wgrad are recorded apart; by default as the config's schedule runs them.

        Raises:
            ConfigError: see `profile_layout`.
        """
        split = splits_backward(config) if split_backward is None else split_backward
        is_sharded = bool(PlanAxes(config).stage)
        layout = layout_config(config, is_sharded=is_sharded)
        key = layout_key(layout), split, is_sharded
        if key not in self._profiles:
            try:
                self._other = profile_layout(
                    layout, split_backward=split, is_sharded=is_sharded,
                    on_cpu=not self.hardware.overlaps, other=self._other,
                )  # fmt: skip
                self._profiles[key] = self._other
            except ConfigError as error:
                self._profiles[key] = error
        profile = self._profiles[key]
        if isinstance(profile, ConfigError):
            raise ConfigError(profile.problems, profile.source)
        return profile

    def flops_per_sample(self, config: Config) -> float:
        """Return the model FLOPs of a sample, forward and backward, without recomputation.

        MFU counts the same operations (`colossus.monitor.mfu`).
        """
        train = {"global_batch_size": 1, "activation_checkpoint": type(config.train.activation_checkpoint)()}
        alone = {
            "parallel": Parallel(data=1),
            "train": config.train.model_copy(update=train),
            "schedule": type(config.schedule)(),
        }
        one_sample = config.model_copy(update=alone)
        blocks = self.profile(one_sample).blocks
        return sum(trace.flops for block in blocks for trace in (block.forward, block.backward))

    def player(self, config: Config, times: float = 1.0) -> TracePlayer:
        """Return the player of traces for the ranks of a config.

        Args:
            config: the config.
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
            f"when messages arrive, and cannot be predicted; choose all_reduce, hierarchical or zero",
            config.source,
        )


# -- a step ---------------------------------------------------------------------------------------------------


def _with_microbatches(config: Config, number: int) -> Config:
    """Return the config with ``number`` microbatches of the same size."""
    batch = samples_of(config) * (config.parallel.data or 1) * number
    train = config.train.model_copy(update={"global_batch_size": batch, "batch_ramp": None})
    schedule = config.schedule.model_copy(update={"microbatches": number})
    return config.model_copy(update={"train": train, "schedule": schedule})


def _transfer_seconds(lines: Sequence[RankTimeline], player: TracePlayer) -> float:
    """Return the seconds of the largest message from stage to stage."""
    if len(lines) == 1:
        return 0.0
    most = max(lines[0].profile.blocks[stop - 1].passed for stop in lines[0].stages.bounds[1:-1])
    return player.placement.seconds(player.hardware, "send", "pipeline", most)


def _end(spans: Sequence[Sequence[Span]], sums_end: Sequence[float]) -> float:
    """Return the second at which the last action of all ranks and the last sum of gradients have ended."""
    return max(*(own[-1].end for own in spans if own), *sums_end)


def _parts(line: RankTimeline, spans: Sequence[Span], costs: Mapping[str, AxisCost]) -> dict[str, float]:
    """Return the seconds by part in which a rank computes, or waits for collectives."""
    parts = dict.fromkeys(("forward", "backward", "recomputation"), 0.0)
    for span in spans:
        if span.action.kind in COMPUTE:
            cost = line.cost(span.action)
            exposed = sum(axis_cost.exposed for axis_cost in cost.axes.values())
            parts["recomputation"] += cost.repeated
            name = "forward" if span.action.kind == "forward" else "backward"
            parts[name] += cost.computing - exposed - cost.repeated
    return parts | {f"over {axes}": cost.exposed for axes, cost in sorted(costs.items()) if cost.exposed}


def _fullest(costs: Sequence[dict[str, AxisCost]]) -> dict[str, AxisCost]:
    """Return the cost of each axis, of the rank that sends most along it."""
    out: dict[str, AxisCost] = {}
    for rank_costs in costs:
        for axes, cost in rank_costs.items():
            if axes not in out or cost.bytes > out[axes].bytes:
                out[axes] = cost
    return out
