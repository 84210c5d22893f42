"""Hugging Face in a config: ``model = dict(type="hf")``, and weights. It imports no torch until weights are opened."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.checkpoint.weight_sources import WeightFormat
from colossus.config.user_path import user_path
from colossus.hf.hf_folder import CONFIG, is_hf_folder, read_folder, read_json, spec_of
from colossus.hf.native import is_native, resolve_native
from colossus.hf.universal_folder import is_universal, read_universal


def resolve(options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, str | None]:
    """Return our model for ``model = dict(type="hf", path=..)``, with the paths of its weights and of its tokenizer.

    Args:
        options: ``path``, a model folder of Hugging Face, relative to where the run is started; ``weights``, False for
            the initial values of a new model; all others are options of ours that override the folder's. A model of
            transformers' own code is resolved by `resolve_native`.

    Returns:
        The model's spec; the path of its weights, None with fresh values; the folder of its tokenizer, None without a
        tokenizer.json.

    Raises:
        ValueError: there is no path, or colossus has no such model.
    """
    if is_native(options):
        return resolve_native(options)
    overrides = dict(options)
    path, weights = overrides.pop("path", None), overrides.pop("weights", True)
    if not isinstance(path, str) or not path:
        raise ValueError(f'needs the path of a model folder: dict(type="hf", path="models/gpt2"), got path = {path!r}')
    folder = user_path(path)
    if not is_hf_folder(folder):
        if folder.is_dir():
            raise ValueError(f"path = {path!r}: has no {CONFIG} with a model_type")
        raise ValueError(
            f"path = {path!r}: there is no such folder, and colossus downloads nothing: "
            f"huggingface_hub.snapshot_download(..) downloads a model of the Hub and returns the folder's path"
        )
    _, spec = spec_of(folder, read_json(folder / CONFIG), overrides)
    return spec, path if weights else None, path if (folder / TOKENIZER_FILE).is_file() else None


HUGGING_FACE = WeightFormat(
    title="a model folder of Hugging Face",
    recognises=is_hf_folder,
    read=read_folder,
    reader="colossus.hf.hf_reader:HFReader",
)
UNIVERSAL_CHECKPOINT = WeightFormat(
    title="a universal checkpoint of DeepSpeed",
    recognises=is_universal,
    read=read_universal,
    reader="colossus.hf.universal_reader:UniversalReader",
)
