"""Reading an iterable again and again, so that its place can be saved and found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from colossus.data.own_generators import generator_states, parts_of_loader, set_generator_states
from colossus.data.seeded import item_seed
from colossus.random import GLOBAL_RNG

log = logging.getLogger("colossus.data")

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

    def read(self, *, wrap: bool = True) -> Any:
        """The next item; at the end of a pass the first of the next one, or `EndOfPass`."""
        while True:
            if self.ended:
                raise EndOfPass
            with GLOBAL_RNG.preserved(item_seed(self._seed, self.epoch, self.offset)):
                if self._iterator is None:
                    self._set_epoch()
                    set_generator_states(self._iterable, self._states_to_set)
                    self._states_to_set = {}
                    self._pass_states = generator_states(self._iterable)
                    self._iterator = iter(self._iterable)
                try:
                    item = next(self._iterator)
                except StopIteration:
                    self._end_pass()
                    if not wrap:
                        raise EndOfPass from None
                    continue
            self.offset += 1
            return item

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
            log.warning(
                "%s has no state_dict: reading %d items of pass %d again to resume",
                self.name, state["offset"], state["epoch"],
            )  # fmt: skip
        while self.offset < state["offset"]:
            self.read(wrap=False)

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
