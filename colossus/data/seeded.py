"""Random numbers of a user's data code: they depend on the sample and its place in the data, never on the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from torch.utils.data import Dataset
from torch.utils.data import default_collate as torch_collate

from colossus.data.batch import Batch, slice_batch
from colossus.data.draws import PROBED, Draws, Seeder, watched
from colossus.data.own_generators import OwnState
from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")

CollateFn = Callable[[list[Any]], Batch]


class SeededSamples:
    """Reads samples with the global generators seeded for each, so that augmentation depends on its place alone.

    Only generators that are drawn from are seeded (`Draws`). A dataset that fetches many at once (``__getitems__``:
    torch's `Subset` has it) does so unless it draws: then one fetch cannot give each sample numbers of its own, and
    they are fetched one by one.

    Samples that draw from a generator for the first time later are read a second time, which a dataset that counts in
    a list, say, gets to see.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = Draws()

    @cached_property
    def _own(self) -> OwnState:
        return OwnState(self._dataset, type(self._dataset).__name__, looks=PROBED)

    def read(self, indices: list[int], seeds: Callable[[], list[int]]) -> list[Any]:
        """These samples; leaves the global generators anywhere.

        Args:
            seeds: gives that of each sample.
        """
        own = self._own  # as it is before the first sample
        samples = self._read(indices, seeds)
        own.look(len(samples))
        return samples

    def _read(self, indices: list[int], seeds: Callable[[], list[int]]) -> list[Any]:
        fetch_all = getattr(self._dataset, "__getitems__", None)
        if callable(fetch_all):  # torch's own convention for datasets that fetch many at once
            return self._read_many(fetch_all, indices, seeds)
        fetch = self._dataset.__getitem__
        samples: list[Any] = []
        if self._draws.is_probing:
            for index, seed in zip(indices[: self._draws.to_probe], seeds(), strict=False):
                samples.append(self._draws.probed(partial(fetch, index), seed))
        first = len(samples)
        if first == len(indices):
            return samples

        def rest(seeders: list[Seeder]) -> list[Any]:
            if seeders:
                return _seeded(fetch, indices[first:], seeds()[first:], seeders)
            return list(map(fetch, indices[first:]))

        return samples + self._read_known(rest)

    def _read_many(
        self, fetch_all: Callable[[list[int]], list[Any]], indices: list[int], seeds: Callable[[], list[int]]
    ) -> list[Any]:
        if self._draws.is_probing:
            samples = self._draws.probed(lambda: fetch_all(indices), seeds()[0], len(indices))
            if not self._draws.kinds:
                return list(samples)

        def read(seeders: list[Seeder]) -> list[Any]:
            if seeders:
                return _seeded(lambda index: fetch_all([index])[0], indices, seeds(), seeders)
            return list(fetch_all(indices))

        return self._read_known(read)

    def _read_known(self, read: Callable[[list[Seeder]], list[Any]]) -> list[Any]:
        """Samples read with what they draw from seeded for each: again, where one drew from another generator for the
        first time. Those of a dataset that has changed meanwhile are kept as they are."""
        while True:
            before = self._own.attributes()
            with self._draws.reading() as reading:
                samples = read(reading.seeders)
            if not reading.missed:
                return samples
            is_kept = self._own.has_changed(before)
            log.warning(
                "%s draws from %s (or asks for their states), and did not for its first samples: %s",
                type(self._dataset).__name__, ", ".join(sorted(reading.missed)),
                f"what these {len(samples)} samples drew does not depend on their place alone, as it does from here "
                f"on: to read them again would change its own state twice" if is_kept
                else f"the {len(samples)} samples just read are read again, so that what each draws depends on its "
                f"place alone",
            )  # fmt: skip
            if is_kept:
                return samples


def _seeded(fetch: Callable[[int], Any], indices: list[int], seeds: list[int], seeders: list[Seeder]) -> list[Any]:
    samples = []
    for index, seed in zip(indices, seeds, strict=True):
        for seeder in seeders:
            seeder(seed)
        samples.append(fetch(index))
    return samples


class ShardCollate:
    """Collates the samples of one data rank.

    A ``collate_fn`` that draws (it masks words, or mixes samples) would draw other numbers for the part of a batch than
    for the whole. Such a one gets the samples of the global batch, and each data rank keeps its part of the result.

    Args:
        is_shard: whether a data rank has a part of a batch only.
    """

    def __init__(self, collate_fn: CollateFn | None, *, is_shard: bool) -> None:
        self._collate = collate_fn or torch_collate
        #: torch's own draws nothing
        self.may_draw = collate_fn is not None and is_shard
        self._draws = False
        self._to_probe = PROBED

    @cached_property
    def _own(self) -> OwnState:
        return OwnState(self._collate, "collate_fn", looks=PROBED)

    def __call__(self, read: Callable[[int, int], list[Any]], seed: int, span: tuple[int, int], whole: int) -> Batch:
        """The batch of this data rank.

        Args:
            read: the samples from one place in the global batch to another one.
            seed: of what the collating draws.
            span: from and up to which place its samples are.
            whole: samples of the global batch.
        """
        own = self._own  # as it is before the first batch
        batch = self._of_shard(read, seed, span, whole)
        own.look()
        return batch

    def _of_shard(self, read: Callable[[int, int], list[Any]], seed: int, span: tuple[int, int], whole: int) -> Batch:
        if not self._draws:

            def collated(start: int, stop: int) -> Batch:
                samples = read(start, stop)
                if not self.may_draw:
                    GLOBAL_RNG.seed(seed)
                    return self._collate(samples)
                batch, kinds = watched(lambda: self._collate(samples), seed, closely=self._to_probe > 0)
                self._to_probe -= 1
                self._draws = bool(kinds)
                return batch

            batch = of_span(collated, *span)
            if not self._draws:
                return batch
            log.info(
                "collate_fn draws random numbers: each data rank reads the %d samples of the global batch to draw the "
                "same under every plan; drawn in the dataset instead, it would read its %d",
                whole, span[1] - span[0],
            )  # fmt: skip
        samples = read(0, whole)
        GLOBAL_RNG.seed(seed)
        return slice_batch(self._collate(samples), *span)


class BatchOrder(Protocol):
    """Which samples make up the global batches, and which of them are this data rank's."""

    def size(self, step: int) -> int: ...

    def span(self, step: int) -> tuple[int, int]: ...

    def __call__(self, step: int, start: int, stop: int) -> np.ndarray: ...


def of_span(make: Callable[[int, int], Batch], start: int, stop: int) -> Batch:
    """The batch of the samples from ``start`` to ``stop``; of none, it is a batch of one without its sample."""
    if start < stop:
        return make(start, stop)
    return slice_batch(make(0, 1), 0, 0)


class SeededBatches(Dataset[Any]):
    """A map-style dataset of the batches of one data rank, by step: what loader workers hold.

    It must not lead back to the source: an iterator with workers that is freed by the garbage collector instead of by
    its count takes its queues apart before it can stop the workers, and then waits 5 s for each.

    Args:
        order: which samples make up the global batch of a step.
    """

    def __init__(self, dataset: Any, order: BatchOrder, collate: ShardCollate, seed: int) -> None:
        self._samples, self._order, self._collate, self._seed = SeededSamples(dataset), order, collate, seed

    def __getitem__(self, step: int) -> Batch:
        def read(start: int, stop: int) -> list[Any]:
            def seeds() -> list[int]:
                return derive_seeds(self._seed, (step,), stop)[start:]  # by the place in the global batch

            return self._samples.read(self._order(step, start, stop).tolist(), seeds)

        seed = derive_seeds(self._seed, (step, 0))[0]
        return self._collate(read, seed, self._order.span(step), self._order.size(step))


def item_seed(seed: int, epoch: int, place: int) -> int:
    """Of what is drawn while an item of an iterable is read, by its place in the pass."""
    return derive_seeds(seed, (epoch, place))[0]


def unchanged(item: Any) -> Any:
    """The ``collate_fn`` of a loader whose items need none."""
    return item
