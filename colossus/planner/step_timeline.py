"""The timeline of a step: the actions of all pipeline ranks, with the collectives of weights and gradients beside."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.config import Config
from colossus.planner.layout_profile import BlockProfile, LayoutProfile
from colossus.planner.plan_estimate import AxisCost
from colossus.planner.plan_rank import PlanRank
from colossus.planner.plan_stages import RankStages
from colossus.planner.step_traffic import Collective
from colossus.planner.trace import Trace
from colossus.planner.trace_seconds import Played, TracePlayer, total
from colossus.schedule.actions import COMPUTE, LAST_USE, SENDS, TRANSFERS, Action
from colossus.schedule.simulate import Span, play


@dataclass(frozen=True)
class BlockSeconds:
    """Seconds of a block in one forward or backward.

    Attributes:
        computing: seconds of the block's own work.
        arriving: seconds of a transfer that must end before the block starts; it begins when the block before it does.
        leaving: seconds of a transfer that begins when the block has ended.
    """

    computing: float
    arriving: float = 0.0
    leaving: float = 0.0


def run_beside(blocks: Sequence[BlockSeconds], *, overlaps: bool) -> tuple[float, float]:
    """Return the seconds until the last block has ended, and until the last transfer has ended.

    Transfers run one after the other, in the order in which they begin.

    Args:
        blocks: the blocks in the order in which they run.
        overlaps: whether transfers run while blocks do.
    """
    if not overlaps:
        end = sum(block.computing + block.arriving + block.leaving for block in blocks)
        return end, end
    now = free = 0.0
    ready = free = blocks[0].arriving if blocks else 0.0
    for block, following in zip(blocks, [*blocks[1:], None], strict=True):
        now = max(now, ready)
        if following is not None and following.arriving:
            free = max(free, now) + following.arriving
            ready = free
        now += block.computing
        if block.leaving:
            free = max(free, now) + block.leaving
    return now, max(now, free)


#: a block's parameters are views of a flat tensor: what making them takes, in starts of operators (fitted to ZeRO-3)
_FLAT_OPERATORS = 50


@dataclass(frozen=True)
class ActionCost:
    """Seconds of an action of one stage.

    Attributes:
        computing: seconds of its blocks, exposed collectives of tensor and sequence parallelism included.
        until_done: seconds until its blocks have run, waits for ZeRO-3's gathers included.
        until_sent: seconds until the gradients that it reduces have been reduced.
        repeated: the part of ``computing`` that is recomputation.
        axes: cost of the collectives inside its blocks, by axes.
    """

    computing: float
    until_done: float
    until_sent: float
    repeated: float
    axes: dict[str, AxisCost]


class RankTimeline:
    """The times of one pipeline rank in a step.

    Args:
        profile: profile of the layout.
        rank: the rank.
        player: player of traces for the plan.
    """

    def __init__(self, profile: LayoutProfile, rank: PlanRank, player: TracePlayer) -> None:
        self.profile, self.stages, self.player = profile, rank.stages, player
        self.rank, self._end = rank, (*rank.end, *profile.optimizer.collectives(rank))
        self._costs: dict[tuple[str, int, bool, bool, bool], ActionCost] = {}
        #: stages of which a backward gathers weights again
        self._gathers_again = {gather.stage for gather in rank.gathers if gather.in_backward}
        #: cost of each collective by its id: those of equal blocks are one
        self._collectives: dict[int, AxisCost] = {}
        #: seconds of the collectives of a block, and of the copies beside them, by the id of their tuple
        self._together: dict[int, tuple[float, float]] = {}
        #: blocks whose gradients are gone after each backward
        self._freed = {own.block for own in rank.reductions if own.when == "each"}
        self._gathers = {(gather.stage, gather.block): gather for gather in rank.gathers}

    def seconds(self, action: Action) -> float:
        """Return the seconds for which an action occupies its rank."""
        cost = self.cost(action)
        return cost.until_done if self.is_last(action) else cost.until_sent

    def is_last(self, action: Action) -> bool:
        """Return whether an action is the last of its stage: the next action need not wait for its reductions."""
        return id(action) in self.stages.last_uses

    def cost(self, action: Action) -> ActionCost:
        key = action.kind, action.stage, self.is_last(action), self._is_freed(action), action.microbatch == 0
        if key not in self._costs:
            self._costs[key] = self._cost(*key)
        return self._costs[key]

    def _is_freed(self, action: Action) -> bool:
        """Return whether an action has to gather the weights of its blocks."""
        if action.kind == "forward":
            return (action.stage, action.microbatch) in self.rank.gathered
        return action.stage in self._gathers_again

    def _cost(self, kind: str, stage: int, is_last: bool, is_freed: bool, is_first: bool) -> ActionCost:
        numbers = list(self.stages.blocks_of(stage))
        if kind != "forward":
            numbers.reverse()
        played = [self.player.play(_trace(self.profile.blocks[number], kind)) for number in numbers]
        leaving: dict[int, float] = {}
        copying = dict.fromkeys(numbers, 0.0)
        for reduction in self.rank.reductions if kind in LAST_USE else ():
            if reduction.stage == stage and (reduction.when == "each" or is_last):
                block = numbers[-1] if reduction.block is None else reduction.block
                sending, copies = self._seconds_of(reduction.collectives)
                leaving[block] = leaving.get(block, 0.0) + sending
                copying[block] += copies
        blocks = []
        for number, trace in zip(numbers, played, strict=True):
            gather = self._gathers.get((stage, number)) if is_freed and kind != "backward_weight" else None
            arriving, copies = (0.0, 0.0) if gather is None else self._seconds_of(gather.collectives)
            copying[number] += copies
            computing = trace.seconds + copying[number]
            if is_first or number in self._freed:
                computing -= trace.accumulating
            blocks.append(BlockSeconds(computing, arriving, leaving.get(number, 0.0)))
        hardware = self.player.hardware
        done, sent = run_beside(blocks, overlaps=hardware.overlaps)
        computing = sum(block.computing for block in blocks)
        if hardware.overlaps:
            beside = sum(block.arriving + block.leaving for block in blocks) - (sent - computing)
            slower = hardware.occupied * max(0.0, beside)
            computing, done, sent = computing + slower, done + slower, sent + slower
        return ActionCost(
            computing, done, sent, sum(trace.repeated for trace in played), total([trace.axes for trace in played])
        )

    def _seconds_of(self, collectives: tuple[Collective, ...]) -> tuple[float, float]:
        """Return the seconds of collectives of the rank's traffic, and those of the copies beside them.

        Gathered weights are copied out of the flat tensor that travelled, gradients into one: the larger of a
        collective's input and result. The host of a GPU has started the views of a block's parameters by then.
        """
        if id(collectives) not in self._together:
            hardware = self.player.hardware
            starting = 0.0 if hardware.overlaps else _FLAT_OPERATORS * hardware.operator_seconds
            copies = sum(
                starting + hardware.memory_seconds(2.0 * max(own.input_bytes, own.result_bytes), "copy_")
                for own in collectives
                if own.ranks > 1
            )
            self._together[id(collectives)] = sum(self.collective(own).seconds for own in collectives), copies
        return self._together[id(collectives)]

    def collective(self, collective: Collective) -> AxisCost:
        """Return the cost of one collective of the rank's traffic, all of it exposed."""
        if id(collective) not in self._collectives:
            self._collectives[id(collective)] = self._cost_of(collective)
        return self._collectives[id(collective)]

    def _cost_of(self, collective: Collective) -> AxisCost:
        spread = self.player.placement.of(collective.mesh_axes)
        operation = collective.operation.partition(" ")[0]
        hardware = self.player.hardware
        if operation == "broadcast":
            operation = "all_gather"
        ranks, hosts = collective.ranks, min(collective.ranks, spread.hosts)
        seconds = hardware.collective_seconds(operation, ranks, collective.input_bytes, hosts=hosts)
        return AxisCost(collective.sent, seconds, seconds)

    @cached_property
    def begin(self) -> float:
        """Return the seconds before the first forward: gathers of weights that stay whole for the step, and copies."""
        return sum(self._seconds_of(self.rank.begin)) + sum(played.seconds for played in self._once("forward"))

    @cached_property
    def end(self) -> float:
        """Return the seconds of the collectives after the last backward and all reductions."""
        return self._seconds_of(self._end)[0] + sum(played.seconds for played in self._once("backward"))

    def _once(self, kind: str) -> list[Played]:
        """Play the parts of the rank's blocks that run once per step."""
        parts = []
        for stage in self.stages.stages:
            for number in self.stages.blocks_of(stage):
                block = self.profile.blocks[number]
                traces = (block.forward,) if kind == "forward" else (block.backward, block.wgrad)
                parts += [self.player.play(trace.once) for trace in traces if trace is not None and trace.once]
        return parts

    def axes(self, spans: Sequence[Span], transfer: float) -> dict[str, AxisCost]:
        """Return the cost of the rank's collectives in a step and of its messages to other stages, by axes.

        Collectives before the first forward and after the last backward are exposed. Those beside blocks share the
        seconds for which blocks wait for them, in proportion to their own seconds. Waiting for messages is part of the
        bubble.

        Args:
            spans: the rank's actions.
            transfer: seconds of a message.
        """
        computing = [span.action for span in spans if span.action.kind in COMPUTE]
        often = Counter(id(self.cost(action)) for action in computing)
        inside = [{axes: cost * often[id(own)] for axes, cost in own.axes.items()} for own in self._costs.values()]
        inside += [played.axes for kind in ("forward", "backward") for played in self._once(kind)]
        out = total(inside)
        apart = Counter((*self.rank.begin, *self._end))
        counts = apart + self.rank.times()
        waiting = sum(self.seconds(action) - self.cost(action).computing for action in computing)
        beside = sum(self.collective(own).seconds * (times - apart[own]) for own, times in counts.items())
        share = min(1.0, waiting / beside) if beside else 0.0
        for collective, times in counts.items():
            cost = self.collective(collective)
            exposed = cost.seconds * (apart[collective] + share * (times - apart[collective]))
            step_cost = AxisCost(cost.bytes * times, cost.seconds * times, exposed)
            out[collective.axes] = out.get(collective.axes, AxisCost()) + step_cost
        blocks, bounds = self.profile.blocks, self.stages.bounds
        sends = Counter((span.action.kind, span.action.stage) for span in spans if span.action.kind in SENDS)
        for (kind, stage), times in sends.items():
            forward = kind == "send_activation"
            border = blocks[bounds[stage + forward] - 1]
            # on CPUs the rank copies half of it, and half of one that it receives
            exposed = 0.0 if self.player.hardware.overlaps else transfer
            message = AxisCost(float(border.passed if forward else border.passed_back), transfer, exposed)
            out["pipeline"] = out.get("pipeline", AxisCost()) + message * times
        return out


