"""Files beside weights that go where the weights go: how text becomes tokens, and which tokens end it. No torch."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from colossus.checkpoint.manifest import TOKENIZER_FILE

GENERATION = "generation_config.json"
#: by the names that Hugging Face gives them
COMPANIONS = (TOKENIZER_FILE, "tokenizer_config.json", "special_tokens_map.json", GENERATION)


def companions_of(folder: Path) -> list[Path]:
    """Those that a folder has."""
    return [folder / name for name in COMPANIONS if (folder / name).is_file()]


def copy_companions(paths: Sequence[Path], folder: Path) -> list[Path]:
    """Copies in another folder, under the same names."""
    return [Path(shutil.copyfile(path, folder / path.name)) for path in paths]
