"""The cuts of a forward: the blocks before which it can be cut, the tensors that cross, the parameters of each part."""

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

#: types of values that may be sent to another stage beside tensors
CONSTANTS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Event:
    """A call of a module that runs only on the module's own stage; other stages put zeros in place of its results.

    Attributes:
        number: its number among the calls of its module, and ``block`` among those of blocks (None if it is none).
        records: slot of a result -> its class, a dataclass that can be empty.
        aliases: slot of a result -> ("argument" or "result", slot) of the argument or the earlier result that it is.
    """

    name: str
    number: int
    block: int | None
    structure: TreeSpec
    records: Mapping[int, type]
    aliases: Mapping[int, tuple[str, int]]


@dataclass(frozen=True)
class Carried:
    """A tensor that crosses a cut: an argument or a result of a call."""

    name: str
    number: int
    side: str
    slot: int


@dataclass(frozen=True)
class Cuts:
    """The segments of a forward. A segment lies between two cuts.

    Attributes:
        events: (name, number) -> the call.
        blocks: names of the modules, in the order of their calls.
        first_blocks: for each segment but the first, the number of its first block; the number of blocks for a segment
            behind the last one.
        carried: for each segment but the first, the tensors that cross the cut before it.
        owned: for each segment, the names of the parameters and buffers that it uses.
        shapes: name of a parameter -> its shape and dtype.
    """

    events: Mapping[tuple[str, int], Event]
    blocks: tuple[str, ...]
    first_blocks: tuple[int, ...]
    carried: tuple[tuple[Carried, ...], ...]
    owned: tuple[tuple[str, ...], ...]
    shapes: Mapping[str, tuple[torch.Size, torch.dtype]]

    def __deepcopy__(self, memo: dict[int, Any]) -> Cuts:
        return self  # torch warns when a TreeSpec is copied


class NotCarriedError(Exception):
    """The reason why a forward cannot be cut at a place."""


