"""The adapters with which a new run begins, from a folder of another library."""

from __future__ import annotations

from functools import partial

import torch

from colossus.checkpoint.adapter_names import adapter_names
from colossus.checkpoint.errors import under_key
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.models.options import kind_of
from colossus.registry import ADAPTER_FORMATS
from colossus.state.model_state_dict import whole_tensors
from colossus.state.restore import load_weights
from colossus.state.run import Run


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
