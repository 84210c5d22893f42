"""Sources that are read from the front: an iterable of samples (`SampleStream`) or of ready batches (`BatchStream`).

Every rank reads the same stream and keeps its shard of each batch, except where batches are per data rank already.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from colossus.data.batch import Batch, batch_size_of, slice_batch
from colossus.data.passes import EndOfPass, Passes, SamplePasses
from colossus.data.seeded import CollateFn, ShardCollate
from colossus.data.sources import BatchShard, Source
from colossus.random import GLOBAL_RNG, derive_seeds

log = logging.getLogger("colossus.data")


class StreamSource(Source):
    """What `SampleStream` and `BatchStream` share: they reach a step by reading up to it."""

    def __init__(self, passes: Passes, shard: BatchShard) -> None:
        self.passes = passes
        self.shard = shard
        #: a pass of validation has ended with a batch that is not whole
        self._is_over = False

    def _depends_on_place_only(self) -> bool:
        # a state of the user's own would have to be taken before each batch, and may be costly
        return not self.passes.keeps_own_state

    def read(self) -> Batch:
        if self._is_over:
            raise EndOfPass
        if self.shard.endless:
            return self._read()
        with self.passes.generators_apart():  # training may shuffle by the very same
            return self._read()

    @abstractmethod
    def _read(self) -> Batch:
        """The next batch, or `EndOfPass`."""

    def seek(self, step: int) -> None:
        if step < self.step or not step:  # a first step may have failed, and taken items
            self._rewind()
        if step > self.step:
            log.warning("%s cannot seek: reading %d batches to reach step %d", self.passes.name, step - self.step, step)
        while self.step < step:
            self.read()

    def _rewind(self) -> None:
        self.passes.rewind()
        self.step, self._is_over = 0, False

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "passes": self.passes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "passes" not in state:  # saved when the data was of another kind
            self.seek(state["step"])
            return
        self.passes.load_state_dict(state["passes"])
        self.step = state["step"]


class SampleStream(StreamSource):
    """An IterableDataset: each step takes ``global_batch_size`` samples, and collates those of this data rank.

    A batch that the end of a pass leaves incomplete is filled from the next pass. Where there is no next one it is
    dropped in training, and the last one in validation.
    """

    def __init__(
        self, dataset: IterableDataset[Any], shard: BatchShard, *, collate_fn: CollateFn | None = None
    ) -> None:
        self._samples = SamplePasses(dataset, shard.seed, name=type(dataset).__name__, stateful=dataset)
        super().__init__(self._samples, shard)
        self._collate = ShardCollate(collate_fn, is_shard=shard.data_size > 1)

    def _read(self) -> Batch:
        whole, endless = self.shard.global_batch_size, self.shard.endless
        keep = range(whole)
        if endless and not self._collate.may_draw:
            keep = range(self.shard.start, self.shard.start + self.shard.size)
        with GLOBAL_RNG.preserved():
            samples = self._samples.take(whole, wrap=endless, keep=keep)
            size = len(samples)
            self._is_over = size < whole
            if not size or (endless and self._is_over):
                raise EndOfPass
            seed = derive_seeds(self.shard.seed, (self.step,))[0]
            batch = self._collate(lambda start, stop: samples[start:stop], seed, self.shard.span(size), size)
        self.step += 1
        return batch


class BatchStream(StreamSource):
    """Ready batches, global or per data rank, which the size of the first one tells.

    With ``global_batch_size`` samples each data rank takes its slice; with ``global_batch_size / data_size`` the user's
    sampler already gave this rank its own.

    A shorter batch at the end of a pass is dropped in training (as ``drop_last=True`` does), and taken in validation;
    anywhere else it is an error.
    """

    def __init__(self, batches: Any, shard: BatchShard, *, stateful: Any = None, per_rank: bool | None = None) -> None:
        self.name = type(batches).__name__
        stateful = batches if stateful is None else stateful
        super().__init__(Passes(batches, shard.seed, name=self.name, stateful=stateful), shard)
        self._per_rank = False if shard.data_size == 1 else per_rank
        self._logged_short_batch = False
        self._is_loader = isinstance(batches, DataLoader)
        if getattr(batches, "persistent_workers", False):
            log.warning(
                "%s has persistent_workers: they see no set_epoch of the dataset, and what they draw goes on from pass "
                "to pass, so that a run which goes on from a checkpoint draws otherwise", self.name,
            )  # fmt: skip

    def _depends_on_place_only(self) -> bool:
        # a generator of batches may make them from what the model has learnt so far
        return self._is_loader and super()._depends_on_place_only()

    def _read(self) -> Batch:
        while True:
            batch = self.passes.read(wrap=self.shard.endless)
            size = batch_size_of(batch)
            if self._per_rank is None:
                self._per_rank = self._decide(size)
            whole = self.shard.size if self._per_rank else self.shard.global_batch_size
            if size == whole:
                break
            self._require_last(size, whole)
            if not self.shard.endless:
                self._is_over = True
                break
        self.step += 1
        if self._per_rank or self.shard.data_size == 1:
            return batch
        return slice_batch(batch, *self.shard.span(size))

    def state_dict(self) -> dict[str, Any]:
        # saved, because the first batch after a resume may be the short last one of a pass, whose size tells nothing
        return {**super().state_dict(), "per_rank": self._per_rank, "data_size": self.shard.data_size}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._per_rank is None and state.get("data_size") == self.shard.data_size:
            self._per_rank = state["per_rank"]
        super().load_state_dict(state)

    def _decide(self, size: int) -> bool:
        if size == self.shard.global_batch_size:
            return False
        if size == self.shard.size:
            return True
        raise ValueError(self._wrong_size(size))

    def _require_last(self, size: int, whole: int) -> None:
        """A batch that is not whole is right as the last one of a pass only, and in training not as its only one."""
        if size > whole or (self.shard.endless and self.passes.offset == 1):
            raise ValueError(self._wrong_size(size))
        try:
            self.passes.read(wrap=False)
        except EndOfPass:
            if self.shard.endless and not self._logged_short_batch:
                log.info("%s: the last batch of a pass has %d samples and is dropped", self.name, size)
                self._logged_short_batch = True
            return
        raise ValueError(self._wrong_size(size))

    def _wrong_size(self, size: int) -> str:
        shard = self.shard
        if shard.data_size == 1:
            return (
                f"{self.name} gave a batch of {size} samples, but {shard.batch_size_name} = {shard.global_batch_size}: "
                f"set one of them to the other"
            )
        return (
            f"{self.name} gave a batch of {size} samples, but {shard.batch_size_name} = {shard.global_batch_size} over "
            f"{shard.data_size} data ranks needs batches of {shard.global_batch_size} (each data rank then takes its "
            f"{shard.global_batch_size} / {shard.data_size} = {shard.size}), or of {shard.size} when the sampler "
            f"already gives each data rank its own"
        )