@dataclass
class CutFinder:
    """A search for the places where a forward can be cut; ``blocks`` are calls in order, none within another."""

    trace: ForwardTrace
    blocks: Sequence[Call]
    #: for each place where the forward cannot be cut, the reason
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        trace = self.trace
        #: the times at which the forward may be cut
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
        #: keys of the tensors that are computed again after the current cut
        self._again: set[int] = set()
        self._began = [call.began for call in self.events]
        for operation in trace.operations:  # with zeros Python may have branched differently, or seen another shape
            if operation.asks and self._event_at(operation.time) is None:
                for key in operation.reads - trace.parameters.keys():
                    self._last_use[key] = 1 << 62

    # -- calls that are left out ------------------------------------------------------------------------------

    def _find_events(self) -> list[Call]:
        run = {call.name for call in self._outermost(set()) if not self._can_be_left_out(call)}
        while True:  # calls inside a call that runs on all stages may be left out, or run
            events = self._outermost(run)
            more = {call.name for call in events if not self._can_be_left_out(call)}
            if not more:
                return events
            run |= more

    def _outermost(self, run: set[str]) -> list[Call]:
        """Return the outermost calls that are left out, in order; calls that contain blocks are never left out.

        Args:
            run: names of the modules that run on all stages.
        """
        blocks = {id(call) for call in self.blocks}
        events: list[Call] = []
        end = 0
        for call in self.trace.calls:
            if call.began < end:
                continue
            holds = any(call.began < block.began and block.ended < call.ended for block in self.blocks)
            if id(call) in blocks or (call.name not in run and not holds):
                events.append(call)
                end = call.ended
        return events

    def _can_be_left_out(self, call: Call) -> bool:
        if any(call is block for block in self.blocks):
            return True
        if not call.results or not all(issubclass(kind, CONSTANTS) for _, kind in call.others):
            return False
        if not all(self._depends(leaf.key, call.ended) for leaf in call.results):
            return False
        if any(leaf.key in self.trace.parameters for leaf in call.results):
            return False
        if call.ended < self.times[0]:  # draws after it would shift
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

    # -- tensors that cross a cut -----------------------------------------------------------------------------

    def find(
        self, shapes: Mapping[str, tuple[torch.Size, torch.dtype]], buffers: Sequence[str], in_blocks: Container[str]
    ) -> Cuts:
        """Return the cuts.

        Args:
            shapes: name of a parameter -> its shape and dtype.
            buffers: names of the buffers.
            in_blocks: names of the parameters and buffers of blocks.

        Raises:
            NotCarriedError: for a reason that rules out every cut.
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
                    f"it writes to the buffer {name} ({line}), which each stage would repeat: move the write into a "
                    f"module that takes and returns the hidden states"
                )
        for name in (*shapes, *buffers):
            times = self.trace.uses.get(name, [])
            if name in buffers and (not times or any(self._event_at(time) is None for time in times)):
                continue  # all ranks have it
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
        """Return the segment of an unused tensor: that of the call of a module around it, or the last one."""
        around = [call.began for call in self.events if name.startswith(f"{call.name}.")]
        return bisect_right(starts, around[0]) if around else len(starts)

    def _over(self, time: int) -> list[Carried]:
        """Return the tensors that cross a cut at a time."""
        self._again.clear()
        live = [key for key, since in self.trace.dependent.items() if since < time <= self._last_use.get(key, 0)]
        carriers = {key: self._carriers(key, time, time) for key in live}
        for key in self._again & carriers.keys():  # computed again: it must not arrive as well
            carriers[key] = [carrier for carrier in carriers[key] if carrier.side == "result"]
        return list(dict.fromkeys(carrier for of_key in carriers.values() for carrier in of_key))

    def _carriers(self, key: int, until: int, cut: int) -> list[Carried]:
        """Return the arguments or results before ``until`` that carry a tensor with the values that it has at the cut.

        Where no module takes or returns it, the tensors from which it was computed are carried, and it is computed
        again.
        """
        since = self.trace.dependent.get(key, 1 << 62)
        written = [time for time in self._writes.get(key, ()) if time < cut]
        written_at = max(written, default=0)
        origin = self._event_at(since)
        for call in reversed(self.events):
            if call.ended <= cut and call is origin and written_at <= call.ended <= until:
                slots = [leaf.slot for leaf in call.results if leaf.key == key]
                if slots:
                    return [Carried(call.name, self._number(call), "result", slot) for slot in slots]
        for call in reversed(self.events):
            time = call.ended if call.ended <= cut else call.began
            if since <= time <= until and time >= written_at and call.began <= cut:
                for leaf in call.arguments:
                    if leaf.key == key and leaf.is_whole:
                        return [Carried(call.name, self._number(call), "argument", leaf.slot)]
        makers = self._made_by.get(key, [])
        maker = makers[0] if makers else None
        if origin is not None or maker is None or len([maker for maker in makers if maker.time < cut]) > 1:
            where = f"inside {origin.name}" if origin is not None else "outside the blocks"
            raise NotCarriedError(
                f"a tensor that was computed {where} ({self._line_of(key)}) is used again by {self._user(key, cut)}, "
                f"but no module returned it unchanged"
            )
        self._again.add(key)
        carried: list[Carried] = []
        for read in maker.reads:
            if name := self.trace.parameters.get(read):
                self.trace.uses[name].append(cut)  # each stage that computes it again needs the parameter
            else:
                carried += self._carriers(read, maker.time, cut)
        return carried

    def _line_of(self, key: int) -> str:
        makers = self._made_by.get(key, [])
        return makers[0].line if makers else "unknown"

    def _user(self, key: int, cut: int) -> str:
        """Return the first module or line that uses a storage after a cut."""
        for operation in self.trace.operations:
            if operation.time > cut and key in operation.reads | operation.writes:
                event = self._event_at(operation.time)
                return f"{event.name} ({operation.line})" if event is not None else operation.line
        return "the model's output"

    def _number(self, call: Call) -> int:
        return sum(event.name == call.name for event in self.events if event.began < call.began)

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
        if not is_dataclass(kind) or any(item.default is item.default_factory is MISSING for item in fields(kind)):
            raise NotCarriedError(
                f"{call.name} returns a {kind.__name__}, which is neither a tensor nor a tuple, list or dict of them, "
                f"nor a dataclass whose fields have defaults"
            )
    return records


def _aliases(call: Call) -> dict[int, tuple[str, int]]:
    """Return the results of a call that are its arguments, or earlier results."""
    aliases = dict[int, tuple[str, int]]()
    for index, leaf in enumerate(call.results):
        for side, others in (("argument", call.arguments), ("result", call.results[:index])):
            same = [other.slot for other in others if other.key == leaf.key and other.shape == leaf.shape]
            if same and leaf.slot not in aliases and _is_same(leaf, others):
                aliases[leaf.slot] = side, same[0]
    return aliases


def _is_same(leaf: Leaf, others: Sequence[Leaf]) -> bool:
    return any(other.key == leaf.key and other.shape == leaf.shape and other.is_whole for other in others)


def calls_in_turn(calls: Sequence[Call]) -> bool:
    """Return whether no call is within another."""
    return all(call.ended < after.began for call, after in itertools.pairwise(calls))
