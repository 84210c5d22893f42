"""Sources that are read from the front: how they resume, and an iterable of samples (`SampleStream`).

`colossus.data.batch_stream` has the source of ready batches. Every rank reads the same stream and keeps its shard of
each batch, unless the data differs between data ranks.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data import default_collate as torch_collate

from colossus.config.schema import ReadingOptions
from colossus.data.batch import Batch, SampleDims
from colossus.data.sample_marks import NUM_MARKED, Marks, marks_of, repeating
from colossus.data.sampler import BatchShard
from colossus.data.sources import EndOfData, Source
from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")

_ONE_PASS = (
    "is an iterator, which can be read once and not from the start again: "
    "use an iterable, such as a DataLoader or a class with __iter__"
)


class StreamSource(Source):
    """Items of an iterable, pass after pass, for data that cannot seek: a step is reached by reading up to it.

    The start of a pass and the items of each batch are read with global random generators seeded from (seed, epoch,
    position in the pass). So the shuffle of a plain DataLoader is the same on all ranks and after a resume. Before each
    pass ``set_epoch`` of the iterable, its samplers and its dataset is called, and the ``generator`` of a DataLoader or
    sampler is seeded.

    Args:
        iterable: the iterable; an iterator (for example a generator) has one pass only.
        shard: the shard of each batch that this data rank reads.
        options: how data is read.
        stateful: object that may have ``state_dict`` and ``load_state_dict``, the protocol of torchdata's
            `StatefulDataLoader`; without them a position is reached by reading up to it.
        gives_batches: whether an item is a batch, not a sample.
    """

    def __init__(
        self, iterable: Any, shard: BatchShard, options: ReadingOptions, *, stateful: Any, gives_batches: bool
    ) -> None:
        self.name = type(iterable).__name__
        self.shard, self.per_rank = shard, options.per_rank
        has_state = all(callable(getattr(stateful, name, None)) for name in ("state_dict", "load_state_dict"))
        has_buffer = has_state and _has_shuffle_buffer(stateful)
        self.stateful: Any = stateful if has_state and not has_buffer else None
        self._lacks_state = "a shuffle buffer, which its state_dict leaves out" if has_buffer else "no state_dict"
        #: samples of a whole batch
        self._whole = shard.size if options.per_rank else shard.global_batch_size
        self._iterable, self._gives_batches, self._seeds_items = iterable, gives_batches, options.seeds(iterable)
        self._iterator: Iterator[Any] | None = None
        self._epoch, self._offset = 0, 0  # pass of the next item, and its position in the pass
        #: how the items of the pass so far were read, [items at a time, times]: seeds depend on it
        self._reads: list[list[int]] = []
        #: whether a pass was empty: the data cannot start over
        self._has_ended = False
        #: whether it can certainly not start over; a user's iterator class may do so in its __iter__
        self._has_one_pass = hasattr(iterable, "__next__") and type(iterable).__module__ in ("builtins", "itertools")
        #: the user's state before the first pass, and the one to load when a pass begins; empty: none
        self._first_state: list[Any] = []
        self._next_state: list[Any] = []
        if self._has_one_pass and not shard.endless:
            raise ValueError(f"data.validation: {self.name} {_ONE_PASS}, because every evaluation reads it again")

    def read(self) -> Batch:
        if not self.shard.endless and self._epoch:  # the pass of an evaluation has ended
            raise EndOfData
        batch = self._read()
        self.step += 1
        return batch

    @abstractmethod
    def _read(self) -> Batch:
        """Return the next batch, or raise `EndOfData`."""

    def _span(self, size: int) -> tuple[int, int]:
        """Return the (start, stop) of the samples that this data rank takes of a batch of this size."""
        return (0, size) if self.per_rank else self.shard.span(size)

    def _take(self, count: int, keep: range, *, wrap: bool) -> tuple[list[Any], int]:
        """Read the next ``count`` items.

        Args:
            count: number of items.
            keep: positions of the items to return.
            wrap: whether to continue with the next pass.

        Returns:
            The items at these positions, and the number of items that were read: fewer if the data ends.
        """
        items: list[Any] = []
        place = 0
        while place < count and not self._has_ended:
            before = place
            with GLOBAL_RNG.preserved() if self._iterator is None or self._seeds_items else nullcontext():
                if self._iterator is None:
                    self._iterator = self._begin()
                if (
                    self._seeds_items and self._offset
                ):  # the first items use the generators as the start of the pass leaves them
                    GLOBAL_RNG.seed(self._rng_seed(self._offset))
                for item in islice(self._iterator, count - place):
                    if place in keep:
                        items.append(item)
                    place += 1
            self._count_read(place - before)
            if place < count:
                self._end_pass()
                if not wrap:
                    break
        return items, place

    def _count_read(self, items: int) -> None:
        self._offset += items
        if self._reads and self._reads[-1][0] == items:
            self._reads[-1][1] += 1
        elif items:
            self._reads.append([items, 1])

    def _rng_seed(self, offset: int) -> int:
        return derive_seeds(self.shard.seed, (self._epoch, offset))[0]

    def _begin(self) -> Iterator[Any]:
        self._end_workers()
        starts_over = self.stateful is None or isinstance(self.stateful, DataLoader)  # when it is iterated
        if not starts_over and not self._first_state:
            self._first_state = [deepcopy(self.stateful.state_dict())]
        batch_sampler = getattr(self._iterable, "batch_sampler", None)
        samplers = [getattr(self._iterable, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler]
        for part in (self._iterable, *samplers, getattr(self._iterable, "dataset", None)):
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(self._epoch)
        seed = self._rng_seed(0)
        for part in (self._iterable, *samplers):
            if isinstance(generator := getattr(part, "generator", None), torch.Generator):
                generator.manual_seed(seed)
        GLOBAL_RNG.seed(seed)
        if self._next_state:
            self.stateful.load_state_dict(deepcopy(self._next_state.pop()))
        return iter(self._iterable)

    def _end_pass(self) -> None:
        if not self._offset and not self._epoch:
            raise ValueError(
                f"{self.name} has no items: the data is empty, or it is an iterator already read to its end"
            )
        self._has_ended = not self._offset
        self._epoch, self._offset, self._reads, self._iterator = self._epoch + 1, 0, [], None

    def _end_workers(self) -> None:
        """End persistent workers of a DataLoader, whose state of earlier passes a resumed run could not restore."""
        if isinstance(self._iterable, DataLoader) and self.stateful is None:
            self._iterable._iterator = None

    def _go_to(self, step: int, epoch: int, reads: list[list[int]], user_state: list[Any]) -> None:
        self.step, self._epoch, self._has_ended, self._iterator = step, epoch, False, None
        self._reads, self._offset = deepcopy(reads), _total(reads)
        self._next_state = list(user_state)

    def close(self) -> None:
        self._iterator, self._has_ended = None, True
        self._end_workers()

    def seek(self, step: int) -> None:
        if step < self.step or not step:  # a failed first step may have read items
            if not self._has_one_pass:
                self.shard = replace(self.shard, shift=0)
                self._go_to(0, 0, [], self._first_state)
            elif self._epoch or self._offset:
                raise ValueError(f"{self.name} {_ONE_PASS}")
        if step > self.step:
            log.warning("%s cannot seek: reading %d batches to reach step %d", self.name, step - self.step, step)
        while self.step < step:
            try:
                self.read()
            except EndOfData:
                raise ValueError(f"{self.name} ends with batch {self.step}, before batch {step} is reached") from None

    def state_dict(self) -> dict[str, Any]:
        place: dict[str, Any] = {"epoch": self._epoch, "offset": self._offset, "reads": deepcopy(self._reads)}
        if self.stateful is not None and (self._iterator is not None or self._next_state or self._epoch):
            user = self._next_state[0] if self._next_state else self.stateful.state_dict()
            place["user"] = deepcopy(user)  # an object may return the very state that it changes later
        return {"step": self.step, "passes": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the position of ``state``: by the user's state when the next item is read, or by reading up to it.

        Raises:
            ValueError: if the data has fewer items than were read.
        """
        shard, step, passes = self.shard.resumed(state), state["step"], state.get("passes")
        if passes is None:  # saved when the data was of another kind
            self.seek(0)
            self.seek(shard.sizes.before(step) // shard.global_batch_size)
        elif self.stateful is not None and "user" in passes:
            self._go_to(step, passes["epoch"], self._reads_of(state), [passes["user"]])
        else:
            self._read_again(passes["epoch"], self._reads_of(state))
        self.shard, self.step = shard, step

    def repeating_leaves(self) -> set[str] | None:
        if self.stateful is not None or hasattr(self._iterable, "__next__"):  # the position would be lost
            return None
        try:
            read_anew = self._read_anew()
        except Exception:  # it cannot be copied
            return None

        def read() -> Marks:
            with GLOBAL_RNG.preserved(self._rng_seed(0)):
                return read_anew()

        return repeating(read)

    @abstractmethod
    def _read_anew(self) -> Callable[[], Marks]:
        """Return a function that reads the first samples again without changing the iterable, or raise."""

    def _read_again(self, epoch: int, reads: list[list[int]]) -> None:
        self.seek(0)
        self._epoch, total = epoch, _total(reads)
        if total:
            why = f"{self.name} has {self._lacks_state}"
            log.warning("%s: reading %d items of pass %d again to resume", why, total, epoch)
        for count in chain.from_iterable(repeat(count, times) for count, times in reads):
            if self._take(count, range(0), wrap=False)[1] < count:
                raise ValueError(f"{self.name} has less than the {total} items that the run had read of pass {epoch}")

    def _reads_of(self, state: dict[str, Any]) -> list[list[int]]:
        """Return how the pass of ``state`` was read, in items of today: batches may be larger or smaller now."""
        size, offset = self.shard.global_batch_size, state["passes"]["offset"]
        if not self._gives_batches or (old := state.get("global_batch_size", size)) == size:
            return state["passes"].get("reads", [[offset, 1]])
        batches, again = divmod(offset * old, size)
        if again:
            log.warning("%s: %d samples are read again, which do not fill one of its batches", self.name, again)
        return [[1, batches]]


def _total(reads: list[list[int]]) -> int:
    return sum(count * times for count, times in reads)


def _has_shuffle_buffer(stateful: Any) -> bool:
    """Return whether it is a stream of ``datasets`` with a shuffle buffer, which its state_dict leaves out."""
    parts = [stateful, getattr(stateful, "dataset", None)]
    while parts:
        part = parts.pop()
        if type(part).__name__ == "BufferShuffledExamplesIterable":
            return True
        if type(part).__module__.startswith("datasets."):
            parts += [getattr(part, "_ex_iterable", None), getattr(part, "ex_iterable", None)]
            parts += getattr(part, "ex_iterables", ())
    return False


class SampleStream(StreamSource):
    """An IterableDataset.

    Each step takes ``global_batch_size`` samples, and collates those of this data rank. With ``per_rank`` the dataset
    yields the samples of this data rank alone, and a step takes as many as the rank needs. A batch that the end of a
    pass leaves incomplete is filled from the next pass. If there is no next pass, it is dropped in training; in
    validation it is the last batch.
    """

    def __init__(self, dataset: IterableDataset[Any], shard: BatchShard, options: ReadingOptions) -> None:
        super().__init__(dataset, shard, options, stateful=dataset, gives_batches=False)
        self._collate = options.collate_fn or torch_collate
        self._seeds_collate = options.seeds_collate

    def _read(self) -> Batch:
        whole, endless = self._whole, self.shard.endless
        start, stop = self._span(whole)
        keeps_all = self.wants_marks or not endless
        samples, size = self._take(whole, range(whole) if keeps_all else range(start, stop), wrap=endless)
        if not size or (endless and size < whole):
            raise EndOfData
        if self.wants_marks:
            self.marks = marks_of(samples)
        if keeps_all:
            start, stop = self._span(size)
            if (
                start == stop
            ):  # no sample: an empty slice of a batch of one, so that shapes and keys are those of others
                return SampleDims(self.shard.batch_dims).cut(self._collated(samples[:1], start), 0, 0)
            samples = samples[start:stop]
        return self._collated(samples, start)

    def _read_anew(self) -> Callable[[], Marks]:
        dataset = deepcopy(self._iterable)
        return lambda: marks_of([*islice(iter(dataset), NUM_MARKED)])

    def _collated(self, samples: list[Any], start: int) -> Batch:
        if not self._seeds_collate:
            return self._collate(samples)
        with GLOBAL_RNG.preserved(derive_seeds(self.shard.seed, (self.step, start))[0]):
            return self._collate(samples)
