"""The loaders that the engine reads: one for training, one for validation.

All ranks of one model (one data rank) read the same whole batch; layers and loss take the box that they need.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from colossus.arithmetic import counted
from colossus.data.batch import Batch, to_tensors
from colossus.data.sources import EndOfData, MapSource, Source
from colossus.data.tokenizer import DatasetTokenizer
from colossus.nest import map_leaves

log = logging.getLogger("colossus.data")

#: effect of a changed setting on a resumed run
_EFFECTS = {
    "seed": "the data has another order",
    "data_seed": "rows are packed of other documents, or a mixture has another order",
    "num_samples": "the data has another order",
    "global_batch_size": "the run continues after the samples that it has read",
}


class DeviceCopy:
    """The copy of batches to one device.

    On CUDA they are copied on a stream of their own while the step before still runs: neither the host nor that step
    waits.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, batch: Batch) -> Batch:
        """Return the batch on the device, with arrays as tensors, for work that is queued on the current stream."""
        if self.device.type != "cuda":
            return to_tensors(batch, self.device)
        here = torch.cuda.current_stream(self.device)
        self._stream = self._stream or torch.cuda.Stream(self.device)

        def send(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not _can_be_pinned(leaf):
                return leaf
            pinned = leaf if leaf.is_pinned() else torch.empty_like(leaf, pin_memory=True).copy_(leaf)
            copied = pinned.to(self.device, non_blocking=True)
            copied.record_stream(here)  # its memory was allocated on the stream of the copies
            return copied

        with torch.cuda.stream(self._stream):
            on_device = map_leaves(send, to_tensors(batch))
        here.wait_stream(self._stream)
        return to_tensors(on_device, self.device)


def _can_be_pinned(leaf: torch.Tensor) -> bool:
    return leaf.device.type == "cpu" and leaf.layout is torch.strided and not leaf.requires_grad and leaf.numel() > 0


class Loader:
    """Training batches of one data rank, without end if the data can start over.

    A new iteration continues where the last one stopped. The batch of a step depends only on the seed and the samples
    before it. So `load_state_dict` continues a run exactly, and so does `set_step` with an unchanged batch size. Data
    that cannot seek is read up to there.

    Args:
        source: source of the batches.
        device: device to which they are copied.

    Attributes:
        num_untrained: batches read since the last train step, which sets it to 0.
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
        """Return the position in the data, with the state of the user's own loader or dataset if it has one.

        It is the same on all ranks of one data rank. Data ranks differ only in a user's own state.
        """
        return self._state(num_back=0)

    def trained_state_dict(self) -> dict[str, Any]:
        """Return `state_dict` after the last batch that was trained on; warn if that position is lost."""
        if isinstance(self.source, MapSource):
            return self._state(num_back=self.num_untrained)
        if self.num_untrained:
            log.warning(
                "a checkpoint is saved with %s taken from the loader and not trained on: a run that resumes from it "
                "does not see them. Save after engine.train_step, before the next batch is taken",
                counted(self.num_untrained, "batch", "es"),
            )
        return self._state(num_back=0)

    def _state(self, num_back: int) -> dict[str, Any]:
        state = self.source.state_dict()
        state["step"] -= num_back
        return {**state, **self._order_settings(state["step"])}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the samples that were read when the state was saved, whatever the batch size was.

        Warns if seed, batch size or the number of samples have changed.

        Raises:
            ValueError: if the fingerprint of the data has changed.
        """
        settings = self._order_settings(state["step"])
        before, now = state.get("fingerprint"), settings.get("fingerprint")
        if before and before != now:
            raise ValueError(
                f"the data is not what the checkpoint was trained on: its fingerprint was {before[:12]} and is "
                f"{now and now[:12]} ({self.source.name}: files, tokenizer or options of data differ). Restore them, "
                f"or begin a new run with the weights alone (checkpoint.weights)"
            )
        if before := state.get("taken"):
            own = settings.get("data_seed")
            if (seed := state.get("data_seed", own)) != own:
                raise ValueError(
                    f"the mixture was made by the seed {seed} when the checkpoint was written, and is by {own} now: "
                    f"restore train.seed (or data.seed)"
                )
            now = getattr(self.source, "dataset", None).taken(number := state["samples"])  # type: ignore[union-attr]
            if before != now:
                raise ValueError(
                    f"the mixture had given {before} samples when the checkpoint was written, by its weights now it "
                    f"would be {now}: restore the weights, and set new ones from here on by data.changes="
                    f"{{{number}: ..}}"
                )
        for key, effect in _EFFECTS.items():
            if state.get(key, now := settings.get(key)) != now:
                log.warning("%s was %s when the checkpoint was written and is %s now: %s", key, state[key], now, effect)
        self.num_untrained = 0
        self.source.load_state_dict(state)

    def _order_settings(self, step: int) -> dict[str, Any]:
        """Return what the order of samples depends on, and the number of samples before the step."""
        shard, sizes = self.source.shard, self.source.shard.sizes
        settings: dict[str, Any] = {"seed": shard.seed, "global_batch_size": sizes.full, "samples": sizes.before(step)}
        if isinstance(self.source, MapSource):
            settings["num_samples"] = self.source.num_samples
            if isinstance(fingerprint := getattr(self.source.dataset, "fingerprint", None), str):
                settings["fingerprint"] = fingerprint
            if isinstance(seed := getattr(self.source.dataset, "seed", None), int):
                settings["data_seed"] = seed
            if callable(taken := getattr(self.source.dataset, "taken", None)):  # of a mixture
                settings["taken"] = taken(settings["samples"])
        return settings


class ValidationLoader:
    """Validation batches of one data rank: unshuffled, the same at each iteration.

    All samples are read under every plan. The last batch has the rest, divided as evenly as possible: every data rank
    has the same number of batches, and its last one may have no sample (dim 0 is 0).
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
    """The loaders of a data rank.

    Attributes:
        train: training batches.
        validation: validation batches; None without validation data.
        description: one or two lines for the log.
        validation_missing: why there is no validation data, if there is none.
        tokenizer: tokenizer of the training data; None if the data names none.
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
