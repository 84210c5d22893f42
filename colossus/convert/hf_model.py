"""``model = dict(type="hf", native=True, ..)``: a model of transformers' own code in a config, by `parallelize`."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from colossus.arithmetic import listed
from colossus.checkpoint.errors import CheckpointError
from colossus.config.user_path import user_path
from colossus.convert.parallelize import parallelize
from colossus.convert.swap import HEAD, is_linear
from colossus.hf.hf_folder import stored_tensors
from colossus.layers.loss import cross_entropy


def hf_model(
    config: Mapping[str, Any],
    native: bool = True,
    weights: str | None = None,
    architecture: str | None = None,
    rules: Mapping[str, str] | None = None,
    blocks: str | Sequence[str] | None = None,
) -> nn.Module:
    """Return a model of transformers with the loss of its logits: labels [batch, tokens] or [batch], -100 is ignored.

    Labels are already those of the next token, as the datasets of colossus return them.

    Args:
        config: the content of its ``config.json``.
        native: for the config; always True.
        weights: a folder with its tensors under its own names; None for the initial values of transformers.
        architecture: its class; by default the config's first, or the one for causal language models.
        rules, blocks: see `colossus.parallelize`.

    Raises:
        ValueError: transformers is missing, lacks the class, or refuses the config.
        CheckpointError: the folder has other tensors than the model.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise ValueError(f"a model of transformers' own code needs it: pip install colossus[hf] ({error})") from None
    named = [architecture] if architecture else list(config.get("architectures") or [])
    kind = getattr(transformers, named[0], None) if named else transformers.AutoModelForCausalLM
    if kind is None:
        raise ValueError(f"transformers {transformers.__version__} has no class {named[0]!r}")
    options = _without_code(config)
    options.pop("model_type", None)
    try:
        theirs = transformers.AutoConfig.for_model(config["model_type"], **options)
    except Exception as error:  # transformers raises errors of many classes
        raise ValueError(f"transformers refuses this config of a {config['model_type']!r}: {error}") from error
    theirs.name_or_path = weights or ""  # the folder whose tokenizer and settings of generation go along
    with_head = dict(rules or {})  # read once the model is made

    def make() -> nn.Module:
        model: Any = kind.from_config(theirs) if hasattr(kind, "from_config") else kind(theirs)
        if weights is not None:
            _take_weights(model, user_path(weights))
        head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            if is_linear(module) and module is head:
                with_head.setdefault(name, HEAD)  # the last rule, so that a rule of the user's applies before it
        return model

    model = parallelize(make, with_head, blocks=blocks)()
    vars(model)["loss"] = loss_of_logits
    return model


#: keys with which a folder would choose code: a repository's modules, or kernels that transformers fetches
_CODE = {"auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "custom_pipelines"}


def _without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a config and of the configs inside: facts about the model, none about what computes it."""
    nested = {key: _without_code(value) if isinstance(value, Mapping) else value for key, value in config.items()}
    return {key: value for key, value in nested.items() if key not in {*_CODE, "transformers_version"}}


def loss_of_logits(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return (sum, count) of the cross-entropy of ``outputs.logits`` [.., classes], which may be split over classes."""
    return cross_entropy(outputs.logits, batch["labels"], token_weights=batch.get("token_weights"))


def _take_weights(model: Any, folder: Path) -> None:
    """Let the parameters be the tensors of a folder, by their own names, memory-mapped; tied parameters stay tied."""
    stored = stored_tensors(folder)
    tensors: dict[str, Tensor] = {}
    for file in sorted({tensor.file for tensor in stored.values()}):
        with safe_open(folder / file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    prefix = f"{model.base_model_prefix}."
    names = {name: name for name in tensors}
    if not any(name.startswith(prefix) for name in names):  # saved from the base model alone
        names = {name: prefix + name for name in tensors if prefix + name in model.state_dict()} or names
    by_name = {names.get(name, name): tensor for name, tensor in tensors.items()}
    other = [
        f"{name} {list(tensor.shape)} (here {list(own.shape)})"
        for name, own in model.state_dict().items()
        if (tensor := by_name.get(name)) is not None and tensor.shape != own.shape
    ]
    missing, unexpected = ([], []) if other else model.load_state_dict(by_name, strict=False, assign=True)
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    missing = [name for name in missing if name not in tied]
    for title, some in (("of another shape", other), ("missing", missing), ("not in the model", unexpected)):
        if some:
            raise CheckpointError(
                f"{folder}: is not the {type(model).__name__} of its config: {len(some)} {title}: {listed(some)}"
            )
    with torch.no_grad():
        model.tie_weights()
