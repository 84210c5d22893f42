"""The timeline of a step: the actions of all pipeline ranks with the seconds of their blocks, and what of weights and
gradients travels beside them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from colossus.config import Config
from colossus.planner.beside import BlockSeconds, run_beside
from colossus.planner.collective import Collective
from colossus.planner.gradient_traffic import StepTraffic, gradient_traffic
from colossus.planner.layout_blocks import BlockProfile, LayoutProfile
from colossus.planner.plan_estimate import AxisCost
from colossus.planner.rank_stages import RankStages
from colossus.planner.trace import Trace
from colossus.planner.trace_seconds import Played, TracePlayer, total
from colossus.schedule.actions import COMPUTE, LAST_USE, Action
from colossus.schedule.simulate import Span, play


@dataclass(frozen=True)
class ActionCost:
    """Seconds of an action of one stage.

    Attributes:
        computing: of its blocks, with what tensor parallelism waits for.
        until_done: until its blocks have run, with what ZeRO-3 waits for.
        until_sent: until the gradients that leave with it have been sent, too.
        repeated: of ``computing``, what is computed again.
        axes: of the collectives inside of its blocks.
    """

    computing: float
    until_done: float
    until_sent: float
    repeated: float
    axes: dict[str, AxisCost]


class RankTimeline:
    """What one pipeline rank does in a step.

    Args:
        profile: of the layout.
        stages: of the rank.
        traffic: of its weights and gradients.
    """

    def __init__(self, profile: LayoutProfile, stages: RankStages, traffic: StepTraffic, player: TracePlayer) -> None:
        self.profile, self.stages, self.traffic, self.player = profile, stages, traffic, player
        self._costs: dict[tuple[str, int, bool, bool], ActionCost] = {}
        self._arriving = {(one.stage, one.block): one for one in traffic.gathers}
        self._last = {action.stage: action for action in stages.actions if action.kind in LAST_USE}

    @classmethod
    def of(cls, config: Config, profile: LayoutProfile, stages: RankStages, player: TracePlayer) -> RankTimeline:
        """Of a plan whose layout has this profile."""
        placement = player.placement
        traffic = gradient_traffic(
            profile.facts, config, stages, profile.optimizer, on_cpu=not player.hardware.overlaps,
            ranks_per_host=placement.of("data").on_a_host,
        )  # fmt: skip
        return cls(profile, stages, traffic, player)

    def seconds(self, action: Action) -> float:
        """In which an action holds its rank."""
        cost = self.cost(action)
        return cost.until_done if self.is_last(action) else cost.until_sent

    def is_last(self, action: Action) -> bool:
        """Of a backward: whether it is its stage's last, whose gradients may go on travelling behind it."""
        return self._last.get(action.stage) == action

    def cost(self, action: Action) -> ActionCost:
        key = action.kind, action.stage, self.is_last(action), self._is_freed(action)
        if key not in self._costs:
            self._costs[key] = self._cost(*key)
        return self._costs[key]

    def _is_freed(self, action: Action) -> bool:
        """Whether the weights of the blocks have to come for it."""
        if action.kind == "forward":
            return (action.stage, action.microbatch) in self.traffic.gathered
        return any(one.in_backward for one in self.traffic.gathers if one.stage == action.stage)

    def _cost(self, kind: str, stage: int, is_last: bool, is_freed: bool) -> ActionCost:
        numbers = list(self.stages.blocks_of(stage))
        if kind != "forward":
            numbers.reverse()
        played = [self.player.play(_trace(self.profile.blocks[number], kind)) for number in numbers]
        leaving: dict[int, float] = {}
        for one in self.traffic.reductions if kind in LAST_USE else ():
            if one.stage == stage and (one.when == "each" or is_last):
                block = numbers[-1] if one.block is None else one.block
                leaving[block] = leaving.get(block, 0.0) + self._all(one.collectives).seconds
        runs = []
        for number, each in zip(numbers, played, strict=True):
            gather = self._arriving.get((stage, number)) if is_freed and kind != "backward_weight" else None
            arriving = 0.0 if gather is None else self._all(gather.collectives).seconds
            runs.append(BlockSeconds(each.seconds, arriving, leaving.get(number, 0.0)))
        done, sent = run_beside(runs, overlaps=self.player.hardware.overlaps)
        computing = sum(run.computing for run in runs)
        return ActionCost(
            computing, done, sent, sum(each.repeated for each in played), total([each.axes for each in played])
        )

    def _all(self, collectives: Sequence[Collective]) -> AxisCost:
        out = AxisCost()
        for one in collectives:
            out += self.collective(one)
        return out

    def collective(self, one: Collective) -> AxisCost:
        """What one collective costs."""
        spread = self.player.placement.of(one.mesh_axes)
        operation = one.operation.partition(" ")[0]
        hardware = self.player.hardware
        if operation == "broadcast":
            operation = "all_gather"
        ranks, hosts = one.ranks, min(one.ranks, spread.hosts)
        seconds = hardware.collective_seconds(operation, ranks, one.held, hosts=hosts)
        return AxisCost(one.sent, seconds, seconds)

    @cached_property
    def begin(self) -> float:
        """Before the first forward: weights that are whole for all of the step, those of tensor parallelism too."""
        return self._all(self.traffic.begin).seconds + sum(each.seconds for each in self._once("forward"))

    @cached_property
    def end(self) -> float:
        """Behind the last backward, when all that travels beside it has come."""
        return self._all(self.traffic.end).seconds + sum(each.seconds for each in self._once("backward"))

    def _once(self, kind: str) -> list[Played]:
        """Of the blocks of the rank, what comes once in a step."""
        found = []
        for stage in self.stages.stages:
            for number in self.stages.blocks_of(stage):
                block = self.profile.blocks[number]
                traces = (block.forward,) if kind == "forward" else (block.backward, block.wgrad)
                found += [self.player.play(trace.once) for trace in traces if trace is not None and trace.once]
        return found

    def axes(self, spans: Sequence[Span]) -> dict[str, AxisCost]:
        """What the rank's collectives cost in a step, by axes; messages between stages are not among them."""
        inside = [self.cost(span.action).axes for span in spans if span.action.kind in COMPUTE]
        inside += [each.axes for kind in ("forward", "backward") for each in self._once(kind)]
        out = total(inside)
        late = Counter((*self.traffic.begin, *self.traffic.end))
        every = self.traffic.counts(self.stages)
        waited = sum(self._beside(span.action) for span in spans if span.action.kind in COMPUTE)
        travelling = sum(self.collective(one).seconds * (times - late[one]) for one, times in every.items())
        share = min(1.0, waited / travelling) if travelling else 0.0
        for one, times in every.items():
            cost = self.collective(one)
            exposed = cost.seconds * (late[one] + share * (times - late[one]))
            found = AxisCost(cost.bytes * times, cost.seconds * times, exposed)
            out[one.axes] = out.get(one.axes, AxisCost()) + found
        return out

    def _beside(self, action: Action) -> float:
        """Seconds of an action in which its rank waits for weights or gradients that travel."""
        return self.seconds(action) - self.cost(action).computing


_NOTHING = Trace()


def _trace(block: BlockProfile, kind: str) -> Trace:
    if kind == "forward":
        return block.forward
    if kind == "backward_weight":  # a profile that does not tell it apart has it in backward
        return block.wgrad or _NOTHING
    return block.backward


def play_step(ranks: Sequence[RankTimeline], transfer: float) -> tuple[list[list[Span]], list[float]]:
    """The spans of all ranks, and when each has all its gradients.

    Args:
        transfer: seconds of a message from stage to stage.
    """
    rank_of = ranks[0].stages.rank_of

    def duration(action: Action) -> float:
        return ranks[rank_of[action.stage]].seconds(action) if action.kind in COMPUTE else 0.0

    spans = play([list(rank.stages.actions) for rank in ranks], duration, transfer=transfer)
    ends = []
    for rank, own in zip(ranks, spans, strict=True):
        behind = [
            span.start + rank.cost(span.action).until_sent
            for span in own
            if span.action.kind in LAST_USE and rank.is_last(span.action)
        ]
        ends.append(max(behind, default=0.0))
    return spans, ends
