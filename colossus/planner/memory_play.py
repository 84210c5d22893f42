"""The bytes that are alive on a pipeline rank while it runs the actions of a step, played block by block."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from colossus.data_parallel.zero.zero import MAX_REDUCTIONS
from colossus.planner.layout_profile import BlockProfile
from colossus.planner.plan_estimate import StoredBytes
from colossus.planner.plan_rank import PlanRank
from colossus.planner.recorded_memory import Level
from colossus.planner.step_traffic import BlockGather, Reduction
from colossus.schedule.actions import INPUT_GRADIENT, Action


class MemoryPlay:
    """The memory of a rank in a step: `run` plays the step and returns the bytes at its peak.

    The play follows the engine: `colossus.data_parallel.zero.prefetch.BlockRuns` gathers a block while the one before
    it runs, `colossus.data_parallel.zero.zero.Zero` has two reductions under way at most, and a gradient that is in a
    bucket is nowhere else.

    Args:
        blocks: profiles of the model's blocks.
        rank: the rank.
        stored: bytes that it stores.
        times: samples of a microbatch over those of the profiles; activations are scaled by it.
    """

    def __init__(self, blocks: Sequence[BlockProfile], rank: PlanRank, stored: StoredBytes, *, times: float) -> None:
        self._blocks, self._rank, self._stages, self._stored = blocks, rank, rank.stages, stored
        self._times, self._last_uses = times, rank.stages.last_uses
        self._scope, self._first_trained = rank.config.parallel.tensor.weights, rank.model.first_trained
        self._gathers = {gather.block: gather for gather in rank.gathers}
        self._each: defaultdict[int, list[Reduction]] = defaultdict(list)
        self._last: defaultdict[tuple[int, int | None], list[Reduction]] = defaultdict(list)
        for reduction in rank.reductions:
            if reduction.when == "each":
                assert reduction.block is not None
                self._each[reduction.block].append(reduction)
            else:
                self._last[reduction.stage, reduction.block].append(reduction)
        received = [max(self._received(stage), self._passed(stage)) for stage in rank.stages.stages]
        #: in a pipeline, a value that arrives and one that leaves
        self._messages = 2 * times * max(received) if len(rank.stages.bounds) > 2 else 0.0
        self._activations = self._gradients = self._buffers = self._sums = 0.0
        self._gathered = float(rank.whole)
        #: forwards of each block that wait for their backward
        self._awaited: Counter[int] = Counter()
        self._whole: set[int] = set()
        #: blocks whose weights stay whole for the step, and those whose whole gradients wait for the last microbatch
        self._lasting: set[int] = set()
        self._waiting: set[int] = set()
        self._ahead: BlockGather | None = None
        self._reducing: deque[Reduction] = deque()
        self._summed: set[int] = set()
        self._begun: set[int] = set()
        self._most: dict[tuple[int, int, int], float] = {}  # of `_most_of`
        self._peak = -1.0
        #: bytes of weights, gradients, buffers, activations and the update at the peak
        self._at_peak = (0.0, 0.0, 0.0, 0.0, 0.0)
        #: bytes of incomplete gradients of tied parameters, by block: those that the profile counts as activations
        #: while the block runs backward, and the change on the rank behind each of its backwards, and behind the last
        self._tied, self._tied_in_each, self._tied_in_last = Counter[int](), Counter[int](), Counter[int]()
        if not rank.stages.splits_backward:  # such a schedule defers incomplete gradients, too
            self._add_tied()

    def run(self) -> dict[str, int]:
        """Return the bytes by kind at the peak of the step.

        The kinds are weights, gathered (weights beyond the stored ones), gradients, buffers (of buckets, gathers and
        reductions), optimizer, activations (with messages between stages), update, and "on the host" (negative).
        """
        for action in self._stages.actions:
            if action.kind == "forward":
                self._forward(action.stage)
            elif action.kind in INPUT_GRADIENT:
                self._backward(action)
            elif action.kind == "backward_weight":
                self._backward_weight(action)
            elif action.kind == "reduce":
                self._free_lasting(action.stage)
                for reduction in self._last[action.stage, None]:
                    self._start(reduction)
        self._finish()
        return self._kinds()

    def _add_tied(self) -> None:
        """Add the bytes of incomplete gradients of tied parameters that the rank's backwards hold.

        From the last to the first block that uses a tied parameter, its incomplete gradient is alive. The profile ran
        one backward through all blocks; a rank runs one through each of its stages.
        """
        for param in self._rank.model.parameters:
            if len(param.blocks) == 1 or not param.kind.form.is_trainable:
                continue
            size = param.kind.gradient_bytes
            for block in range(param.blocks[0], param.blocks[-1]):
                self._tied[block] += size
            # the last block that uses a weight that is gathered for the step has recorded its whole gradient
            is_lasting = self._blocks[param.blocks[-1]].lasting.reduced >= size
            changes = self._tied_in_last if is_lasting else self._tied_in_each
            for stage in self._stages.stages:
                users = [block for block in param.blocks if block in self._stages.blocks_of(stage)]
                if len(users) > 1:
                    changes[users[-1]] += size
                    changes[users[0]] -= size

    # -- actions ------------------------------------------------------------------------------------------

    def _forward(self, stage: int) -> None:
        numbers = self._stages.blocks_of(stage)
        self._activations += self._times * self._received(stage)
        for number in numbers:
            if self._gather(number):
                self._start_gather(other for other in numbers if other > number)
            block = self._blocks[number]
            if number not in self._lasting:
                self._lasting.add(number)
                self._gathered += block.lasting.weights
            self._touch(self._times * block.forward_peak)
            self._activations += self._times * block.saved
            if number >= self._first_trained:
                self._awaited[number] += 1
            if self._scope == "matmul":
                self._release(number)
        self._activations -= self._times * self._passed(stage)

    def _backward(self, action: Action) -> None:
        """Play a backward, or the dgrad of one whose wgrad comes later."""
        stage, is_split = action.stage, action.kind == "backward_input"
        skipped, numbers = self._frozen_and_trained(stage)
        self._activations += self._times * self._passed(stage)
        before: int | None = None
        for number in numbers:
            is_new = self._gather(number)
            self._touch()
            if before is not None:
                self._leave(before, reduces=not is_split)
            if is_new:
                self._start_gather(other for other in numbers if other < number)
            block = self._blocks[number]
            self._make(number, block.levels, action, adds=not is_split)
            self._activations -= self._times * block.saved
            if is_split:
                self._activations += self._times * (block.saved if block.deferred is None else block.deferred)
            before = number
        if before is not None:
            self._leave(before, reduces=not is_split)
        self._activations -= self._times * (
            self._received(stage) + sum(self._blocks[number].saved for number in skipped)
        )
        if not is_split:
            self._begun.add(stage)

    def _backward_weight(self, action: Action) -> None:
        _, numbers = self._frozen_and_trained(action.stage)
        for number in numbers:
            block = self._blocks[number]
            self._make(number, block.wgrad_levels, action, adds=True)
            self._activations -= self._times * (block.saved if block.deferred is None else block.deferred)
        for number in numbers:
            for reduction in self._each[number]:
                self._start(reduction)
        self._begun.add(action.stage)

    def _make(self, number: int, levels: Sequence[Level], action: Action, *, adds: bool) -> None:
        """Play a backward of a block, which makes gradients.

        Args:
            number: number of the block.
            levels: bytes that are alive while it runs.
            action: the action.
            adds: whether the block's gradients are complete behind it.
        """
        is_first = action.stage not in self._begun
        is_last = id(action) in self._last_uses
        gather = self._gathers.get(number)
        reduced = 0 if gather is None else gather.gradients
        made, lasting = self._rank.made[number], self._blocks[number].lasting
        #: reduced in the last microbatch: a tied parameter's is complete behind another block than recorded it
        late = min(made, lasting.reduced - self._tied_in_last[number])
        if adds and not is_last and number not in self._waiting:
            self._waiting.add(number)
            self._gradients += lasting.gradients
        alone = lasting.largest if is_last and number not in self._waiting else 0
        #: later microbatches add to the gradients that stay
        new = reduced + (made - late if is_first else 0) + (late if is_last else 0)
        if levels:
            self._touch(self._most_of(levels, self._tied[number], new) + alone)
        if adds:
            self._gradients += self._tied_in_each[number] + new + (self._tied_in_last[number] if is_last else 0)
            if is_last and number in self._waiting:
                self._waiting.discard(number)
                self._gradients -= lasting.gradients
            for reduction in self._last[action.stage, number] if is_last else ():
                self._start(reduction)

    def _most_of(self, levels: Sequence[Level], tied: int, new: int) -> float:
        """Return the most bytes of a backward without ``tied`` ones, and with at most ``new`` ones of gradients."""
        key = id(levels), tied, new
        if key not in self._most:
            self._most[key] = max(self._times * (activations - tied) + min(made, new) for activations, made in levels)
        return self._most[key]

    # -- weights ------------------------------------------------------------------------------------------

    def _gather(self, number: int) -> bool:
        """Make the weights of a block whole, and return whether that needed a gather."""
        gather = self._gathers.get(number)
        if gather is None or number in self._whole:
            return False
        if self._ahead is not gather:
            self._drop_ahead()
            self._buffers += gather.buffers
        self._ahead = None
        self._gathered += gather.whole
        self._touch()
        self._buffers -= gather.buffers
        self._whole.add(number)
        return True

    def _start_gather(self, following: Iterable[int]) -> None:
        """Start the gather of the first of these blocks that has one."""
        number = next((number for number in following if number in self._gathers), None)
        gather = None if number is None else self._gathers[number]
        if gather is not None and number not in self._whole:
            self._ahead = gather
            self._buffers += gather.buffers

    def _drop_ahead(self) -> None:
        if self._ahead is not None:
            self._buffers -= self._ahead.buffers
        self._ahead = None

    def _release(self, number: int) -> None:
        if number in self._whole:
            self._whole.discard(number)
            self._gathered -= self._gathers[number].whole

    def _free_lasting(self, stage: int) -> None:
        """Free the weights of a stage that stayed whole for all microbatches."""
        for number in self._lasting.intersection(self._stages.blocks_of(stage)):
            self._lasting.discard(number)
            self._gathered -= self._blocks[number].lasting.weights

    def _leave(self, number: int, *, reduces: bool) -> None:
        """End the backward of a block: reduce its gradients, and free its weights."""
        for reduction in self._each[number] if reduces else ():
            self._start(reduction)
        self._awaited[number] -= 1
        if self._scope == "matmul" or not self._awaited[number]:
            self._release(number)

    # -- gradients ----------------------------------------------------------------------------------------

    def _start(self, reduction: Reduction) -> None:
        if len(self._reducing) == MAX_REDUCTIONS:
            self._wait(self._reducing.popleft())
        self._buffers += reduction.buffers
        self._touch()
        self._gradients -= reduction.freed
        if reduction.buffers:
            self._reducing.append(reduction)
        else:  # through shared memory: the next collective ends it
            self._wait(reduction)

    def _wait(self, reduction: Reduction) -> None:
        if id(reduction) not in self._summed:
            self._summed.add(id(reduction))
            self._sums += reduction.sums
        self._buffers -= reduction.buffers

    def _finish(self) -> None:
        """Play what follows the last action: whole weights are freed, reductions end, the optimizer steps."""
        self._drop_ahead()
        self._gathered = self._activations = self._messages = 0.0
        self._touch()
        self._buffers = self._sums = 0.0
        self._gradients = float(self._stored.gradients - self._rank.bucketed)
        self._touch(update=self._stored.update)

    # -- bytes --------------------------------------------------------------------------------------------

    def _received(self, stage: int) -> int:
        """Return the bytes of a stage's input from the stage before."""
        return self._blocks[self._stages.bounds[stage] - 1].passed if stage else 0

    def _frozen_and_trained(self, stage: int) -> tuple[range, range]:
        """Return the blocks of a stage without a backward, and those with one in the order of backward."""
        own = self._stages.blocks_of(stage)
        count = max(0, self._first_trained - own.start)
        return own[:count], own[count:][::-1]

    def _passed(self, stage: int) -> int:
        """Return the bytes of a stage's output to the next stage."""
        is_last = stage == len(self._stages.bounds) - 2
        return 0 if is_last else self._blocks[self._stages.bounds[stage + 1] - 1].passed

    def _touch(self, activations: float = 0.0, *, update: float = 0.0) -> None:
        """Record the living bytes, with more of activations or of the update, if they are the most so far."""
        activations += self._activations + self._messages
        gradients = self._gradients + self._sums
        moving = self._gathered + gradients + self._buffers + activations + update
        if moving > self._peak:
            self._peak, self._at_peak = moving, (self._gathered, gradients, self._buffers, activations, update)

    def _kinds(self) -> dict[str, int]:
        stored, (gathered, gradients, buffers, activations, update) = self._stored, self._at_peak
        return {
            "weights": stored.weights,
            "gathered": round(gathered),
            "gradients": round(gradients),
            "buffers": round(buffers + self._rank.buckets),
            "optimizer": stored.optimizer,
            "activations": round(activations),
            "update": round(update),
            "on the host": -stored.on_host,
        }
