"""Sources of weights: checkpoints, and the folders of other formats that `WEIGHT_FORMATS` names.

Assets lie beside the weights: the tokenizer, the tokens that end a text, names of classes. No torch until one is
opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.durable import write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import locate
from colossus.checkpoint.manifest import MANIFEST, TOKENIZER_FILE, Manifest, read_manifest
from colossus.checkpoint.saved_averages import with_average
from colossus.config.user_path import user_path
from colossus.import_path import imported
from colossus.registry import WEIGHT_FORMATS

if TYPE_CHECKING:
    from colossus.checkpoint.reader import CheckpointReader


@dataclass(frozen=True)
class WeightFormat:
    """A format of folders with weights that are no checkpoints of ours, an entry of `WEIGHT_FORMATS`.

    Attributes:
        title: the name of such a folder in messages.
        recognises: whether a folder has this format.
        read: returns an object with the ``manifest`` of a folder, without the values; raises a CheckpointError that
            says why it cannot be read.
        reader: ``"package.module:class"`` of the reader of the values, which imports torch.
    """

    title: str
    recognises: Callable[[Path], bool]
    read: Callable[[Path], Any]
    reader: str


def find_weights(path: Path | str, damaged: dict[Path, CheckpointError] | None = None) -> Path:
    """Return the folder that a user means: a checkpoint (`locate`), or one of another format, which is checked.

    Args:
        path: a user's path.
        damaged: checkpoints that are known to be damaged.
    """
    path = user_path(path)
    foreign = _format_of(path)
    if foreign is None:
        return locate(path, damaged)
    if damaged is not None and path in damaged:
        raise damaged[path]
    foreign.read(path)
    return path


def open_weights(folder: Path | str, average: str | None = None) -> CheckpointReader:
    """Return a reader of a folder that `find_weights` returned.

    Args:
        folder: the folder.
        average: name of an average of weights to read in place of the parameters (`with_average`).

    Raises:
        CheckpointError: if it is not whole.
    """
    foreign = _format_of(Path(folder))
    kind = imported("colossus.checkpoint.reader:CheckpointReader" if foreign is None else foreign.reader)
    reader: CheckpointReader = kind(Path(folder))
    reader.manifest = with_average(reader.manifest, average, folder)
    return reader


def manifest_of(folder: Path, average: str | None = None) -> Manifest:
    """Return the manifest of a folder that `find_weights` returned, see `open_weights`."""
    foreign = _format_of(folder)
    manifest: Manifest = read_manifest(folder) if foreign is None else foreign.read(folder).manifest
    return with_average(manifest, average, folder)


def describe_weights(folder: Path) -> str:
    """Return a description of a folder that `find_weights` returned."""
    foreign = _format_of(folder)
    return f"of step {read_manifest(folder).step}, {folder}" if foreign is None else f"of {foreign.title}, {folder}"


def _format_of(path: Path) -> WeightFormat | None:
    """Return the foreign format of a folder; None if it may be ours."""
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
#: names of files, those of Hugging Face
ASSET_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", GENERATION, PREPROCESSOR,
)  # fmt: skip
#: sections of a manifest's config: ids of special tokens, and names of classes, as ``config.json`` has them
TOKEN_IDS, LABELS = "token_ids", "labels"


@dataclass(frozen=True)
class Assets:
    """The assets of weights: sections of a manifest's config, and `ASSET_FILES` by name."""

    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def for_tokenizer(self, content: bytes | None) -> Assets:
        """Return the assets that fit data with this ``tokenizer.json``; those of tokens do not fit another one.

        Args:
            content: content of the file; None if it is unknown, which keeps all.
        """
        if content is None or content == self.files.get(TOKENIZER_FILE):
            return self
        of_images = {name: data for name, data in self.files.items() if name == PREPROCESSOR}
        return Assets({key: value for key, value in self.config.items() if key != TOKEN_IDS}, of_images)


def read_assets(folder: Path, config: Mapping[str, Any]) -> Assets:
    """Return the assets in a folder whose manifest has this config."""
    try:
        files = {name: (folder / name).read_bytes() for name in ASSET_FILES if (folder / name).is_file()}
    except OSError as error:
        raise CheckpointError(f"{error.filename}: cannot be read: {error.strerror}") from None
    sections = (key for key in (TOKEN_IDS, LABELS) if isinstance(config.get(key), Mapping) and config[key])
    return Assets({key: config[key] for key in sections}, files)


def write_assets(files: Mapping[str, bytes], folder: Path) -> None:
    """Write and flush the files of assets."""
    for name, data in files.items():
        write_flushed(folder / name, data)
