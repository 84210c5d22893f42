"""What a run keeps beside the tensors of its parameters: its step, the loss scale, its place in the data, random
generators, what modules and the strategy keep; what hooks keep is in `hook_state`."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode
from colossus.data.loader import Loader
from colossus.state.hook_state import HookStates
from colossus.state.module_state import module_states, restore_module_states
from colossus.state.of_ranks import own_path
from colossus.state.replicas import (
    RECORD,
    Source,
    has_own_parameters,
    is_recorded,
    record_of,
    replica_prefix,
)
from colossus.state.rng import restore_rng, rng_state
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")


def run_values(run: Run) -> dict[str, Any]:
    """What this rank adds, by path; each path is from one rank."""
    context = run.context
    values: dict[str, Any] = {own_path(context.rank, "rng"): rng_state(context)}
    if of_modules := module_states(run.model):
        values[own_path(context.rank, "modules")] = of_modules
    if is_first_but_along(run, "data"):
        index = context.index("data")
        values[f"strategy_values/{index}"] = run.strategy.state_dict()
        if run.loaders is not None:
            with _told_by_one(context.is_logging_rank):
                loader = run.loaders.train
                is_ours = isinstance(loader, Loader)  # any iterable with state may be put in its place
                values[f"loader/{index}"] = loader.trained_state_dict() if is_ours else loader.state_dict()
    for replica in written_for(run):
        values[f"{replica}train"] = {"completed_steps": run.completed_steps, **run.gradient_watch.state_dict()}
        if run.loss_scaler is not None:
            values[f"{replica}loss_scale"] = run.loss_scaler.state_dict()
    if context.is_logging_rank and is_recorded(run.strategy):
        values[RECORD] = record_of(run.strategy, context)
    return values


def written_for(run: Run, *along: str) -> Iterator[str]:
    """What is before the paths of values of which each replica may have its own, where this rank writes them: "" for
    all, or the first; and where replicas have parameters of their own, the prefix of each.

    Args:
        along: public names of axes along which values differ, too.
    """
    if is_first_but_along(run, *along):
        yield ""
    if has_own_parameters(run.strategy, run.context) and is_first_but_along(run, "data", *along):
        yield replica_prefix(run.context.index("data"))


def restore_run(run: Run, hooks: HookStates, reader: CheckpointReader, source: Source, *, is_same_plan: bool) -> None:
    """Take it back, under any plan. What is worth a warning is told by one rank.

    A run without a loss scale (its precision is not fp16 now) leaves that of the checkpoint, one whose checkpoint has
    none begins with its own. Of hooks, those of the same class and number take what was saved.
    """
    context, values = run.context, reader.manifest.values

    def value(path: str) -> Any:
        path = source.own + path if source.own + path in values else path
        return decode(values[path], reader.tensor) if path in values else None

    train = value("train") or {"completed_steps": reader.manifest.step}
    was_trained = bool(run.completed_steps)
    run.completed_steps = train["completed_steps"]
    run.gradient_watch.load_state_dict(train)
    if run.loss_scaler is not None and (scale := value("loss_scale")) is not None:
        run.loss_scaler.load_state_dict(scale)
    of_strategy = f"strategy_values/{context.index('data')}"
    of_strategy = of_strategy if of_strategy in values else "strategy_values/0"
    run.strategy.load_state_dict({} if source.strategy is None else value(of_strategy) or {})
    restore_module_states(run.model, values, reader.tensor, context.rank if is_same_plan else None)
    if run.loaders is not None:
        with _told_by_one(context.is_logging_rank):
            _restore_place_in_data(run, reader)
    hooks.restore(reader, is_same_plan=is_same_plan, was_trained=was_trained)
    # last: what is read above may draw
    restore_rng(values, reader.tensor, context, is_same_plan=is_same_plan, num_steps=run.completed_steps)


def _restore_place_in_data(run: Run, reader: CheckpointReader) -> None:
    """By the state of the same data rank where there are as many; else by that of the first.

    The batches of a global order (a dataset, a stream or a loader that gives whole batches) are the same for any number
    of data ranks. A loader of one's own that gives each data rank its own batches is not: what each reads next is where
    the first one was.
    """
    assert run.loaders is not None
    values, size, loader = reader.manifest.values, run.context.size("data"), run.loaders.train
    saved = sum(path.startswith("loader/") for path in values)
    if not saved:
        loader.set_step(run.completed_steps)
        return
    index = run.context.index("data") if saved == size else 0
    state = decode(values[f"loader/{index}"], reader.tensor)
    if saved != size and state.get("per_rank"):
        log.warning(
            "the checkpoint is of %d data ranks, each with batches of its own from your loader; now there are %d: all "
            "go on from the place of the first, so samples may come twice, or not at all",
            saved, size,
        )  # fmt: skip
    loader.load_state_dict(state)


@contextmanager
def _told_by_one(is_logging_rank: bool) -> Iterator[None]:
    """Inside, what loaders log is logged by one rank: all say the same."""
    if is_logging_rank:
        yield
        return
    loggers = [logging.getLogger("colossus.data"), log]
    for each in loggers:
        each.addFilter(_nothing)
    try:
        yield
    finally:
        for each in loggers:
            each.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def is_first_but_along(run: Run, *public: str) -> bool:
    """Whether this rank is at 0 along all axes but those of some public names."""
    context = run.context
    along = context.grid.axes(public)
    return all(at == 0 for axis, at in context.coordinates.items() if axis not in along)
