"""What a config names of Hugging Face: ``model = dict(type="hf")``, and weights. No torch until they are opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from colossus.checkpoint.manifest import TOKENIZER_FILE, Manifest
from colossus.config.user_path import user_path
from colossus.hf.hf_folder import CONFIG, is_hf_folder, read_folder, read_json, spec_of
from colossus.hf.native import is_native, resolve_native


def resolve(options: Mapping[str, Any]) -> tuple[dict[str, Any], str | None, str | None]:
    """What ``model = dict(type="hf", path=..)`` means: our model, the path of its weights (None where it begins with
    fresh ones), and that of its tokenizer (None where the folder has no tokenizer.json).

    Args:
        options: ``path``, a model folder of Hugging Face, relative to where the run is started; ``weights``, False for
            the initial values of a new model; all others are options of ours that differ from what the folder says. Of
            a model of transformers' own code see `resolve_native`.

    Raises:
        ValueError: without a path, or when the folder's model is none that colossus has.
    """
    if is_native(options):
        return resolve_native(options)
    given = dict(options)
    path, weights = given.pop("path", None), given.pop("weights", True)
    if not isinstance(path, str) or not path:
        raise ValueError(f'needs the path of a model folder: dict(type="hf", path="models/gpt2"), got path = {path!r}')
    folder = user_path(path)
    if not is_hf_folder(folder):
        if folder.is_dir():
            raise ValueError(f"path = {path!r}: has no {CONFIG} with a model_type")
        raise ValueError(
            f"path = {path!r}: there is no such folder; colossus downloads nothing: of a model of the Hub, "
            f"huggingface_hub.snapshot_download(..) makes a folder and returns its path"
        )
    _, spec = spec_of(folder, read_json(folder / CONFIG), given)
    return spec, path if weights else None, path if (folder / TOKENIZER_FILE).is_file() else None


class HuggingFace:
    """What `colossus.checkpoint.weight_sources` asks of a format of weights."""

    title = "a model folder of Hugging Face"
    recognises = staticmethod(is_hf_folder)

    @staticmethod
    def manifest(path: Path) -> Manifest:
        """What it holds; a CheckpointError says why it cannot be read."""
        return read_folder(path).manifest

    @staticmethod
    def open(path: Path) -> Any:
        return importlib.import_module("colossus.hf.hf_reader").HFReader(path)
