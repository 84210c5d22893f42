"""Differences between a resumed run and its checkpoint: the learning rate, and which parameters are trained.

A checkpoint stores the next learning rate and the names of frozen parameters, not only settings. So a user's own
schedule is compared, too.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any

from torch import nn

from colossus.arithmetic import listed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.comm.objects import all_gather_object
from colossus.config import as_dict
from colossus.config.printed import by_path
from colossus.config.user_path import user_path
from colossus.layout.parameter import logical_parameters
from colossus.state.run import Run

log = logging.getLogger("colossus.engine")

#: config keys that the learning rates of a run depend on
_SCHEDULE_KEYS = ("lr_schedule.", "train.schedule_steps")


def next_rate(run: Run) -> dict[str, Any]:
    """Return the peak and the next learning rate of a run; the next is None where the schedule is over."""
    try:
        rate = float(run.rates.at(run.completed_steps))
    except Exception:  # a scheduler of torch that ends after its number of steps
        rate = None
    return {"peak": run.config.optimizer.lr, "next": rate}


def _change_of_rate(run: Run, saved: Mapping[str, Any], saved_config: Mapping[str, Any]) -> str:
    """Return the warning that the next learning rate differs from the saved one.

    It is empty where the rates agree, or differ by the factor between the peaks alone.

    Args:
        run: the resumed run.
        saved: result of `next_rate` when the checkpoint was saved.
        saved_config: config of the saved run, as `as_dict` returns it.
    """
    own = next_rate(run)
    before, peak, now, own_peak = saved["next"], saved["peak"], own["next"], own["peak"]
    if now is None or (before is not None and math.isclose(before / peak, now / own_peak, abs_tol=1e-9)):
        return ""
    then, keys = dict(by_path(dict(saved_config))), dict(by_path(as_dict(run.config)))
    changed = {
        key: f"{key} was {then.get(key)!r} and is {keys.get(key)!r}"
        for key in (*then, *keys)
        if key.startswith(_SCHEDULE_KEYS) and then.get(key) != keys.get(key)
    }
    why = ", ".join(changed.values()) or "the code of lr_schedule.type is another"
    would_be = "there would be none" if before is None else f"it would be {before:.6g}"
    return (
        f"the learning rate jumps: that of step {run.completed_steps + 1} is {now:.6g}, with the settings of the "
        f"checkpoint {would_be} ({why}). Undo the change to follow the schedule of the checkpoint"
    )


def frozen_names(model: nn.Module) -> list[str]:
    """Return the names of the parameters that this rank does not train."""
    return [entry.name for entry in logical_parameters(model) if not entry.parameter.requires_grad]


def require_same_reference(run: Run, reader: CheckpointReader) -> None:
    """Raise CheckpointError where the path of a reference's weights now finds others than those of the checkpoint."""
    path = getattr(getattr(run.model, "reference", None), "weights_path", None)
    then, now = (_reference_folder(config) for config in (reader.manifest.config, as_dict(run.config)))
    if path is None or then is None or then == now or not Path(then).is_relative_to(os.path.abspath(user_path(path))):
        return
    raise CheckpointError(
        f"{reader.folder}: the reference had the weights of {then}, but {path} has newer ones, {now}: name the folder "
        f"itself as model.reference.weights or checkpoint.weights, whichever has that path"
    )


def _reference_folder(config: Mapping[str, Any]) -> str | None:
    """Return the folder of a reference's weights in a recorded config."""
    of_reference = (config.get("model") or {}).get("reference") or {}
    of_run = (config.get("checkpoint") or {}).get("weights") or {}
    folder: str | None = of_reference.get("weights") or of_run.get("path")
    return folder


def warn_of_changes(run: Run, reader: CheckpointReader, values: Mapping[str, Any]) -> None:
    """Warn on one rank where the run now trains differently from its checkpoint. Collective.

    Args:
        run: the resumed run.
        reader: reader of the checkpoint.
        values: decoded values of the checkpoint.
    """
    by_stage = [names for path, names in values.items() if path.startswith("frozen/")]
    then, now = {name for names in by_stage for name in names}, set(frozen_names(run.model))
    names = [entry.name for entry in logical_parameters(run.model)] if by_stage else []  # else of an older version
    mine = [name for name in names if name in then - now], [name for name in names if name in now - then]
    by_rank = all_gather_object(mine, run.world)
    if not run.context.is_logging_rank:
        return
    thawed, frozen = ([*dict.fromkeys(chain(*lists))] for lists in zip(*by_rank, strict=True))
    saved_rate = values.get("train", {}).get("learning_rate")
    if saved_rate and (change := _change_of_rate(run, saved_rate, reader.manifest.config)):
        log.warning("%s", change)
    if thawed:
        log.warning(
            "trained now, and frozen in the checkpoint: %s. The optimizer has no state for them: they begin in the "
            "middle of the schedule, without a warm-up. Freeze them, or begin a run with the weights alone "
            "(checkpoint.weights)", listed(thawed),
        )  # fmt: skip
    if frozen:
        log.warning(
            "frozen now, and trained in the checkpoint: %s. Their optimizer state is dropped",
            listed(frozen),
        )
