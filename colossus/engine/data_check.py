"""Checks of the data of a run, once: data ranks read the same data, and a run that goes on does so with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from colossus.arithmetic import named_ranks
from colossus.comm.objects import all_gather_object
from colossus.data.loader import Loader, ValidationLoader
from colossus.data.sample_marks import Marks, differing, telling
from colossus.data.sources import MapSource, Source
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")


class DataCheck:
    """Compares marks of the first samples that data ranks have read, and says where a resumed run trains on other data.

    Where replicas do not wait for each other they are compared at the first evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._world = run, run.context.group(run.context.grid.names)
        self._has_begun, self._compared = False, list[Source]()
        if run.loaders is not None and run.context.size("data") > 1:
            for loader in (run.loaders.train, run.loaders.validation):
                if loader is not None:
                    loader.source.takes_marks = True

    def before_step(self) -> None:
        """Look at the batch of a step that is about to run.

        Raises:
            ValueError: on all ranks, when data ranks read different data, or with ``per_rank`` the same samples.
        """
        run = self._run
        loader = None if run.loaders is None else run.loaders.train
        is_own_batch = loader is None or (isinstance(loader, Loader) and not loader.num_untrained)
        if is_own_batch and run.is_resumed and run.completed_steps and run.context.is_logging_rank:
            log.warning(
                "the run goes on behind step %d, but the batch of step %d is not from engine.loader: a checkpoint does "
                "not know the place in a DataLoader of your own, which begins with its first batch. Give it to "
                "colossus.initialize(data=..) and take batches from engine.loader, or skip these %d batches yourself",
                run.completed_steps, run.completed_steps + 1, run.completed_steps,
            )  # fmt: skip
        run.is_resumed = False
        if isinstance(loader, Loader) and run.strategy.exact and not self._has_begun:
            self._compare(loader.source, "data")
        self._has_begun = True

    def after_evaluation(self) -> None:
        """Look at the data that an evaluation has read, and where replicas wait for it alone, at that of training.

        Raises:
            ValueError: as `before_step`.
        """
        loaders = self._run.loaders
        assert loaders is not None
        if isinstance(loaders.train, Loader) and not self._run.strategy.exact:
            self._compare(loaders.train.source, "data")
        if isinstance(loaders.validation, ValidationLoader):
            self._compare(loaders.validation.source, "data.validation")

    def _compare(self, source: Source, key: str) -> None:
        context = self._run.context
        if source in self._compared or context.size("data") == 1:
            return
        own = context.index("data"), (getattr(source, "num_samples", None), source.marks)
        by_index: dict[int, tuple[int | None, Marks | None]] = dict(all_gather_object(own, self._world))
        of_ranks = sorted(by_index.items())
        if all(of_rank is not None for _, (_, of_rank) in of_ranks):
            self._compared.append(source)
        ranks_of: dict[int | None, list[int]] = {}
        for index, (length, _) in of_ranks:
            ranks_of.setdefault(length, []).append(index)
        marks = {index: of_rank or {} for index, (_, of_rank) in of_ranks}
        what = f"{key}: {source.name}"
        if source.per_rank:
            self._require_own_samples(marks, what)
        elif len(ranks_of) > 1:
            differ = "; ".join(f"{length} on data {named_ranks(ranks)}" for length, ranks in ranks_of.items())
            raise ValueError(f"{what} has another number of samples on some ranks: {differ}. {_SAME_DATASET}")
        elif leaves := differing([*marks.values()]):
            self._require_same_samples(source, marks, leaves, what)

    def _require_same_samples(self, source: Source, marks: Mapping[int, Marks], leaves: list[str], what: str) -> None:
        repeating = all_gather_object(source.repeating_leaves(), self._world)
        of_samples = any(all(of_rank is None or leaf in of_rank for of_rank in repeating) for leaf in leaves)
        first = next(iter(marks))
        others = [index for index in marks if any(marks[index][leaf] != marks[first][leaf] for leaf in leaves)]
        where = f"data {named_ranks(others)} and data rank {first}"
        if isinstance(source, MapSource):
            message = f"{what} has other samples by the same numbers on {where}. {_SAME_DATASET}"
        else:
            size = source.shard.size
            message = (
                f"{what} gives other samples on {where}: it is shared out among ranks already, or in an order of each "
                f"rank's own. Each data rank takes its {size} of the {source.shard.global_batch_size} samples of a "
                f"batch, so the others would never be read. Give all ranks the same samples in the same order; or say "
                f"data = dict(type=.., per_rank=True), and let each data rank give the {size} samples of its part"
            )
        if of_samples:
            raise ValueError(message)
        if self._run.context.is_logging_rank:
            log.warning(
                "%s. This is a warning only, since a rank that reads them twice gets others, too: nothing is wrong "
                "where it is a random generator of their own that changes them", message,
            )  # fmt: skip

    def _require_own_samples(self, marks: Mapping[int, Marks], what: str) -> None:
        copies: dict[Any, list[int]] = {}
        for index, of_rank in marks.items():
            if telling([of_rank]):
                copies.setdefault(tuple(sorted(of_rank.items())), []).append(index)
        for ranks in copies.values():
            if len(ranks) > 1:
                raise ValueError(
                    f"{what} has per_rank, but gives the same samples on data {named_ranks(ranks)}, which train on "
                    f"copies: share the data out by the arguments data_rank and data_size of the function that makes "
                    f"it, or leave per_rank out and give batches of the whole"
                )


_SAME_DATASET = (
    "Each data rank reads its samples of the whole by their numbers: make the same dataset on all of them, without a "
    "split by rank. Sort lists of files, and take orders from a seed that is the same, not from sets or the time"
)
