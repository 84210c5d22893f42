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
from colossus.data.sources import EndOfData, MapSource, Source
from colossus.data.tokenizer import DatasetTokenizer
from colossus.nest import map_leaves

log = logging.getLogger("colossus.data")

#: what a change of these does to a run that is resumed
_EFFECTS = {
    "seed": "the data has another order",
    "num_samples": "the data has another order",
    "global_batch_size": "the run goes on behind the samples that it has read",
}


class DeviceCopy:
    """Puts batches on one device. On CUDA they are copied on a stream of their own while the step before still runs:
    neither the host nor that step waits for the copy.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch) -> Batch:
        """The batch, with numpy arrays of numbers as tensors, for work that is queued on the current stream."""
        if self.device.type != "cuda":
            return to_tensors(batch, self.device)
        here = torch.cuda.current_stream(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)

        def send(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not _can_be_pinned(leaf):
                return leaf
            pinned = leaf if leaf.is_pinned() else torch.empty_like(leaf, pin_memory=True).copy_(leaf)
            copied = pinned.to(self.device, non_blocking=True)
            copied.record_stream(here)  # its memory belongs to the stream of the copies
            return copied

        with torch.cuda.stream(self._stream):
            on_device = map_leaves(send, to_tensors(batch))
        here.wait_stream(self._stream)
        return to_tensors(on_device, self.device)


def _can_be_pinned(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.requires_grad and leaf.numel() > 0


class Loader:
    """Training batches of one data rank, without end for data that can start over.

    Iterating goes on where the last iteration stopped. The batch of a step depends on the seed and the samples before
    it only, so `load_state_dict` continues a run exactly, and so does `set_step` with a batch that has not changed;
    data that cannot seek is read up to there.

    Attributes:
        num_untrained: batches given since the last train step, which sets it to 0.
    """

    def __init__(self, source: Source, *, device: torch.device) -> None:
        self.source = source
        self.num_untrained = 0
        self._copy = DeviceCopy(device)

    @property
    def step(self) -> int:
        """Number of the next batch."""
        return self.source.step

    def set_step(self, step: int) -> None:
        """Make ``step`` the next one."""
        if step < 0:
            raise ValueError(f"step = {step} is negative")
        self.num_untrained = 0
        if step != self.step:
            self.source.seek(step)

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = self.source.read()
        except EndOfData:
            raise StopIteration from None
        self.num_untrained += 1
        return self._copy(batch)

    def state_dict(self) -> dict[str, Any]:
        """The place in the data, with the state of the user's own loader or dataset when it keeps one.

        It is the same on all ranks of one data rank; it differs between data ranks only by a user's own state.
        """
        return self._state(behind=0)

    def trained_state_dict(self) -> dict[str, Any]:
        """`state_dict` behind the last batch that was trained on. Warns where it cannot be told any more."""
        if isinstance(self.source, MapSource):
            return self._state(behind=self.num_untrained)
        if self.num_untrained:
            log.warning(
                "a checkpoint is saved with %d batch(es) taken from the loader and not trained on: a run that goes on "
                "from it does not see them. Save after engine.train_step, before the next batch is taken",
                self.num_untrained,
            )
        return self._state(behind=0)

    def _state(self, behind: int) -> dict[str, Any]:
        state = self.source.state_dict()
        state["step"] -= behind
        return {**state, **self._order_settings(state["step"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken: behind the samples that were read until then, whatever the batch was.

        Warns when seed, batch size or data are no longer the same.
        """
        settings = self._order_settings(state["step"])
        for key, effect in _EFFECTS.items():
            if state.get(key, now := settings.get(key)) != now:
                log.warning("%s was %s when the checkpoint was written and is %s now: %s", key, state[key], now, effect)
        self.num_untrained = 0
        self.source.load_state_dict(state)

    def _order_settings(self, step: int) -> dict[str, int]:
        """Return what the order of samples follows from, beside the step: the samples before it, too."""
        shard, sizes = self.source.shard, self.source.shard.sizes
        settings = {"seed": shard.seed, "global_batch_size": sizes.full, "samples": sizes.before(step)}
        if isinstance(self.source, MapSource):
            settings["num_samples"] = self.source.num_samples
        return settings


class ValidationLoader:
    """Validation batches of one data rank: unshuffled, the same ones each time it is iterated.

    All samples are read under every plan. The last batch has what is left over, shared out as evenly as it can be:
    every data rank has the same number of batches, and the last one of a data rank may have no sample (dim 0 is 0).
    """

    def __init__(self, source: Source, *, device: torch.device) -> None:
        self.source = source
        self._copy = DeviceCopy(device)

    def __iter__(self) -> Iterator[Batch]:
        self.source.seek(0)
        while True:
            try:
                batch = self.source.read()
            except EndOfData:
                return
            yield self._copy(batch)


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

    def close(self) -> None:
        """End worker processes; nothing is read after that."""
        self.train.source.close()
        if self.validation is not None:
            self.validation.source.close()
