"""A batch of the training data, for what is found out about a model before it has values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

from torch import nn

from colossus.config import Config
from colossus.engine.loss_function import LossFunction
from colossus.engine.sparse.lookups import Lookups, lookups_of, num_integers


class Samples:
    """The first batch of this data rank.

    Args:
        factory: of the model.
        read: gives the batch; None without data.
        loss_fn: None: the model's own.

    Attributes:
        failure: why `lookups` found nothing, in words.
    """

    def __init__(
        self,
        config: Config,
        factory: Callable[[], nn.Module],
        read: Callable[[], Any] | None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self._config, self._factory, self._read, self._loss_fn = config, factory, read, loss_fn
        self.failure = ""

    @cached_property
    def _batch(self) -> Any:
        if self._read is None:
            self.failure = "there is no data"
            return None
        try:
            return self._read()
        except StopIteration:
            self.failure = "the data is empty"
            return None

    def num_integers(self) -> int | None:
        """What the model is given of the batch; None without data."""
        return None if self._batch is None else num_integers(self._batch)

    def lookups(self) -> Lookups | None:
        """The ids of each lookup, by full name of the table; None where they cannot be told without training."""
        if self._batch is None:
            return None
        try:
            return lookups_of(
                self._factory, self._config, self._batch, self._config.schedule.microbatches, self._loss_fn
            )
        except Exception as error:  # a user's model may do anything where tensors have no values
            self.failure = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
            return None
