"""Weights that come from elsewhere: of the frozen model beside the one that trains, and adapters of another library.

No checkpoint has those of the frozen model (`colossus.models.reference`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from colossus.checkpoint.adapter_names import adapter_names
from colossus.checkpoint.errors import under_key
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.weight_sources import find_weights
from colossus.config import Config, Named
from colossus.engine.resumer import Resumer
from colossus.models.options import kind_of
from colossus.registry import ADAPTER_FORMATS
from colossus.state.model_state_dict import whole_tensors
from colossus.state.restore import load_weights
from colossus.state.run import Run


def take_reference(run: Run, resumer: Resumer) -> None:
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
            take = partial(load_weights, run, reference=reference, **more)
            folder = resumer.read(lambda damaged: find_weights(path, damaged), take, average)
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


def take_adapters(run: Run) -> None:
    """Load the adapters of ``model.lora.path``, if the model has that option. Collective.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if the folder has other adapters than the model.
    """
    options = getattr(run.model, "options", None)
    lora = getattr(options, "lora", None)
    if lora is None or lora.path is None:
        return
    own = whole_tensors(run.model, run.context)
    opens = partial(ADAPTER_FORMATS.get("peft"), lora.path, kind_of(options), options, list(own))
    with under_key("model.lora.path"), torch.inference_mode(False), on_all_ranks(run.world, opens) as reader:
        load_weights(run, reader, only=sorted(adapter_names(own)))
