"""The ranks of a model for inference: this process, or one process for each rank of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, TypeVar

import torch

from colossus.config import Config
from colossus.config.plans import world_size
from colossus.inference.config import WeightSource
from colossus.inference.decoding import Decoding
from colossus.inference.model import load_model
from colossus.launch.held_ranks import hold_ranks, threads_of

T = TypeVar("T")


@contextmanager
def on_ranks(
    config: Config, make: Callable[[], Any], threads: int | None = None
) -> Iterator[Callable[[Callable[[Any], T]], T]]:
    """Yield a function ``call(work)``, which calls ``work(made)`` on all ranks and returns rank 0's result.

    ``made`` is the result of ``make()`` on the rank; it has a method ``close``.

    Args:
        threads: threads of each rank, unless ``OMP_NUM_THREADS`` sets them; by default as in `colossus launch`.

    Raises:
        CheckpointError, FloatingPointError: an error that all ranks raise.
        RanksFailed: any other error on one of several ranks.
    """
    threads = threads_of(config, threads)
    if world_size(config.parallel) == 1:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            with closing(make()) as made:
                yield lambda work: work(made)
        finally:
            torch.set_num_threads(before)
        return
    with hold_ranks(config, make, threads) as ranks:

        def call(work: Callable[[Any], T]) -> T:
            answer: Any = ranks.call("call", work)[0]
            if isinstance(answer, Exception):
                raise answer
            return answer

        yield call


def decoding_of(source: WeightSource, config: Config, **options: Any) -> Decoding:
    """Return the decoding of prompts by the model of a checkpoint; the options are those of `Decoding`."""
    return Decoding(load_model(source, config), **options)
