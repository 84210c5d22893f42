"""Reading an iterable again and again, so that its place can be saved and found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice
from typing import Any

from colossus.data.own_generators import generator_states, parts_of_loader, set_generator_states
from colossus.data.seed_sequences import seeds_of_places
from colossus.data.seeded import item_seed
from colossus.random import GLOBAL_RNG, RngState

log = logging.getLogger("colossus.data")

_END = object()
#: items that are passed over together
_AT_ONCE = 4096
ONE_PASS = (
    "is an iterator, which can be read once and not from the start again: "
    "give an iterable, such as a DataLoader or a class with __iter__"
)


class EndOfPass(Exception):
    """The data has ended and is not to start over (or cannot)."""


class Passes:
    """Items of an iterable, pass after pass, for data that cannot seek.

    Each item is read under global random generators seeded by (seed, epoch, place in the pass), which makes the shuffle
    of a plain DataLoader the same on all ranks and after a resume. ``set_epoch`` of the iterable, its sampler or its
    dataset is called before each pass, for whichever has it.

    Generators of a loader's own, of its samplers and its dataset, go on from pass to pass; a place in the data
    remembers what they were when its pass began.

    Args:
        iterable: what is read; an iterator (a generator, say) has one pass only.
        name: what the messages call it.
        stateful: the object asked for ``state_dict`` / ``load_state_dict``; without these the place is
            found again by reading.
    """

    def __init__(self, iterable: Any, seed: int, *, name: str, stateful: Any = None) -> None:
        self.name = name
        self.epoch = 0
        self.offset = 0  # items read in this pass
        self._iterable = iterable
        self._seed = seed
        self._stateful = stateful if _has_state(stateful) else None
        self._iterator: Iterator[Any] | None = None
        #: states of the iterable's own generators: before the first pass, at the start of this one, and to start with
        self._first_states = self._pass_states = generator_states(iterable)
        self._states_to_set: dict[str, Any] = {}
        #: for certain; a user's iterator class may start over in its __iter__, which shows at the end of a pass
        self.is_one_pass = hasattr(iterable, "__next__") and type(iterable).__module__ in ("builtins", "itertools")
        self.ended = False

    @property
    def keeps_own_state(self) -> bool:
        """Whether the place is saved by the user's own ``state_dict``."""
        return self._stateful is not None

    def read(self, *, wrap: bool = True) -> Any:
        """The next item; at the end of a pass the first of the next one, or `EndOfPass`."""
        while True:
            if self.ended:
                raise EndOfPass
            with GLOBAL_RNG.preserved(item_seed(self._seed, self.epoch, self.offset)):
                item = self._next()
            if item is not _END:
                self.offset += self._length(item)
                return item
            self._end_pass()
            if not wrap:
                raise EndOfPass

    def skip(self, count: int) -> None:
        """Read so many items, or `EndOfPass`."""
        for _ in range(count):
            self.read(wrap=False)

    def _next(self) -> Any:
        """The next item of this pass, or `_END`."""
        if self._iterator is None:
            self._begin()
        assert self._iterator is not None
        return next(self._iterator, _END)

    def _begin(self) -> None:
        self._set_epoch()
        set_generator_states(self._iterable, self._states_to_set)
        self._states_to_set = {}
        self._pass_states = generator_states(self._iterable)
        self._iterator = iter(self._iterable)

    def _length(self, item: Any) -> int:
        """How many items of the data this is."""
        return 1

    def rewind(self) -> None:
        """Back to the first item of the first pass."""
        if self.is_one_pass and (self.epoch or self.offset):
            raise ValueError(f"{self.name} {ONE_PASS}")
        if self.is_one_pass:
            return
        self.epoch = self.offset = 0
        self.ended = False
        self._iterator = None
        self._states_to_set = self._first_states

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "offset": self.offset}
        if self._stateful is not None:
            state["user"] = self._stateful.state_dict()
        generators = self._pass_states
        if self._iterator is None:
            generators = self._states_to_set or generator_states(self._iterable)
        if generators:
            state["generators"] = generators
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of ``state``: by the user's own state, or by reading up to it."""
        if "user" in state and self._stateful is not None:
            self._stateful.load_state_dict(state["user"])
            self._iterator = None
            self.epoch, self.offset = state["epoch"], state["offset"]
            return
        if (self.epoch, self.offset) != (0, 0):
            self.rewind()
        self.epoch = state["epoch"]
        self._states_to_set = state.get("generators", {})
        if state["offset"]:
            self._tell_reading_again(state)
        self.skip(state["offset"])

    def _tell_reading_again(self, state: dict[str, Any]) -> None:
        log.warning(
            "%s has no state_dict: reading %d items of pass %d again to resume",
            self.name, state["offset"], state["epoch"],
        )  # fmt: skip

    def _end_pass(self) -> None:
        if not self.offset and not self.epoch:
            raise ValueError(
                f"{self.name} gave nothing: the data is empty, or it is an iterator already read to its end"
            )
        self.ended = not self.offset  # a second pass without items: an iterator that cannot start over
        self.epoch += 1
        self.offset = 0
        self._iterator = None

    def _set_epoch(self) -> None:
        for part in parts_of_loader(self._iterable).values():
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self.epoch)