_NOTHING = Trace()


def _trace(block: BlockProfile, kind: str) -> Trace:
    if kind == "forward":
        return block.forward
    if kind == "backward_weight":  # without a split backward, the trace of backward includes it
        return block.wgrad or _NOTHING
    return block.backward


def ranks_for(
    player: TracePlayer, config: Config, profile: LayoutProfile, stages: Sequence[RankStages]
) -> list[PlanRank]:
    """Return pipeline ranks of a plan whose layout has this profile, on the player's hardware.

    Args:
        player: player of traces for the plan.
        config: resolved config of the plan.
        profile: profile of its layout.
        stages: stages of each rank.
    """
    on_cpu, per_host = not player.hardware.overlaps, player.placement.of("data").on_a_host
    return [PlanRank(profile.facts, config, own, on_cpu=on_cpu, ranks_per_host=per_host) for own in stages]


def play_step(
    ranks: Sequence[RankTimeline], transfer: float, *, copies: float = 1.0, at_once: int | None = None
) -> tuple[list[list[Span]], list[float]]:
    """Simulate a step.

    Args:
        ranks: timelines of all pipeline ranks.
        transfer: seconds of a message from stage to stage.
        copies: ranks of a host that are at the same place of the pipeline.
        at_once: ranks of a host that can be busy without taking each other's cores; None: all.

    Returns:
        The spans of each rank, and the second at which all its reductions have ended.
    """
    rank_of = ranks[0].stages.rank_of
    slower, copying = 1.0, 0.0
    places: int | None = None
    if at_once is not None:
        places = math.ceil(at_once / copies)
        slower = max(1.0, copies * places / at_once)
    if not ranks[0].player.hardware.overlaps:  # a message is copied by both of its ranks, which do nothing else
        transfer = copying = transfer / 2

    def duration(action: Action) -> float:
        if action.kind in COMPUTE:
            return slower * ranks[rank_of[action.stage]].seconds(action)
        return slower * copying if action.kind in TRANSFERS else 0.0

    spans = play([list(rank.stages.actions) for rank in ranks], duration, transfer=transfer, at_once=places)
    ends = []
    for rank, own in zip(ranks, spans, strict=True):
        behind = [
            span.start + slower * rank.cost(span.action).until_sent
            for span in own
            if span.action.kind in LAST_USE and rank.is_last(span.action)
        ]
        ends.append(max(behind, default=0.0))
    return spans, ends
