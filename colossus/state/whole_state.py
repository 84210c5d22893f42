"""State of an optimizer of whole parameters (`colossus.optim`) in a checkpoint.

It is stored by the name of the tensor, so that the tensor's owner under another plan finds it.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

from torch import Tensor

from colossus.checkpoint.part import Part
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.values import decode, encode

#: added to the name of the optimizer's section; the section itself has the state by parameter
SUFFIX = "_whole"


def whole_state_parts(
    section: str, optimizer: Any, elsewhere: Container[int], values: dict[str, Any]
) -> Iterator[Part]:
    """Yield the tensors under ``<section>_whole/<name>/<entry>``; add plain values and nests to ``values``.

    Args:
        section: section of the optimizer.
        optimizer: the optimizer.
        elsewhere: ids of stored parameters that an earlier pipeline stage has and saves.
        values: encoded values of the checkpoint, by path.
    """
    state: dict[str, dict[str, Any]] = getattr(optimizer, "tensor_state", {})
    for tensor, is_saved in optimizer.state_tensors() if state else ():
        state_of_tensor, path = state.get(tensor.name, {}), f"{section}{SUFFIX}/{tensor.name}"
        if not is_saved or id(tensor.parameter) in elsewhere:
            continue
        plain, tensors = {}, dict[str, Tensor]()
        for entry, value in state_of_tensor.items():
            if isinstance(value, Tensor):
                tensors[f"{path}/{entry}"] = value
            else:
                plain[entry] = value
        if plain:
            values[path] = encode(plain, path, tensors)
        yield from (Part.whole(key, value) for key, value in tensors.items())


def load_whole(section: str, reader: CheckpointReader, optimizer: Any) -> None:
    """Load the state of the tensors that this rank has state of."""
    if not hasattr(optimizer, "state_tensors"):
        return
    devices = {tensor.name: tensor.parameter.device for tensor, _ in optimizer.state_tensors()}
    state: dict[str, dict[str, Any]] = {name: {} for name in devices}
    for path in reader.manifest.names(section + SUFFIX):
        name, _, entry = path.rpartition("/")
        if name in devices:
            value = reader.tensor(f"{section}{SUFFIX}/{path}")
            state[name][entry] = value.to(devices[name]) if value.dim() else value
    for name, state_of_tensor in state.items():
        saved = reader.manifest.values.get(f"{section}{SUFFIX}/{name}")
        state_of_tensor.update(decode(saved, reader.tensor) if saved is not None else {})
    optimizer.load_tensor_state({name: state_of_tensor for name, state_of_tensor in state.items() if state_of_tensor})