def _has_state(candidate: Any) -> bool:
    return callable(getattr(candidate, "state_dict", None)) and callable(getattr(candidate, "load_state_dict", None))


class SamplePasses(Passes):
    """Many small items, which would take less time to read than to seed generators for.

    The global generators are seeded at the start of each pass and go on from item to item, as in one process that does
    nothing else: all ranks read all items in order, and so draw the same. Only data that keeps its own place (a
    ``state_dict``), and so can be entered anywhere, has them seeded for each item, by its place.
    """

    def __init__(self, iterable: Any, seed: int, *, name: str, stateful: Any = None) -> None:
        super().__init__(iterable, seed, name=name, stateful=stateful)
        #: of the global generators, behind the last item of this pass
        self._rng: RngState | None = None

    def take(self, count: int, *, wrap: bool = True, keep: range | None = None) -> list[Any]:
        """The next ``count`` items, or fewer where the data ends. Leaves the global generators anywhere.

        Args:
            wrap: go on with the next pass.
            keep: places among the items; there is None in all other places. None keeps all.
        """
        items: list[Any] = []
        keep = range(count) if keep is None else keep
        while len(items) < count and not self.ended:
            self._take_of_pass(items, count, keep)
            if len(items) < count:
                self._end_pass()
                if not wrap:
                    break
        return items

    def skip(self, count: int) -> None:
        with GLOBAL_RNG.preserved():
            for done in range(0, count, _AT_ONCE):
                asked = min(_AT_ONCE, count - done)
                if len(self.take(asked, wrap=False, keep=range(0))) < asked:
                    raise EndOfPass

    def _take_of_pass(self, items: list[Any], count: int, keep: range) -> None:
        """Append to ``items`` until there are ``count``, or the pass has no more."""
        before = len(items)
        try:
            for place, item in enumerate(islice(self._items(count - before), count - before), before):
                items.append(item if place in keep else None)
        finally:  # an error that is caught costs the items that were read with it
            self.offset += len(items) - before
            self._rng = GLOBAL_RNG.get_state()

    def _items(self, count: int) -> Iterator[Any]:
        """Those that follow, at least ``count``."""
        if self._iterator is None:
            GLOBAL_RNG.seed(item_seed(self._seed, self.epoch, self.offset))
            self._begin()
        elif self._rng is not None and not self.keeps_own_state:
            GLOBAL_RNG.set_state(self._rng)
        assert self._iterator is not None
        return self._seeded(self._iterator, count) if self.keeps_own_state else self._iterator

    def _seeded(self, iterator: Iterator[Any], count: int) -> Iterator[Any]:
        for seed in seeds_of_places(self._seed, (self.epoch,), self.offset, self.offset + count):
            GLOBAL_RNG.seed(seed)
            item = next(iterator, _END)
            if item is _END:
                return
            yield item
