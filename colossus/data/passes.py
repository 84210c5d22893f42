"""Reading an iterable again and again, so that its place can be saved and found."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
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

    A read that raises is a place, too: what can go on behind it does, and a resume reads up to there through the same
    errors, and through no others.

    Args:
        iterable: what is read; an iterator (a generator, say) has one pass only.
        name: what the messages call it.
        stateful: the object asked for ``state_dict`` / ``load_state_dict``, before its first pass, too; without these
            the place is found again by reading.
    """

    def __init__(self, iterable: Any, seed: int, *, name: str, stateful: Any = None) -> None:
        self.name = name
        self.epoch = 0
        self.offset = 0  # reads of this pass
        self._iterable = iterable
        self._seed = seed
        self.stateful = stateful if _has_state(stateful) else None
        self._iterator: Iterator[Any] | None = None
        #: those reads that raised an error
        self._failed: list[int] = []
        #: what the iterable's own generators were when this pass began
        self._pass_generators = generator_states(iterable)
        #: what its generators and the user's own state were before the first pass, and are to be when one begins
        self._first: dict[str, Any] = {"generators": self._pass_generators}
        self._to_load: dict[str, Any] = {}
        self._generators_apart: dict[str, Any] = {}
        #: for certain; a user's iterator class may start over in its __iter__, which shows at the end of a pass
        self.is_one_pass = hasattr(iterable, "__next__") and type(iterable).__module__ in ("builtins", "itertools")
        self.ended = False

    @property
    def keeps_own_state(self) -> bool:
        """Whether the place is saved by the user's own ``state_dict``."""
        return self.stateful is not None

    @contextmanager
    def generators_apart(self) -> Iterator[None]:
        """What is read in here has the iterable's own generators for itself: others that share them find them as they
        were."""
        outside = generator_states(self._iterable)
        set_generator_states(self._iterable, self._generators_apart)
        try:
            yield
        finally:
            self._generators_apart = generator_states(self._iterable)
            set_generator_states(self._iterable, outside)

    def read(self, *, wrap: bool = True) -> Any:
        """The next item; at the end of a pass the first of the next one, or `EndOfPass`."""
        while True:
            if self.ended:
                raise EndOfPass
            with GLOBAL_RNG.preserved():
                item = self._next()
            if item is not _END:
                self.offset += 1
                return item
            self._end_pass()
            if not wrap:
                raise EndOfPass

    def _next(self) -> Any:
        """The next item of this pass, or `_END`. Leaves the global generators anywhere."""
        iterator = self._begun()
        if self.offset:  # the first item goes on from what the beginning of the pass drew
            GLOBAL_RNG.seed(item_seed(self._seed, self.epoch, self.offset))
        try:
            return next(iterator, _END)
        except Exception as error:
            self._note_failure(self.offset)
            if getattr(self._iterable, "num_workers", 0):  # of a DataLoader's workers, as `worker_loader.read_next`
                raise error.with_traceback(None) from None
            raise

    def _begun(self) -> Iterator[Any]:
        """The iterator of this pass. One that begins has the seed of the first item, wherever in the pass it begins."""
        if self._iterator is None:
            GLOBAL_RNG.seed(item_seed(self._seed, self.epoch, 0))
            if self.stateful is not None and "user" not in self._first:
                self._first["user"] = deepcopy(self.stateful.state_dict())
            self._set_epoch()
            set_generator_states(self._iterable, self._to_load.get("generators", {}))
            if self.stateful is not None and "user" in self._to_load:
                self.stateful.load_state_dict(deepcopy(self._to_load["user"]))
            self._pass_generators = generator_states(self._iterable)
            self._iterator = iter(self._iterable)
            self._to_load = {}
        return self._iterator

    def _note_failure(self, place: int) -> None:
        self._failed.append(place)
        self.offset += 1

    def rewind(self) -> None:
        """Back to the first item of the first pass."""
        if self.is_one_pass and (self.epoch or self.offset):
            raise ValueError(f"{self.name} {ONE_PASS}")
        if self.is_one_pass:
            return
        self._go_to(0, self._first)

    def _go_to(self, epoch: int, to_load: dict[str, Any]) -> None:
        """The beginning of a pass, or where the user's own state leads."""
        self.epoch, self.offset, self._failed = epoch, 0, []
        self.ended = False
        self._iterator = None
        self._to_load = to_load

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = {"epoch": self.epoch, "offset": self.offset}
        if self._failed:
            state["failed"] = self._failed
        if self.stateful is not None:
            state["user"] = self._to_load["user"] if "user" in self._to_load else self.stateful.state_dict()
        generators = self._pass_generators
        if self._iterator is None:
            generators = self._to_load.get("generators") or generator_states(self._iterable)
        if generators:
            state["generators"] = generators
        return deepcopy(state)  # an object may give the very state that it goes on to change

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of ``state``: by the user's own state when the next item is read, or by reading up to it.

        Raises:
            ValueError: the data has fewer items than were read.
        """
        epoch, offset, failed = state["epoch"], state["offset"], state.get("failed", [])
        if "user" in state and self.stateful is not None:
            self._go_to(epoch, {"user": state["user"]})
        else:
            if (self.epoch, self.offset) != (0, 0):
                self.rewind()
            self._go_to(epoch, {**self._to_load, "generators": state.get("generators", {})})
            self._read_up_to(offset, failed)
        self.offset, self._failed = offset, list(failed)

    def _read_up_to(self, offset: int, failed: list[int]) -> None:
        if not offset:
            return
        log.warning(
            "%s has no state_dict: reading %d items of pass %d again to resume", self.name, offset, self.epoch
        )  # fmt: skip
        while self.offset < offset:
            try:
                self._pass_over(offset - self.offset)
            except EndOfPass:
                raise ValueError(
                    f"{self.name} has less than {offset} items in pass {self.epoch - 1}, but the run that goes on had "
                    f"read so many: the data is not the same any more"
                ) from None
            except Exception:
                if self.offset - 1 not in failed:
                    raise

    def _pass_over(self, count: int) -> None:
        """Read at most so many items, or `EndOfPass`."""
        self.read(wrap=False)

    def _end_pass(self) -> None:
        if not self.offset and not self.epoch:
            raise ValueError(
                f"{self.name} gave nothing: the data is empty, or it is an iterator already read to its end"
            )
        self.ended = not self.offset  # a second pass without items: an iterator that cannot start over
        if self.ended:
            log.warning("%s gave nothing in pass %d: the data ends behind the passes before", self.name, self.epoch)
        self.epoch += 1
        self.offset, self._failed = 0, []
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

    def _pass_over(self, count: int) -> None:
        asked = min(_AT_ONCE, count)
        with GLOBAL_RNG.preserved():
            if len(self.take(asked, wrap=False, keep=range(0))) < asked:
                raise EndOfPass

    def _take_of_pass(self, items: list[Any], count: int, keep: range) -> None:
        """Append to ``items`` until there are ``count``, or the pass has no more."""
        before = len(items)
        iterator = self._items(count - before)
        try:
            for place, item in enumerate(islice(iterator, count - before), before):
                items.append(item if place in keep else None)
        except Exception:  # which, if it is caught, costs the items that were read with it
            self._note_failure(self.offset + len(items) - before)
            raise
        finally:
            self.offset += len(items) - before
            self._rng = GLOBAL_RNG.get_state()

    def _items(self, count: int) -> Iterator[Any]:
        """Those that follow, at least ``count``."""
        is_begun = self._iterator is not None
        iterator = self._begun()
        if self.keeps_own_state:
            return self._seeded(iterator, count)
        if is_begun and self._rng is not None:
            GLOBAL_RNG.set_state(self._rng)
        return iterator

    def _seeded(self, iterator: Iterator[Any], count: int) -> Iterator[Any]:
        for seed in seeds_of_places(self._seed, (self.epoch,), self.offset, self.offset + count):
            GLOBAL_RNG.seed(seed)
            item = next(iterator, _END)
            if item is _END:
                return
            yield item
