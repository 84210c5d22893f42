"""State that is no tensor of the model, as JSON and plain tensors: nothing needs to be unpickled."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colossus.checkpoint.errors import CheckpointError

_PLAIN_DTYPE = re.compile(r"[<>|=][biufc]\d{1,2}")
#: keys that mark an encoded value; a user's dict with one of them is encoded as items
TAGS = ("$tuple", "$items", "$tensor", "$array", "$numpy")


def encode(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """Return a nest of plain Python values, tensors and arrays as JSON.

    Tensors and arrays are added to ``tensors``, under keys that begin with ``path``.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(element, f"{path}.{index}", tensors) for index, element in enumerate(value)]
    if type(value) in (tuple, torch.Size):
        return {"$tuple": encode(list(value), path, tensors)}
    if type(value) in (dict, OrderedDict):
        if all(type(key) is str for key in value) and not any(key in TAGS for key in value):
            return {key: encode(element, f"{path}.{key}", tensors) for key, element in value.items()}
        return {"$items": encode([list(item) for item in value.items()], path, tensors)}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return {"$numpy": [value.dtype.str, value.item()]}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        array = np.ascontiguousarray(value)
        data = torch.from_numpy(array.reshape(-1).view(np.uint8).copy())
        return {"$array": [_put(data, path, tensors), value.dtype.str, list(value.shape)]}
    if isinstance(value, Tensor):
        return {"$tensor": _put(value.detach(), path, tensors)}
    raise CheckpointError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be saved: a checkpoint has numbers, "
        f"strings, lists, tuples, dicts, tensors and arrays, and no pickled objects; let the state_dict return these"
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Return the nest that `encode` got; ``tensor`` reads a tensor by its key."""
    if isinstance(value, list):
        return [decode(element, tensor) for element in value]
    if not isinstance(value, Mapping):
        return value
    tag = next(iter(value), None)
    if len(value) != 1 or tag not in TAGS:
        return {key: decode(element, tensor) for key, element in value.items()}
    content = value[tag]
    match tag:
        case "$tuple":
            return tuple(decode(element, tensor) for element in content)
        case "$items":
            return {decode(key, tensor): decode(element, tensor) for key, element in content}
        case "$numpy":
            return _plain_dtype(content[0]).type(content[1])
        case "$array":
            key, dtype, shape = content
            return tensor(key).numpy().view(_plain_dtype(dtype)).reshape(shape)
    return tensor(content)


def _plain_dtype(text: Any) -> np.dtype[Any]:
    """Return a dtype of numbers. A dtype of objects would read bytes of the file as addresses."""
    if not isinstance(text, str) or not _PLAIN_DTYPE.fullmatch(text):
        raise CheckpointError(f"has an array of dtype {text!r:.40}, which is none of numbers")
    return np.dtype(text)


def _put(value: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    """Add a tensor under its path, with a number where another has this key, and return the key."""
    key, number = path, 1
    while key in tensors:
        number += 1
        key = f"{path}~{number}"
    tensors[key] = value
    return key
