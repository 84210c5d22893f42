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
from colossus.data.sampler import BatchShard
from colossus.data.sources import EndOfData, MapSource, Source
from colossus.data.tokenizer import DatasetTokenizer
from colossus.nest import map_leaves

log = logging.getLogger("colossus.data")


@dataclass(frozen=True)
class Arrival:
    """A batch whose tensors are being copied to the device.

    Attributes:
        copied: behind the copies, on their stream; None where there is nothing to wait for.
        tensors: what was copied there.
    """

    batch: Batch
    copied: torch.cuda.Event | None
    tensors: tuple[torch.Tensor, ...]

    def get(self) -> Batch:
        """The batch, for work that is queued on the current stream from here on. The host does not wait."""
        if self.copied is not None and self.tensors:
            here = torch.cuda.current_stream(self.tensors[0].device)
            here.wait_event(self.copied)
            for tensor in self.tensors:
                tensor.record_stream(here)  # its memory belongs to the stream of the copies
        return self.batch


class DeviceCopy:
    """Puts batches on one device. Off CUDA that happens at once."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None
        #: behind the copies out of pinned memory of the user's own, which they may fill again
        self._reads_theirs: torch.cuda.Event | None = None

    @property
    def is_asynchronous(self) -> bool:
        return self.device.type == "cuda"

    def start(self, batch: Batch) -> Arrival:
        """Copy a batch, of which numpy arrays of numbers become tensors."""
        if self.device.type != "cuda":
            return Arrival(to_tensors(batch, self.device), None, ())
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        copied: list[torch.Tensor] = []
        theirs = False

        def send(leaf: Any) -> Any:
            nonlocal theirs
            if not isinstance(leaf, torch.Tensor) or not _can_be_pinned(leaf):
                return leaf
            if leaf.is_pinned():
                theirs = True
            else:
                leaf = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
            copied.append(leaf.to(self.device, non_blocking=True))
            return copied[-1]

        with torch.cuda.stream(self._stream):
            on_device = map_leaves(send, to_tensors(batch))
            event = torch.cuda.Event()
            event.record(self._stream)
        if theirs:
            self._reads_theirs = event
        return Arrival(to_tensors(on_device, self.device), event, tuple(copied))

    def let_go(self) -> None:
        """Wait until nothing reads the user's own pinned memory any more: what they read next may be written to it."""
        if self._reads_theirs is not None:
            self._reads_theirs.synchronize()
            self._reads_theirs = None


def _can_be_pinned(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.requires_grad and leaf.numel() > 0


@dataclass(frozen=True)
class _Next:
    """A batch that was read and not taken, or why there is none; its step, and the state of the source before it."""

    arrival: Arrival | None
    step: int
    state: dict[str, Any]
    error: Exception | None = None

    def get(self) -> Batch:
        if self.error is not None:
            raise self.error
        assert self.arrival is not None
        return self.arrival.get()


class Loader:
    """Training batches of one data rank, without end for data that can start over.

    Iterating goes on where the last iteration stopped. The batch of a step depends on the seed and the step only, so
    `set_step` (or `load_state_dict`) continues a run exactly; data that cannot seek is read up to there.

    On CUDA the batch behind the one that is taken is read, too, and copied to the device on a stream of its own, so
    that no step waits for its copy; an error of it is raised when it is due. Data with a state of its own, and
    iterables of batches that are no DataLoader, are read when a batch is taken, as all data with
    ``data.read_ahead=False`` is.

    Attributes:
        num_untrained: batches given since the last train step, which sets it to 0.
    """

    def __init__(self, source: Source, *, shard: BatchShard, device: torch.device) -> None:
        self.source = source
        self.shard = shard
        self.device = device
        self._copy = DeviceCopy(device)
        self._reads_ahead = self._copy.is_asynchronous and source.may_be_read_ahead
        self._next: _Next | None = None
        self.num_untrained = 0

    @property
    def step(self) -> int:
        """Number of the next batch."""
        return self.source.step if self._next is None else self._next.step

    def set_step(self, step: int) -> None:
        """Make ``step`` the next one."""
        if step < 0:
            raise ValueError(f"step = {step} is negative")
        self.num_untrained = 0
        if step != self.step:
            self._next = None
            self.source.seek(step)

    def peek(self) -> Batch:
        """The next batch, which stays the next one.

        Raises:
            StopIteration: when there is none.
        """
        return self._due().get()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if self._next is None and not self._reads_ahead:
            batch = self._read().get()
        else:
            batch = self._due().get()
        self._next = self._ahead() if self._reads_ahead else None
        self.num_untrained += 1
        return batch

    def _due(self) -> _Next:
        """The next batch, read if it was not. What failed when it was read ahead is tried again once it was raised."""
        due = self._next
        if due is None:
            step, state = self.source.step, self.source.state_dict()
            due = self._next = _Next(self._read(), step, state)
        elif due.error is not None:
            self._next = None
        return due

    def _ahead(self) -> _Next:
        step, state = self.source.step, self.source.state_dict()
        try:
            return _Next(self._read(), step, state)
        except Exception as error:
            return _Next(None, step, state, error)

    def _read(self) -> Arrival:
        self._copy.let_go()
        try:
            batch = self.source.read()
        except EndOfData:
            raise StopIteration from None
        return self._copy.start(batch)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, with the state of the user's own loader or dataset when it keeps one.

        It is the same on all ranks of one data rank; it differs between data ranks only by a user's own state.
        """
        state = self.source.state_dict() if self._next is None else self._next.state
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
        self._next, self.num_untrained = None, 0
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
        self._copy = DeviceCopy(device)
        self._reads_ahead = self._copy.is_asynchronous and source.may_be_read_ahead

    def __iter__(self) -> Iterator[Batch]:
        self.source.seek(0)
        before: Arrival | None = None
        while True:
            self._copy.let_go()
            try:
                arrival = self._copy.start(self.source.read())
            except EndOfData:
                break
            if not self._reads_ahead:
                yield arrival.get()
                continue
            if before is not None:
                yield before.get()
            before = arrival
        if before is not None:
            yield before.get()


@dataclass(frozen=True)
class Loaders:
    """What `build_loaders` returns.

    Attributes:
        train: training batches.
        validation: None without validation data.
        description: one or two lines for the log.
        validation_missing: why there is no validation data, when there is none.
        tokenizer: what the training data says of its ids; None where it says nothing.
    """

    train: Loader
    validation: ValidationLoader | None
    description: str
    validation_missing: str | None = None
    tokenizer: DatasetTokenizer | None = None
