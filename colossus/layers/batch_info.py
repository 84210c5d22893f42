"""What layers may ask about the batch that runs through them, beyond the tensors they are called with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from colossus.layers.kv_cache import KeyValueCache


@dataclass(frozen=True)
class BatchInfo:
    """Facts about the batch of a step or an evaluation, the same on every stage of a pipeline.

    Attributes:
        num_tokens: length of its sequences without padding, where tokens are split over the sequence axis; None where
            they are not, and for a layer that is called outside of the engine: then a sequence has the tokens that the
            ranks hold.
        cache: of a model that decodes: the tokens it is called with follow those that are in the cache.
        only_last_token: the model may leave out all logits but those of the last token of each sample.
    """

    num_tokens: int | None = None
    cache: KeyValueCache | None = None
    only_last_token: bool = False


class BatchScope:
    """Makes the information about a batch known to the layers for the length of one step, and for no longer.

    A plain attribute and not a context variable: autograd recomputes checkpointed layers on threads of its own on CUDA.
    """

    def __init__(self) -> None:
        self._info = BatchInfo()

    @property
    def info(self) -> BatchInfo:
        """Of the batch at work; an empty one outside of a step."""
        return self._info

    @contextmanager
    def enter(self, info: BatchInfo) -> Iterator[None]:
        """Around all forwards and backwards of a batch."""
        outer, self._info = self._info, info
        try:
            yield
        finally:
            self._info = outer
