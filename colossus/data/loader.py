"""The loaders the engine reads: one for training, one for validation.

All ranks of one model (one data rank) get the same whole batch; layers and loss take the box they need from it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from colossus.data.batch import Batch, to_tensors
from colossus.data.passes import EndOfPass
from colossus.data.sources import BatchShard, MapSource, Source
from colossus.data.tokenizer import DatasetTokenizer

log = logging.getLogger("colossus.data")


@dataclass(frozen=True)
class _Peeked:
    """A batch that was read and not taken, its step, and the state of the source before it was read."""

    batch: Batch
    step: int
    state: dict[str, Any]


class Loader:
    """Training batches of one data rank, without end for data that can start over.

    Iterating goes on where the last iteration stopped. The batch of a step depends on the seed and the step only, so
    `set_step` (or `load_state_dict`) continues a run exactly; data that cannot seek is read up to there.

    Attributes:
        num_untrained: batches given since the last train step, which sets it to 0.
    """

    def __init__(self, source: Source, *, shard: BatchShard, device: torch.device) -> None:
        self.source = source
        self.shard = shard
        self.device = device
        self._peeked: _Peeked | None = None
        self.num_untrained = 0

    @property
    def step(self) -> int:
        """Number of the next batch."""
        return self.source.step if self._peeked is None else self._peeked.step

    def set_step(self, step: int) -> None:
        """Make ``step`` the next one."""
        if step < 0:
            raise ValueError(f"step = {step} is negative")
        self.num_untrained = 0
        if step != self.step:
            self._peeked = None
            self.source.seek(step)

    def peek(self) -> Batch:
        """The next batch, which stays the next one.

        Raises:
            StopIteration: when there is none.
        """
        if self._peeked is None:
            step, state = self.step, self.source.state_dict()
            self._peeked = _Peeked(self._read(), step, state)
        return self._peeked.batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._peeked is not None:
            batch, self._peeked = self._peeked.batch, None
        else:
            batch = self._read()
        self.num_untrained += 1
        return batch

    def _read(self) -> Batch:
        try:
            batch = self.source.read()
        except EndOfPass:
            raise StopIteration from None
        return to_tensors(batch, self.device)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, with the state of the user's own loader or dataset when it keeps one.

        It is the same on all ranks of one data rank; it differs between data ranks only by a user's own state.
        """
        state = self.source.state_dict() if self._peeked is None else self._peeked.state
        return {**state, **self._order_settings()}

    def trained_state_dict(self) -> dict[str, Any]:
        """`state_dict` behind the last batch that was trained on. Warns where it cannot be told any more."""
        state = self.state_dict()
        if self.num_untrained:
            if state.keys() <= {"step", *self._order_settings()}:
                state["step"] -= self.num_untrained
            else:
                log.warning(
                    "a checkpoint is saved with %d batch(es) taken from the loader and not trained on: a run that goes "
                    "on from it does not see them. Save after engine.train_step, before the next batch is taken",
                    self.num_untrained,
                )
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken. Warns when seed, batch size or data are no longer the same."""
        for key, now in self._order_settings().items():
            if state.get(key, now) != now:
                log.warning(
                    "the data order changes on resume: %s was %s when the checkpoint was written and is %s now",
                    key, state[key], now,
                )  # fmt: skip
        self._peeked, self.num_untrained = None, 0
        self.source.load_state_dict(state)

    def _order_settings(self) -> dict[str, int]:
        """What the order of samples follows from, beside the step."""
        settings = {"seed": self.shard.seed, "global_batch_size": self.shard.global_batch_size}
        if isinstance(self.source, MapSource):
            settings["num_samples"] = self.source.num_samples
        return settings


class ValidationLoader:
    """Validation batches of one data rank: unshuffled, the same ones each time it is iterated.

    All samples are read under every plan. The last batch has what is left over, shared out as evenly as it can be:
    every data rank has the same number of batches, and the last one of a data rank may have no sample (dim 0 is 0).
    """

    def __init__(self, source: Source, *, shard: BatchShard, device: torch.device) -> None:
        self.source = source
        self.shard = shard
        self.device = device

    @property
    def num_batches(self) -> int | None:
        """Batches of one evaluation; None for a stream, whose length is not known."""
        return self.source.num_steps if isinstance(self.source, MapSource) else None

    def __iter__(self) -> Iterator[Batch]:
        self.source.seek(0)
        while True:
            try:
                batch = self.source.read()
            except EndOfPass:
                return
            yield to_tensors(batch, self.device)


@dataclass(frozen=True)
class Loaders:
    """What `build_loaders` returns.

    Attributes:
        train: training batches.
        validation: None without validation data.
        description: one or two lines for the log.
        validation_missing: why there is no validation data, when there is none.
        tokenizer: what the training data says of its ids; None where it says nothing.
        tokenizer_missing: why what it says cannot be recorded.
    """

    train: Loader
    validation: ValidationLoader | None
    description: str
    validation_missing: str | None = None
    tokenizer: DatasetTokenizer | None = None
    tokenizer_missing: str | None = None
