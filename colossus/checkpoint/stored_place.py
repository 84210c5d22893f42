"""The place of a weight of ours in a folder that has other names, stacks layers, or has rows in another order."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError

#: beside the weights, as beside Meta's: ``{"n_heads": 32}``
PARAMS = "params.json"


@dataclass(frozen=True)
class StoredPlace:
    """The place of a weight in a folder.

    Attributes:
        name: the name of the tensor there.
        shape: the full shape here.
        layer: the entry of the tensor's first dim that has the weight; None: the tensor has no dim of layers.
        row_there: a row of the weight -> a row there; None: the same.
    """

    name: str
    shape: tuple[int, ...]
    layer: int | None = None
    row_there: Callable[[int], int] | None = None


def read_params(folder: Path) -> dict[str, Any]:
    """Return what a user has written about a folder's model, {} without a file.

    Raises:
        CheckpointError: it is no object of whole numbers.
    """
    path = folder / PARAMS
    try:
        params = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f'{path}: must be {{"n_heads": 32}}, of the model: {error}') from None
    numbers = ("n_heads", "vocab_size")
    if not isinstance(params, dict) or any(type(params.get(key, 1)) is not int for key in numbers):
        raise CheckpointError(f'{path}: must be {{"n_heads": 32}}, of the model, in whole numbers')
    return params


def ask_for_heads(folder: Path, whose: str) -> CheckpointError:
    """Return the error that asks for the number of heads, which decides the order of rows."""
    return CheckpointError(
        f"{folder}: has {whose}, whose rows of queries and keys are in another order within a head or a group, and "
        f"nothing says how many heads there are: echo '{{\"n_heads\": 32}}' > {folder / PARAMS}"
    )
