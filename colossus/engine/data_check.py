"""Checks of the data of a run: data ranks read the same data, and a resumed run continues with it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from colossus.arithmetic import named_ranks
from colossus.comm.objects import all_gather_object
from colossus.data.loader import Loader, ValidationLoader
from colossus.data.sample_marks import Marks, differing, distinguishing
from colossus.data.sources import MapSource, Source
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")


class DataCheck:
    """The comparison of the first samples of data ranks by marks, which warns if a resumed run trains on other data.

    Each check runs once. If replicas do not wait for each other, they are compared at the first evaluation.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._world = run, run.context.group(run.context.grid.names)
        self._has_begun, self._compared = False, list[Source]()
        if run.loaders is not None and run.context.size("data") > 1:
            for loader in (run.loaders.train, run.loaders.validation):
                if loader is not None:
                    loader.source.takes_marks = True

    def before_step(self) -> None:
        """Check the data before a step runs.

        Raises:
            ValueError: on all ranks, if data ranks read different data, or with ``per_rank`` the same samples.
        """
        run = self._run
        loader = None if run.loaders is None else run.loaders.train
        is_own_batch = loader is None or (isinstance(loader, Loader) and not loader.num_untrained)
        if is_own_batch and run.is_resumed and run.completed_steps and run.context.is_logging_rank:
            log.warning(
                "the run resumes after step %d, but the batch of step %d is not from engine.loader: a checkpoint does "
                "not have the position in a DataLoader of your own, which begins with its first batch. Pass it to "
                "colossus.initialize(data=..) and take batches from engine.loader, or skip these %d batches yourself",
                run.completed_steps, run.completed_steps + 1, run.completed_steps,
            )  # fmt: skip
        run.is_resumed = False
        if isinstance(loader, Loader) and run.strategy.exact and not self._has_begun:
            self._compare(loader.source, "data")
        self._has_begun = True

    def after_evaluation(self) -> None:
        """Check the data of an evaluation, and that of training, if replicas wait for each other only here.

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
        entries = sorted(by_index.items())
        if all(marks_of_rank is not None for _, (_, marks_of_rank) in entries):
            self._compared.append(source)
        ranks_of: dict[int | None, list[int]] = {}
        for index, (length, _) in entries:
            ranks_of.setdefault(length, []).append(index)
        marks = {index: marks_of_rank or {} for index, (_, marks_of_rank) in entries}
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
        is_in_samples = any(
            all(leaves_of_rank is None or leaf in leaves_of_rank for leaves_of_rank in repeating) for leaf in leaves
        )
        first = next(iter(marks))
        others = [index for index in marks if any(marks[index][leaf] != marks[first][leaf] for leaf in leaves)]
        where = f"data {named_ranks(others)} and data rank {first}"
        if isinstance(source, MapSource):
            message = f"{what} has other samples by the same numbers on {where}. {_SAME_DATASET}"
        else:
            size = source.shard.size
            message = (
                f"{what} yields other samples on {where}: it is divided among ranks already, or each rank has an order "
                f"of its own. Each data rank takes its {size} of the {source.shard.global_batch_size} samples of a "
                f"batch, so the others would never be read. Use the same samples in the same order on all ranks; or "
                f"data = dict(type=.., per_rank=True), with which each data rank yields the {size} samples of its part"
            )
        if is_in_samples:
            raise ValueError(message)
        if self._run.context.is_logging_rank:
            log.warning(
                "%s. This is only a warning, since a rank that reads them twice gets others, too: nothing is wrong if "
                "a random generator of theirs changes them", message,
            )  # fmt: skip

    def _require_own_samples(self, marks: Mapping[int, Marks], what: str) -> None:
        copies: dict[Any, list[int]] = {}
        for index, leaves in marks.items():
            if distinguishing([leaves]):
                copies.setdefault(tuple(sorted(leaves.items())), []).append(index)
        for ranks in copies.values():
            if len(ranks) > 1:
                raise ValueError(
                    f"{what} has per_rank, but yields the same samples on data {named_ranks(ranks)}, which train on "
                    f"copies: divide the data by the arguments data_rank and data_size of the function that makes "
                    f"it, or remove per_rank and yield batches of the whole"
                )


_SAME_DATASET = (
    "Each data rank reads its samples of the whole by their numbers: make the same dataset on all of them, without a "
    "split by rank. Sort lists of files, and derive orders from a common seed, not from sets or the time"
)
