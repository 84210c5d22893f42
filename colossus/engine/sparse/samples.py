"""A batch of the training data, for what is found out about a model before it has values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from colossus.config import Config
from colossus.engine.loss_function import LossFunction
from colossus.engine.sparse.lookups import Lookups, lookups_of, num_integers


class Samples:
    """The first batch of this data rank, or those of several.

    Args:
        factory: of the model.
        read: gives the batches; None without data.
        loss_fn: None: the model's own.

    Attributes:
        failure: why `lookups` found nothing, in words; empty where it did, was not asked, or there is no data.
    """

    def __init__(
        self,
        config: Config,
        factory: Callable[[], nn.Module],
        read: Callable[[], Sequence[Any]] | None,
        loss_fn: LossFunction | None = None,
    ) -> None:
        self._config, self._factory, self._read, self._loss_fn = config, factory, read, loss_fn
        self.failure = ""

    @cached_property
    def _batches(self) -> Sequence[Any]:
        if self._read is None:
            return ()
        try:
            return self._read()
        except StopIteration:
            self.failure = "the data is empty"
        except Exception as error:  # of a user's own data code: training raises it again
            self.failure = _in_words(error)
        return ()

    def num_integers(self) -> int | None:
        """The most that the model is given of a batch; None without data."""
        return max(map(num_integers, self._batches), default=None)

    def lookups(self) -> list[Lookups] | None:
        """For each batch the ids of each lookup, by full name of the table; None where they cannot be told without
        training."""
        if not self._batches:
            return None
        try:
            return lookups_of(self._factory, self._config, self._batches, self._loss_fn)
        except Exception as error:  # a user's model may do anything where tensors have no values
            self.failure = _in_words(error)
            return None


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}".removesuffix(": ")
