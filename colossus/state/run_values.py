"""State of a run that is no tensor with a logical name.

That is its step, the loss scale, its place in the data, random generators, and what hooks, modules and the strategy
return as ``state_dict``.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint, in_words
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode
from colossus.context.parallel_context import ParallelContext
from colossus.data.loader import Loader
from colossus.random import GlobalRng
from colossus.state.changed_training import frozen_names, next_rate
from colossus.state.replicas import ReplicaSource, has_own_parameters, replica_prefix, replica_record
from colossus.state.run import Run, SavedHook
from colossus.state.whole_state import SUFFIX

log = logging.getLogger("colossus.engine")


def run_values(run: Run) -> dict[str, Any]:
    """Return the values that this rank adds to a checkpoint, by path. Each path comes from one rank."""
    context, loaders = run.context, run.loaders
    values: dict[str, Any] = {f"ranks/{context.rank}/rng": _rng_state(context)}
    if _is_first_but_along(run, "pipeline"):
        for name, module in _with_extra_state(run.model).items():
            values[f"modules/{name}"] = module.get_extra_state()
        values[f"frozen/{context.index('pipeline')}"] = frozen_names(run.model)
    if _is_first_but_along(run, "data"):
        index = context.index("data")
        values[f"strategy_values/{index}"] = run.strategy.state_dict()
        if loaders is not None:
            loader = loaders.train
            is_ours = isinstance(loader, Loader)  # any iterable with state may be put in its place
            with _logged_by_one(context):
                values[f"loader/{index}"] = loader.trained_state_dict() if is_ours else loader.state_dict()
    for replica in written_prefixes(run):
        progress = {
            "completed_steps": run.completed_steps,
            "rolled_back": run.rolled_back,
            "owes_evaluation": run.owes_evaluation,
            "learning_rate": next_rate(run),
        }
        values[f"{replica}train"] = progress | run.gradient_watch.state_dict()
        if run.loss_scaler is not None:
            values[f"{replica}loss_scale"] = run.loss_scaler.state_dict()
    return values | (replica_record(run) if context.is_logging_rank else {})


def written_prefixes(run: Run, *along: str) -> Iterator[str]:
    """Yield the prefixes of the paths that this rank writes values under, of values that each replica may have.

    "" is the prefix of all replicas, or of the first. Replicas with parameters of their own have one each, too.

    Args:
        run: the run.
        along: axes along which every rank writes its own value.
    """
    if _is_first_but_along(run, *along):
        yield ""
    if has_own_parameters(run) and _is_first_but_along(run, "data", *along):
        yield replica_prefix(run.context.index("data"))


def _is_first_but_along(run: Run, *public: str) -> bool:
    """Return whether this rank has index 0 along all axes but those of some public names."""
    along = run.context.grid.axes(public)
    return all(at == 0 for axis, at in run.context.coordinates.items() if axis not in along)


def decoded_values(reader: CheckpointReader, rank: int) -> dict[str, Any]:
    """Return the values of a checkpoint but for those of other ranks and of whole tensors, which their owners read."""
    values, own = {}, f"ranks/{rank}/"
    for path, value in reader.manifest.values.items():
        if f"optimizer{SUFFIX}/" not in path and (not path.startswith("ranks/") or path.startswith(own)):
            try:
                values[path] = decode(value, reader.tensor)
            except Exception as error:
                kind = type(error) if isinstance(error, CheckpointError) else DamagedCheckpoint
                raise kind(f"{reader.folder}: {path} cannot be understood: {in_words(error)}") from error
    return values


def restore_run(
    run: Run,
    step: int,
    values: Mapping[str, Any],
    source: ReplicaSource,
    *,
    same_plan: bool,
) -> None:
    """Restore a run's progress, scale, strategy, modules, place in the data, hooks and generators, under any plan.

    Args:
        run: the run to restore.
        step: step of the checkpoint.
        values: decoded values of the checkpoint.
        source: where this rank finds its state.
        same_plan: whether this rank has the same coordinates as when the values were saved.
    """
    context = run.context
    train = values.get(f"{source.own}train", values.get("train", {"completed_steps": step}))
    run.completed_steps, run.rolled_back = train["completed_steps"], train.get("rolled_back", 0.0)
    run.owes_evaluation = train.get("owes_evaluation", False)
    run.is_resumed = True
    run.gradient_watch.load_state_dict(train)
    scale = values.get(f"{source.own}loss_scale", values.get("loss_scale"))
    if run.loss_scaler is not None and scale is not None:
        run.loss_scaler.load_state_dict(scale)
    index = 0 if source.is_average else context.index("data")
    of_strategy = values.get(f"strategy_values/{index}", values.get("strategy_values/0"))
    run.strategy.load_state_dict({} if source.strategy is None else of_strategy or {})
    for name, module in _with_extra_state(run.model).items():
        if f"modules/{name}" in values:
            module.set_extra_state(values[f"modules/{name}"])
    if run.loaders is not None:
        with _logged_by_one(context):
            _restore_place_in_data(run, values)
    _restore_hooks(run.hooks, values, context)
    # last: restoring the parts above may draw random numbers
    if same_plan:
        _set_rng(values[f"ranks/{context.rank}/rng"], context)
    else:
        key = context.rng.key("torch", context.index("data"), run.completed_steps)
        GlobalRng(tuple(_devices(context).values())).seed(key)


def _with_extra_state(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules with torch's ``get_extra_state``, by full name."""
    own = nn.Module.get_extra_state
    return {name: module for name, module in model.named_modules() if type(module).get_extra_state is not own}


