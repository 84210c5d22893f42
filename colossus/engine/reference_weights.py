"""The weights of the frozen model beside the one that trains (`colossus.models.reference`): no checkpoint has them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

from colossus.checkpoint.errors import under_key
from colossus.checkpoint.weight_sources import find_weights
from colossus.config import Config, Named
from colossus.engine.checkpoints import Checkpoints
from colossus.state.restore import load_weights
from colossus.state.run import Run


def take_reference(run: Run, checkpoints: Checkpoints) -> None:
    """Load the weights of a model's reference, if it has one, once; also in a run that resumes. Collective.

    They are those of ``model.reference``, or else of ``checkpoint.weights``; with neither it keeps the initial values
    that the model begins with.

    Raises:
        CheckpointError: on all ranks, if they are not whole, or not of this model.
    """
    model: Any = run.model
    reference: Any = getattr(model, "reference", None)
    if not getattr(reference, "is_reference", False) or reference.has_weights:
        return
    options, own, average = model.options.reference, run.config.checkpoint.weights, None
    path, key = options.weights or options.path, "model.reference"
    more: dict[str, Any] = {}
    if path is None and own is not None and options.model is None:
        path, key, average = own.path, "checkpoint.weights", own.average
        more = {name: getattr(own, name) for name in ("only", "rename", "strict", "grow")}
    if path is not None:
        with under_key(key):
            take = partial(load_weights, run, reference=reference, on_progress=checkpoints.on_progress, **more)
            folder = checkpoints.resumer.read(lambda damaged: find_weights(path, damaged), take, average)
        run.config = _with_folder(run.config, key, os.path.abspath(folder or path))
        reference.weights_path = path
    reference.has_weights = True


def _with_folder(config: Config, key: str, folder: str) -> Config:
    """Return the config with the folder of a reference's weights in place of a path that may find newer ones later."""
    weights, model = config.checkpoint.weights, config.model
    if key == "checkpoint.weights" and weights is not None:
        section = config.checkpoint.model_copy(update={"weights": weights.model_copy(update={"path": folder})})
        return config.model_copy(update={"checkpoint": section})
    spec = {} if model is None else model.spec()
    if not isinstance(spec.get("reference"), Mapping) or spec["reference"].get("weights") is None:
        return config
    return config.model_copy(update={"model": Named(**{**spec, "reference": {**spec["reference"], "weights": folder}})})
