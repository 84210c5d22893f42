"""What goes where weights go: how text becomes tokens, which tokens end it, names of classes. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.checkpoint.durable import write_flushed
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import TOKENIZER_FILE

GENERATION = "generation_config.json"
PREPROCESSOR = "preprocessor_config.json"
#: files, by the names that Hugging Face gives them
ASSET_FILES = (
    TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
    "tokenizer.model", "vocab.json", "merges.txt", GENERATION, PREPROCESSOR,
)  # fmt: skip
#: those that say nothing of tokens
_OF_IMAGES = (PREPROCESSOR,)
#: sections of a manifest's config: ids of special tokens, and names of classes, as ``config.json`` has them
TOKEN_IDS, LABELS = "token_ids", "labels"


@dataclass(frozen=True)
class Assets:
    """What belongs to weights, beside them.

    Attributes:
        config: sections of a manifest's config, `TOKEN_IDS` and `LABELS`.
        files: of `ASSET_FILES`, by name.
    """

    config: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def for_tokenizer(self, content: bytes | None) -> Assets:
        """What stays for ids that were made otherwise: of another tokenizer nothing of tokens does.

        Args:
            content: the ``tokenizer.json`` of the data; None where the data does not say how it was made.
        """
        if content is None or content == self.files.get(TOKENIZER_FILE):
            return self
        kept = {name: data for name, data in self.files.items() if name in _OF_IMAGES}
        return Assets({key: value for key, value in self.config.items() if key != TOKEN_IDS}, kept)


def read_assets(folder: Path, config: Mapping[str, Any]) -> Assets:
    """Those of a folder whose manifest has this config.

    Raises:
        CheckpointError: one cannot be read.
    """
    files = {}
    for name in ASSET_FILES:
        try:
            if (folder / name).is_file():
                files[name] = (folder / name).read_bytes()
        except OSError as error:
            raise CheckpointError(f"{folder / name}: cannot be read: {error.strerror or error}") from None
    held = {key: config[key] for key in (TOKEN_IDS, LABELS) if isinstance(config.get(key), Mapping) and config[key]}
    return Assets(held, files)


def write_assets(files: Mapping[str, bytes], folder: Path) -> None:
    """Write and flush them."""
    for name, data in files.items():
        write_flushed(folder / name, data)
