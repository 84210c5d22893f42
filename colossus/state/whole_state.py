"""What an optimizer of whole parameters keeps for a tensor as one (`colossus.optim`), in a checkpoint: by its name, so
that its owner under another plan finds it."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor

from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_box import TensorBox
from colossus.checkpoint.values import decode, encode

#: behind the section of the optimizer, of which the rest is by parameter
SUFFIX = "_whole"


def whole_boxes(section: str, optimizer: Any, elsewhere: Container[int], values: dict[str, Any]) -> Iterator[TensorBox]:
    """The tensors under ``<section>_whole/<name>/<entry>``; plain values and nests go to ``values``.

    Args:
        elsewhere: ids of stored parameters that an earlier pipeline stage holds and saves.
    """
    state: dict[str, dict[str, Any]] = getattr(optimizer, "tensor_state", {})
    for tensor, is_saved in optimizer.held_tensors() if state else ():
        of_tensor, path = state.get(tensor.name, {}), f"{section}{SUFFIX}/{tensor.name}"
        if not is_saved or id(tensor.parameter) in elsewhere:
            continue
        plain, tensors = {}, dict[str, Tensor]()
        for entry, value in of_tensor.items():
            if isinstance(value, Tensor):
                tensors[f"{path}/{entry}"] = value
            else:
                plain[entry] = value
        if plain:
            values[path] = encode(plain, path, tensors)
        yield from (TensorBox.whole(key, value) for key, value in tensors.items())


def load_whole(section: str, reader: CheckpointReader, optimizer: Any) -> None:
    """Give an optimizer the state of the tensors that this rank holds it of."""
    if not hasattr(optimizer, "held_tensors"):
        return
    held = {tensor.name: tensor.parameter.device for tensor, _ in optimizer.held_tensors()}
    state: dict[str, dict[str, Any]] = {name: {} for name in held}
    for path in reader.manifest.names(section + SUFFIX):
        name, _, entry = path.rpartition("/")
        if name in held:
            value = reader.tensor(f"{section}{SUFFIX}/{path}")
            state[name][entry] = value.to(held[name]) if value.dim() else value
    for name, of_tensor in state.items():
        saved = reader.manifest.values.get(f"{section}{SUFFIX}/{name}")
        of_tensor.update(decode(saved, reader.tensor) if saved is not None else {})
    optimizer.load_tensor_state({name: of_tensor for name, of_tensor in state.items() if of_tensor})
