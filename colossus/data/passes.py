"""Data that can only be read from the front, pass after pass, so that its place can be saved and found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from copy import deepcopy
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")

ONE_PASS = (
    "is an iterator, which can be read once and not from the start again: "
    "give an iterable, such as a DataLoader or a class with __iter__"
)


class Passes:
    """Items of an iterable, pass after pass, for data that cannot seek.

    A pass begins, and the items of one batch are read, under global random generators seeded from (seed, epoch, place
    in the pass): the shuffle of a plain DataLoader is the same on all ranks and after a resume. Before each pass
    ``set_epoch`` of the iterable, its samplers and its dataset is called, and the ``generator`` of a DataLoader or
    sampler is seeded.

    Args:
        iterable: what is read; an iterator (a generator, say) has one pass only.
        chunk: items that are read at a time.
        stateful: what is asked for ``state_dict`` / ``load_state_dict``, the protocol of torchdata's
            `StatefulDataLoader`; None: a place is found again by reading up to it.
        seeds_items: whether to seed for each chunk, and not only where a pass begins.
    """

    def __init__(self, iterable: Any, seed: int, chunk: int, stateful: Any, *, seeds_items: bool) -> None:
        self.name = type(iterable).__name__
        self.epoch = 0
        self.offset = 0  # items read of this pass
        self.stateful = stateful
        #: a pass was empty: the data cannot start over
        self.ended = False
        #: for certain; a user's iterator class may start over in its __iter__, which shows at the end of a pass
        self.is_one_pass = hasattr(iterable, "__next__") and type(iterable).__module__ in ("builtins", "itertools")
        self._iterable, self._seed, self._chunk, self._seeds_items = iterable, seed, chunk, seeds_items
        self._iterator: Iterator[Any] | None = None
        #: the user's own state before the first pass, and the one to be loaded when a pass begins; empty: none
        self._first_state: list[Any] = []
        self._next_state: list[Any] = []

    def take(self, count: int, keep: range, *, wrap: bool) -> tuple[list[Any], int]:
        """Read the next ``count`` items.

        Args:
            keep: places among them.
            wrap: go on with the next pass.

        Returns:
            the items in these places, and how many were read: fewer where the data ends.
        """
        kept: list[Any] = []
        place = 0
        while place < count and not self.ended:
            before = place
            with GLOBAL_RNG.preserved() if self._iterator is None or self._seeds_items else nullcontext():
                if self._iterator is None:
                    self._iterator = self._begin()
                if self._seeds_items and self.offset:  # the first items go on from what the beginning has drawn
                    GLOBAL_RNG.seed(self._rng_seed(self.offset))
                for item in islice(self._iterator, count - place):
                    if place in keep:
                        kept.append(item)
                    place += 1
            self.offset += place - before
            if place < count:
                self._end_pass()
                if not wrap:
                    break
        return kept, place

    def _rng_seed(self, offset: int) -> int:
        return derive_seeds(self._seed, (self.epoch, offset))[0]

    def _begin(self) -> Iterator[Any]:
        keeps_place = self.stateful is not None and not isinstance(
            self.stateful, DataLoader
        )  # which iter() starts over
        if keeps_place and not self._first_state:
            self._first_state = [deepcopy(self.stateful.state_dict())]
        batch_sampler = getattr(self._iterable, "batch_sampler", None)
        samplers = [getattr(self._iterable, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]
        for part in (self._iterable, *samplers, getattr(self._iterable, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self.epoch)
        seed = self._rng_seed(0)
        for part in (self._iterable, *samplers):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        GLOBAL_RNG.seed(seed)
        if self._next_state:
            self.stateful.load_state_dict(deepcopy(self._next_state.pop()))
        return iter(self._iterable)

    def _end_pass(self) -> None:
        if not self.offset and not self.epoch:
            raise ValueError(
                f"{self.name} gave nothing: the data is empty, or it is an iterator already read to its end"
            )
        self.ended = not self.offset
        if self.ended:
            log.warning("%s gave nothing in pass %d: the data ends behind the passes before", self.name, self.epoch)
        self.epoch, self.offset, self._iterator = self.epoch + 1, 0, None

    def rewind(self) -> None:
        """Back to the first item of the first pass."""
        if self.is_one_pass and (self.epoch or self.offset):
            raise ValueError(f"{self.name} {ONE_PASS}")
        if not self.is_one_pass:
            self._go_to(0, 0, self._first_state)

    def _go_to(self, epoch: int, offset: int, user_state: list[Any]) -> None:
        self.epoch, self.offset, self.ended, self._iterator = epoch, offset, False, None
        self._next_state = list(user_state)

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "offset": self.offset}
        if self.stateful is not None and (self._iterator is not None or self._next_state or self.epoch):
            user = self._next_state[0] if self._next_state else self.stateful.state_dict()
            state["user"] = deepcopy(user)  # an object may give the very state that it goes on to change
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of ``state``: by the user's own state when the next item is read, or by reading up to it.

        Raises:
            ValueError: the data has fewer items than were read.
        """
        epoch, offset = state["epoch"], state["offset"]
        if self.stateful is not None and "user" in state:
            self._go_to(epoch, offset, [state["user"]])
            return
        self.rewind()
        self.epoch = epoch
        if not offset:
            return
        log.warning("%s has no state_dict: reading %d items of pass %d again to resume", self.name, offset, epoch)
        while self.offset < offset:  # by the chunks of the run, the first of which may have begun in the pass before
            count = self._chunk if self.offset else offset % self._chunk or self._chunk
            if self.take(count, range(0), wrap=False)[1] < count:
                raise ValueError(
                    f"{self.name} has less than {offset} items in pass {epoch}, but the run that goes on had read so "
                    f"many: the data is not the same any more"
                )
