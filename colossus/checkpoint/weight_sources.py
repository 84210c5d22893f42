"""Where weights come from: checkpoints, and the folders of others that `WEIGHT_FORMATS` names; and what lies beside
them: how text becomes tokens, which tokens end it, names of classes. No torch until one is opened."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.durable import write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, TOKENIZER_FILE, Manifest, read_manifest
from colossus.checkpoint.saved_averages import with_average
from colossus.config.user_path import user_path
from colossus.registry import WEIGHT_FORMATS

if TYPE_CHECKING:
    from colossus.checkpoint.reader import CheckpointReader


def find_weights(path: Path | str, damaged: dict[Path, CheckpointError] | None = None) -> Path:
    """The folder that a user means: a checkpoint, as `locate` finds it, or one of another format, which is checked.

    Args:
        damaged: those that are known not to be whole.
    """
    path = user_path(path)
    foreign = _format_of(path)
    if foreign is None:
        return locate(path, damaged)
    if damaged is not None and path in damaged:
        raise damaged[path]
    foreign.manifest(path)
    return path


def open_weights(folder: Path | str, average: str | None = None) -> CheckpointReader:
    """A reader of what `find_weights` has found; a `CheckpointError` when it is not whole.

    Args:
        average: of weights, in the place of the parameters (`with_average`).
    """
    foreign = _format_of(Path(folder))
    opens = importlib.import_module("colossus.checkpoint.reader").CheckpointReader if foreign is None else foreign.open
    reader: CheckpointReader = opens(Path(folder))
    reader.manifest = with_average(reader.manifest, average, folder)
    return reader


def manifest_of(folder: Path, average: str | None = None) -> Manifest:
    """What `find_weights` has found holds, see `open_weights`."""
    foreign = _format_of(folder)
    manifest: Manifest = read_manifest(folder) if foreign is None else foreign.manifest(folder)
    return with_average(manifest, average, folder)


def describe_weights(folder: Path) -> str:
    """What `find_weights` has found, in words."""
    foreign = _format_of(folder)
    return f"of step {read_manifest(folder).step}, {folder}" if foreign is None else f"of {foreign.title}, {folder}"


def _format_of(path: Path) -> Any:
    """Return the format of a folder that is not of ours; None for what may be ours."""
    try:
        if (path / MANIFEST).exists():
            return None
        formats = (WEIGHT_FORMATS.get(name) for name in WEIGHT_FORMATS.names())
        return next((kind for kind in formats if kind.recognises(path)), None)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


# -- what lies beside weights -----------------------------------------------------------------------------

GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
#: files, by the names that Hugging Face gives them
ASSET_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", GENERATION, PREPROCESSOR,
)  # fmt: skip
#: sections of a manifest's config: ids of special tokens, and names of classes, as ``config.json`` has them
TOKEN_IDS, LABELS = "token_ids", "labels"


@dataclass(frozen=True)
class Assets:
    """What belongs to weights, beside them: sections of a manifest's config, and `ASSET_FILES` by name."""

    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def for_tokenizer(self, content: bytes | None) -> Assets:
        """What stays for data with this ``tokenizer.json`` (None: unknown): of another one nothing of tokens does."""
        if content is None or content == self.files.get(TOKENIZER_FILE):
            return self
        kept = {name: data for name, data in self.files.items() if name == PREPROCESSOR}  # of images
        return Assets({key: value for key, value in self.config.items() if key != TOKEN_IDS}, kept)


def read_assets(folder: Path, config: Mapping[str, Any]) -> Assets:
    """Those of a folder whose manifest has this config."""
    try:
        files = {name: (folder / name).read_bytes() for name in ASSET_FILES if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    held = {key: config[key] for key in (TOKEN_IDS, LABELS) if isinstance(config.get(key), Mapping) and config[key]}
    return Assets(held, files)


def assets_of_model(model: Any) -> Assets:
    """Return what belongs to a model of transformers' own code: the files of the folder that it was read from, and the
    settings of its generation. Empty for any other model."""
    folder, settings = getattr(model, "name_or_path", None), getattr(model, "generation_config", None)
    is_folder = isinstance(folder, str) and bool(folder) and Path(folder).is_dir()
    files = dict(read_assets(Path(folder), {}).files) if is_folder else {}  # type: ignore[arg-type]
    is_own = not getattr(settings, "_from_model_config", True) or GENERATION not in files  # else the file says more
    if is_own and hasattr(settings, "to_json_string"):
        files[GENERATION] = settings.to_json_string().encode()  # type: ignore[union-attr]
    return Assets(files=files)


def write_assets(files: Mapping[str, bytes], folder: Path) -> None:
    """Write and flush them."""
    for name, data in files.items():
        write_flushed(folder / name, data)
