"""The cuts of a forward: before which blocks they may be, what is carried over each, which parameters a part needs."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec

from colossus.convert.forward_trace import Call, ForwardTrace, Leaf, Operation

#: what may be sent to another stage beside tensors
CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Event:
    """A call of a module that other stages than its own leave out: zeros take the place of its results there.

    Attributes:
        number: of its module's such calls.
        block: number among the calls of blocks; None of a module that is none.
        records: slot of a result -> its class, a dataclass that can be empty.
        aliases: slot of a result -> ("taken" or "given", slot) of the argument or the earlier result that it is.
    """

    name: str
    number: int
    block: int | None
    structure: TreeSpec
    records: Mapping[int, type]
    aliases: Mapping[int, tuple[str, int]]


@dataclass(frozen=True)
class Carried:
    """A tensor that goes over a cut: an argument (``taken``) or a result (``given``) of a call."""

    name: str
    number: int
    side: str
    slot: int


@dataclass(frozen=True)
class Cuts:
    """The segments of a forward: what lies between two cuts.

    Attributes:
        events: (name, number) -> the call.
        blocks: names of the modules, in the order of their calls.
        first_blocks: of each segment but the first, the number of the block with which it begins; the number of blocks
            for what follows the last one.
        carried: over the cut before each segment but the first.
        owned: of each segment the names of the parameters and buffers that it uses.
        shapes: of all parameters, by name, and their dtypes.
    """

    events: Mapping[tuple[str, int], Event]
    blocks: tuple[str, ...]
    first_blocks: tuple[int, ...]
    carried: tuple[tuple[Carried, ...], ...]
    owned: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Cuts:
        return self  # torch warns where a structure is copied


class NotCarriedError(Exception):
    """Says why a forward cannot be cut at a place."""


@dataclass
class CutFinder:
    """Finds where a forward may be cut.

    Args:
        trace: of the forward.
        blocks: calls of the blocks, in order; none within another.
    """

    trace: ForwardTrace
    blocks: Sequence[Call]
    #: reason of each place that is no cut
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        trace = self.trace
        #: of the places where it may be cut
        self.times = [*(call.began for call in self.blocks), self.blocks[-1].ended]
        self._last_use: dict[int, int] = dict.fromkeys(trace.output, 1 << 62)
        self._writes: dict[int, list[int]] = {}
        self._made_by: dict[int, list[Operation]] = {}
        for operation in trace.operations:
            for key in operation.reads | operation.writes:
                self._last_use[key] = max(self._last_use.get(key, 0), operation.time)
            for key in operation.writes:
                self._writes.setdefault(key, []).append(operation.time)
            for key in operation.makes | operation.writes:
                self._made_by.setdefault(key, []).append(operation)
        self.events = self._find_events()
        #: keys of what is computed again after the cut that is looked at
        self._again: set[int] = set()
        self._began = [call.began for call in self.events]
        for operation in trace.operations:  # Python went another way, or by another shape, with zeros
            if operation.asks and self._event_at(operation.time) is None:
                for key in operation.reads - trace.parameters.keys():
                    self._last_use[key] = 1 << 62

    # -- calls that are left out ------------------------------------------------------------------------------

    def _find_events(self) -> list[Call]:
        kept = {call.name for call in self._outermost(set()) if not self._can_be_left_out(call)}
        while True:  # what is in one that is run may be left out, or run
            events = self._outermost(kept)
            more = {call.name for call in events if not self._can_be_left_out(call)}
            if not more:
                return events
            kept |= more

    def _outermost(self, kept: set[str]) -> list[Call]:
        """The calls outside of which no other is left out, in order; those that hold blocks never are."""
        blocks = {id(call) for call in self.blocks}
        events: list[Call] = []
        end = 0
        for call in self.trace.calls:
            if call.began < end:
                continue
            holds = any(call.began < block.began and block.ended < call.ended for block in self.blocks)
            if id(call) in blocks or (call.name not in kept and not holds):
                events.append(call)
                end = call.ended
        return events

    def _can_be_left_out(self, call: Call) -> bool:
        if any(call is block for block in self.blocks):
            return True
        if not call.given or not all(issubclass(kind, CONSTANTS) for _, kind in call.others):
            return False
        if not all(self._depends(leaf.key, call.ended) for leaf in call.given):
            return False
        if any(leaf.key in self.trace.parameters for leaf in call.given):
            return False
        if call.ended < self.times[0]:  # what is drawn after it would shift
            drawn = [time for time in self.trace.draws if time > call.ended]
            is_drawing = call.draws or any(call.began < time < call.ended for time in self.trace.draws)
            return not is_drawing or (not call.draws and all(self._is_in_block(time) for time in drawn))
        return True

    def _is_in_block(self, time: int) -> bool:
        return any(block.began < time < block.ended for block in self.blocks)

    def _depends(self, key: int, time: int) -> bool:
        return key in self.trace.parameters or self.trace.dependent.get(key, 1 << 62) <= time

    def _event_at(self, time: int) -> Call | None:
        index = bisect_right(self._began, time) - 1
        event = self.events[index] if index >= 0 else None
        return event if event is not None and event.began <= time <= event.ended else None

    # -- what is carried --------------------------------------------------------------------------------------

    def find(
        self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], buffers: Sequence[str], in_blocks: Container[str]
    ) -> Cuts:
        """Return the cuts.

        Args:
            shapes: of all parameters, by name, and their dtypes.
            buffers: names.
            in_blocks: names of the parameters and buffers of blocks.

        Raises:
            NotCarriedError: for what no place of a cut makes right.
        """
        first_blocks, carried = [], []
        for block, time in enumerate(self.times):
            try:
                over = self._over(time)
            except NotCarriedError as error:
                self.problems.append(f"before {self._place(block)}: {error}")
                continue
            first_blocks.append(block)
            carried.append(tuple(over))
        starts = [self.times[block] for block in first_blocks]
        owned: list[list[str]] = [[] for _ in range(len(starts) + 1)]
        for name, time, line in self.trace.rewrites:
            if self._event_at(time) is None:
                raise NotCarriedError(
                    f"it writes to the buffer {name} ({line}), which each stage would repeat: let a module do it that "
                    f"takes and returns the hidden states"
                )
        for name in (*shapes, *buffers):
            times = self.trace.uses.get(name, [])
            if name in buffers and (not times or any(self._event_at(time) is None for time in times)):
                continue  # on all ranks
            segments = sorted({bisect_right(starts, time) for time in times})
            if not segments and name not in in_blocks:
                segments = [self._near(name, starts)]
            for segment in segments:
                owned[segment].append(name)
        blocks = tuple(call.name for call in self.blocks)
        every = {(event.name, event.number): event for event in self._described()}
        return Cuts(every, blocks, tuple(first_blocks), tuple(carried), tuple(map(tuple, owned)), shapes)

    def _place(self, block: int) -> str:
        return self.blocks[block].name if block < len(self.blocks) else "what follows the blocks"

    def _near(self, name: str, starts: Sequence[int]) -> int:
        """The segment of what nothing uses: that of the call of a module around it, or the last one."""
        around = [call.began for call in self.events if name.startswith(f"{call.name}.")]
        return bisect_right(starts, around[0]) if around else len(starts)

    def _over(self, time: int) -> list[Carried]:
        """Return what is carried over a cut at a time."""
        self._again.clear()
        live = [key for key, since in self.trace.dependent.items() if since < time <= self._last_use.get(key, 0)]
        carriers = {key: self._carriers(key, time, time) for key in live}
        for key in self._again & carriers.keys():  # computed again: it must not arrive as well
            carriers[key] = [each for each in carriers[key] if each.side == "given"]
        return list(dict.fromkeys(carried for of_key in carriers.values() for carried in of_key))

    def _carriers(self, key: int, until: int, cut: int) -> list[Carried]:
        """Return where a tensor is met before ``until``, with the values that it has at the cut.

        Where no module takes or returns it, what it was computed from is carried, and it is computed again.
        """
        since = self.trace.dependent.get(key, 1 << 62)
        written = [time for time in self._writes.get(key, ()) if time < cut]
        written_at = max(written, default=0)
        origin = self._event_at(since)
        for call in reversed(self.events):
            if call.ended <= cut and call is origin and written_at <= call.ended <= until:
                slots = [leaf.slot for leaf in call.given if leaf.key == key]
                if slots:
                    return [Carried(call.name, self._number(call), "given", slot) for slot in slots]
        for call in reversed(self.events):
            at = call.ended if call.ended <= cut else call.began
            if since <= at <= until and at >= written_at and call.began <= cut:
                for leaf in call.taken:
                    if leaf.key == key and leaf.is_whole:
                        return [Carried(call.name, self._number(call), "taken", leaf.slot)]
        makers = self._made_by.get(key, [])
        maker = makers[0] if makers else None
        if origin is not None or maker is None or len([each for each in makers if each.time < cut]) > 1:
            where = f"inside of {origin.name}" if origin is not None else "outside of the blocks"
            raise NotCarriedError(
                f"a tensor that was computed {where} ({self._line_of(key)}) is used again by {self._user(key, cut)}, "
                f"but no module returned it as it is"
            )
        self._again.add(key)
        carried: list[Carried] = []
        for read in maker.reads:
            if name := self.trace.parameters.get(read):
                self.trace.uses[name].append(cut)  # each stage that computes it again has the parameter
            else:
                carried += self._carriers(read, maker.time, cut)
        return carried

    def _line_of(self, key: int) -> str:
        makers = self._made_by.get(key, [])
        return makers[0].line if makers else "unknown"

    def _user(self, key: int, cut: int) -> str:
        """The first module or line that uses a storage after a cut."""
        for operation in self.trace.operations:
            if operation.time > cut and key in operation.reads | operation.writes:
                event = self._event_at(operation.time)
                return f"{event.name} ({operation.line})" if event is not None else operation.line
        return "the model's output"

    def _number(self, call: Call) -> int:
        return sum(each.name == call.name for each in self.events if each.began < call.began)

    def _described(self) -> Iterator[Event]:
        numbers = Counter[str]()
        blocks = {id(call): number for number, call in enumerate(self.blocks)}
        for call in self.events:
            number, block = numbers[call.name], blocks.get(id(call))
            yield Event(call.name, number, block, call.structure, _records(call), _aliases(call))
            numbers[call.name] += 1


def _records(call: Call) -> dict[int, type]:
    records = {slot: kind for slot, kind in call.others if not issubclass(kind, CONSTANTS)}
    for kind in records.values():
        if not is_dataclass(kind) or any(each.default is each.default_factory is MISSING for each in fields(kind)):
            raise NotCarriedError(
                f"{call.name} returns a {kind.__name__}, which is neither a tensor nor a tuple, list or dict of them, "
                f"nor a dataclass whose fields have defaults"
            )
    return records


def _aliases(call: Call) -> dict[int, tuple[str, int]]:
    """Return which results of a call are its arguments, or earlier results."""
    aliases: dict[int, tuple[str, int]] = {}
    for index, leaf in enumerate(call.given):
        for side, others in (("taken", call.taken), ("given", call.given[:index])):
            same = [other.slot for other in others if other.key == leaf.key and other.shape == leaf.shape]
            if same and leaf.slot not in aliases and _is_same(leaf, others):
                aliases[leaf.slot] = side, same[0]
    return aliases


def _is_same(leaf: Leaf, others: Sequence[Leaf]) -> bool:
    return any(other.key == leaf.key and other.shape == leaf.shape and other.is_whole for other in others)


def calls_in_turn(calls: Sequence[Call]) -> bool:
    """Return whether no call is within another."""
    return all(call.ended < after.began for call, after in itertools.pairwise(calls))
