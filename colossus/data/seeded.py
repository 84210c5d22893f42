"""Random numbers of a user's data code: they depend on the sample and its place in the data, never on the plan."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset, IterableDataset
from torch.utils.data import default_collate as torch_collate

from colossus.data.batch import Batch, slice_batch
from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")

CollateFn = Callable[[list[Any]], Batch]


class SeededSamples:
    """Reads samples with the global generators seeded for each, so that augmentation depends on its place alone.

    A dataset that fetches many at once (``__getitems__``: torch's `Subset` has it) does so unless it draws: then one
    fetch cannot give each sample numbers of its own, and they are fetched one by one.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._draws = False

    def read(self, keys: list[tuple[int, int]]) -> list[Any]:
        """The samples of these (index, seed); leaves the global generators anywhere."""
        fetch_all = getattr(self._dataset, "__getitems__", None)
        if not callable(fetch_all):  # torch's own convention for datasets that fetch many at once
            return [self._seeded(self._dataset.__getitem__, index, seed) for index, seed in keys]
        if not self._draws:
            samples, self._draws = watched(lambda: fetch_all([index for index, _ in keys]), keys[0][1])
            if not self._draws:
                return list(samples)
        return [self._seeded(fetch_all, [index], seed)[0] for index, seed in keys]

    @staticmethod
    def _seeded(fetch: Callable[[Any], Any], index: Any, seed: int) -> Any:
        GLOBAL_RNG.seed(seed)
        return fetch(index)


class SeededStream(IterableDataset[Any]):
    """An IterableDataset in a loader worker, which draws there what it would draw in the main process."""

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if callable(getattr(self.dataset, "set_epoch", None)):
            self.dataset.set_epoch(epoch)  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Any]:
        place = 0
        GLOBAL_RNG.seed(item_seed(self.seed, self.epoch, place))
        iterator = iter(self.dataset)
        while True:
            try:
                sample = next(iterator)
            except StopIteration:
                return
            yield sample
            place += 1
            GLOBAL_RNG.seed(item_seed(self.seed, self.epoch, place))


class ShardCollate:
    """Collates the samples of one data rank.

    A ``collate_fn`` that draws (it masks words, or mixes samples) would draw other numbers for the part of a batch than
    for the whole. Such a one gets the samples of the global batch, and each data rank keeps its part of the result.
    """

    def __init__(self, collate_fn: CollateFn | None, start: int, stop: int, whole: int) -> None:
        self._collate = collate_fn or torch_collate
        self._start, self._stop, self._whole = start, stop, whole
        #: torch's own draws nothing
        self.may_draw = collate_fn is not None and stop - start < whole
        self._draws = False

    def __call__(self, read: Callable[[int, int], list[Any]], seed: int) -> Batch:
        """The batch of this data rank.

        Args:
            read: the samples from one place in the global batch to another one.
            seed: of what the collating draws.
        """
        if not self._draws:
            samples = read(self._start, self._stop)
            if not self.may_draw:
                GLOBAL_RNG.seed(seed)
                return self._collate(samples)
            batch, self._draws = watched(lambda: self._collate(samples), seed)
            if not self._draws:
                return batch
            log.info(
                "collate_fn draws random numbers: each data rank reads the %d samples of the global batch to draw the "
                "same under every plan; drawn in the dataset instead, it would read its %d",
                self._whole, self._stop - self._start,
            )  # fmt: skip
        samples = read(0, self._whole)
        GLOBAL_RNG.seed(seed)
        return slice_batch(self._collate(samples), self._start, self._stop)


class SeededBatches(Dataset[Any]):
    """A map-style dataset of the batches of one data rank, by step: what loader workers hold.

    It must not lead back to the source: an iterator with workers that is freed by the garbage collector instead of by
    its count takes its queues apart before it can stop the workers, and then waits 5 s for each.

    Args:
        indices: step -> the samples of the global batch.
    """

    def __init__(
        self, dataset: Any, indices: Callable[[int, int, int], np.ndarray], collate: ShardCollate, seed: int
    ) -> None:
        self._samples, self._indices, self._collate, self._seed = SeededSamples(dataset), indices, collate, seed

    def __getitem__(self, step: int) -> Batch:
        def read(start: int, stop: int) -> list[Any]:
            seeds = derive_seeds(self._seed, (step,), stop)[start:]  # by the place in the global batch
            numbers = self._indices(step, start, stop).tolist()
            return self._samples.read(list(zip(numbers, seeds, strict=True)))

        return self._collate(read, derive_seeds(self._seed, (step, 0))[0])


def item_seed(seed: int, epoch: int, place: int) -> int:
    """Of what is drawn while an item of an iterable is read, by its place in the pass."""
    return derive_seeds(seed, (epoch, place))[0]


def unchanged(item: Any) -> Any:
    """The ``collate_fn`` of a loader whose items need none."""
    return item


def watched(run: Callable[[], Any], seed: int) -> tuple[Any, bool]:
    """What a function returns that starts from this seed, and whether it drew from a global generator."""
    GLOBAL_RNG.seed(seed)
    before = GLOBAL_RNG.get_state()
    result = run()
    after = GLOBAL_RNG.get_state()
    same_torch = all(bool((mine == other).all()) for mine, other in zip(before[0], after[0], strict=True))
    of_numpy = [(state[0], state[1].tobytes(), *state[2:]) for state in (before[2], after[2])]
    return result, not (same_torch and before[1] == after[1] and of_numpy[0] == of_numpy[1])
