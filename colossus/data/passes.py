"""Reading an iterable again and again, so that its place can be saved and found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import torch

from colossus.data.draws import Draws
from colossus.data.own_generators import generator_states, parts_of_loader, set_generator_states
from colossus.data.seed_sequences import seeds_of_places
from colossus.data.seeded import item_seed
from colossus.nest import leaves
from colossus.random import GLOBAL_RNG

log = logging.getLogger("colossus.data")

_END = object()
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
        self._at_start: dict[str, Any] = {}
        self._first_item: Any = None
        self._draws = Draws()
        if self._stateful is not None or hasattr(iterable, "__next__"):
            self._draws.seed_all()  # what it draws later cannot be read again

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

    def take(self, count: int, *, wrap: bool = True, keep: bool = True) -> list[Any]:
        """What ``count`` times `read` gives, or fewer items where the data ends. It leaves the global generators
        anywhere.

        What it does for many small items together: it seeds the generators that they draw from only (`Draws`). Where
        items turn out to draw from another one, they are read again, with the pass up to there.

        Args:
            keep: False has None in the place of each item.
        """
        items: list[Any] = []
        while len(items) < count and not self.ended:
            items += self._take_of_pass(count - len(items), keep)
            if len(items) < count:
                self._end_pass()
                if not wrap:
                    break
        return items

    def _take_of_pass(self, count: int, keep: bool) -> list[Any]:
        """Up to ``count`` items; fewer, when the pass has no more."""
        items: list[Any] = []
        while len(items) < count and (self._iterator is None or self._draws.is_probing):
            item = self._draws.probed(self._next, item_seed(self._seed, self.epoch, self.offset))
            if item is _END:
                return items
            if not self.offset:
                self._first_item = item
            self.offset += 1
            items.append(item if keep else None)
            if not self._draws.is_probing and self._has_moved():
                self._draws.seed_all()
        missing = count - len(items)
        while missing:
            rest = self._take_seeded(missing, keep)
            if not self._draws.learn():
                self.offset += len(rest)
                return items + rest
            self._read_again(self.offset)
        return items

    def _take_seeded(self, count: int, keep: bool) -> list[Any]:
        iterator, seeders = self._iterator, self._draws.begin()
        assert iterator is not None
        if not seeders:
            some = islice(iterator, count)
            return list(some) if keep else [None for _ in some]
        items = []
        for seed in seeds_of_places(self._seed, (self.epoch,), self.offset, self.offset + count):
            for seeder in seeders:
                seeder(seed)
            item = next(iterator, _END)
            if item is _END:
                break
            items.append(item if keep else None)
        return items

    def _read_again(self, offset: int) -> None:
        """From the start of this pass up to an item, since only now it is known what is to be seeded for each."""
        log.warning(
            "%s draws from %s, and did not for its first samples: reading the %d items of pass %d again, so that what "
            "is drawn depends on the place of an item alone",
            self.name, ", ".join(sorted(self._draws.kinds)), offset, self.epoch,
        )  # fmt: skip
        self._iterator, self.offset, self._states_to_set = None, 0, self._pass_states
        first_item = self._first_item
        self._take_of_pass(offset, keep=False)
        if self.offset < offset or not _may_be_equal(self._first_item, first_item):
            raise ValueError(
                f"{self.name} draws random numbers from {', '.join(sorted(self._draws.kinds))} for the first time "
                f"after {offset} items of pass {self.epoch}. To seed it for each item they are read again, but "
                f"iterating {self.name} anew gave "
                f"{'others' if self.offset == offset else f'{self.offset} items only'}. Let its __iter__ start over, "
                f"or draw one number from that generator for the first item of each pass"
            )

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
        self._at_start = dict(_attributes(self._iterable))
        self._iterator = iter(self._iterable)

    def _length(self, item: Any) -> int:
        """How many items of the data this is."""
        return 1

    def _has_moved(self) -> bool:
        """Whether an attribute has changed since the pass began, as the place of data has that cannot start over."""
        now = _attributes(self._iterable)
        return now.keys() != self._at_start.keys() or any(now[key] is not self._at_start[key] for key in now)

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
        with GLOBAL_RNG.preserved():
            self.take(state["offset"], wrap=False, keep=False)
        if (self.epoch, self.offset) != (state["epoch"], state["offset"]):
            raise EndOfPass

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


def _attributes(data: Any) -> dict[str, Any]:
    return getattr(data, "__dict__", {})


def _may_be_equal(item: Any, other: Any) -> bool:
    """Whether two items are the same as far as tensors, arrays, numbers and strings tell it."""
    pairs = zip_longest(leaves(item), leaves(other), fillvalue=("", None))
    return all(type(x) is type(y) and _are_equal(x, y) for (_, x), (_, y) in pairs)


def _are_equal(x: Any, y: Any) -> bool:
    if isinstance(x, torch.Tensor):
        return x.shape == y.shape and bool(((x == y) | (x != x) & (y != y)).all())
    if isinstance(x, np.ndarray):
        return np.array_equal(x, y, equal_nan=x.dtype.kind in "fc")
    return x == y or x != x if isinstance(x, int | float | str | bytes) else True