# -- the place in the data --------------------------------------------------------------------------------


def _restore_place_in_data(run: Run, values: Mapping[str, Any]) -> None:
    """Restore the loader from the state of the same data rank, or of the first one where their number has changed.

    The first rank's state is enough for our loaders; only a user's loader with batches per data rank would need the
    others.
    """
    assert run.loaders is not None
    size, loader = run.context.size("data"), run.loaders.train
    saved = sum(path.startswith("loader/") for path in values)
    if saved:
        loader.load_state_dict(values[f"loader/{run.context.index('data') if saved == size else 0}"])
    else:
        loader.set_step(run.completed_steps)


@contextlib.contextmanager
def _logged_by_one(context: ParallelContext) -> Iterator[None]:
    of_loaders = logging.getLogger("colossus.data")
    was_disabled, of_loaders.disabled = of_loaders.disabled, of_loaders.disabled or not context.is_logging_rank
    try:
        yield
    finally:
        of_loaders.disabled = was_disabled


# -- hooks ------------------------------------------------------------------------------------------------


def hook_values(run: Run) -> dict[str, Any]:
    """Return the state of each hook of this rank that has one, by path; that of the first rank is saved."""
    for hook in run.hooks:
        hook.on_save(run.engine)
    states = {f"hooks/{name}": hook.state_dict() for name, hook in named_hooks(run.hooks)}
    return {path: state for path, state in states.items() if state}


def _restore_hooks(hooks: Sequence[SavedHook], values: Mapping[str, Any], context: ParallelContext) -> None:
    saved = {path.removeprefix("hooks/"): value for path, value in values.items() if path.startswith("hooks/")}
    for name, hook in named_hooks(hooks):
        if name in saved:
            hook.load_state_dict(saved.pop(name))
    if saved and context.is_logging_rank:
        log.warning("state of hooks that this run does not have is dropped: %s", ", ".join(saved))


def named_hooks(hooks: Sequence[SavedHook]) -> Iterator[tuple[str, SavedHook]]:
    """Yield hooks by the name of their class, with a number where several have the same."""
    count: Counter[str] = Counter()
    for hook in hooks:
        kind = type(hook).__qualname__
        count[kind] += 1
        yield (kind if count[kind] == 1 else f"{kind}~{count[kind]}"), hook


# -- random generators ------------------------------------------------------------------------------------
#
# Only the global generators are saved. All other random numbers are drawn by keys, and need the step alone.
# Under another plan the global ones are seeded from (seed, data rank, step), so that no number repeats.


def _rng_state(context: ParallelContext) -> dict[str, Any]:
    devices = _devices(context)
    of_torch, (version, numbers, gauss), of_numpy = GlobalRng(tuple(devices.values())).get_state()
    return {
        "step": context.rng.step,
        "microbatch": context.rng.microbatch,
        "torch": dict(zip(devices, of_torch, strict=True)),
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": of_numpy,
    }


def _devices(context: ParallelContext) -> dict[str, torch.device]:
    return {"cpu": torch.device("cpu"), context.device.type: context.device}


def _set_rng(state: Mapping[str, Any], context: ParallelContext) -> None:
    devices = {kind: device for kind, device in _devices(context).items() if kind in state["torch"]}
    version, numbers, gauss = state["python"]
    of_torch = [state["torch"][kind] for kind in devices]
    GlobalRng(tuple(devices.values())).set_state((of_torch, (version, tuple(numbers.tolist()), gauss), state["numpy"]))
    context.rng.move_to(state["step"], state["microbatch"])
