"""State that is kept for each parameter, an optimizer's above all, as boxes of whole tensors by logical name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_box import TensorBox
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import encode
from colossus.state.parameters import ParameterBox

#: stored parameter -> name -> tensor of its shape, another tensor that is the same on all ranks, or a plain value
ParameterState = Mapping[nn.Parameter, Mapping[str, Any]]


def state_boxes(
    section: str, state: ParameterState, boxes: Iterable[ParameterBox], values: dict[str, Any]
) -> Iterator[TensorBox]:
    """The tensors of a state under ``<section>/<name of the parameter>/<name>``; its plain values go to ``values``.

    Raises:
        CheckpointError: for a tensor that is neither of the shape of its parameter, nor a number for each of its rows,
            nor the same on all ranks.
    """
    for box in boxes:
        plain: dict[str, Any] = {}
        of_param, path = state.get(box.parameter, {}), f"{section}/{box.name}"
        for entry, value in of_param.items():
            key = f"{path}/{entry}"
            if not isinstance(entry, str) or "/" in entry:
                raise CheckpointError(
                    f"{path}: state is kept under {entry!r}; a checkpoint needs names without a slash"
                )
            if not isinstance(value, Tensor):
                plain[entry] = value
            elif value.shape in (box.parameter.shape, _by_row(box.parameter)):
                yield box.tensor_box(key, value)
            elif value.dim() and box.is_split:
                raise _unknown_part(key, value.shape, box)
            else:
                yield TensorBox.whole(key, value, writes=box.writes_scalars)
        if plain and box.writes_scalars:
            tensors: dict[str, Tensor] = {}
            values[path] = encode(plain, path, tensors)
            for key, tensor in tensors.items():
                if tensor.dim() and box.is_split:
                    raise _unknown_part(key, tensor.shape, box)
                yield TensorBox.whole(key, tensor)


def _unknown_part(key: str, shape: Sequence[int], box: ParameterBox) -> CheckpointError:
    return CheckpointError(
        f"{key} has shape {tuple(shape)}, its parameter {box.logical.shape}, of which a rank holds a part: what is of "
        f"that part is not known. State of a split parameter must have its shape, a number for each row ([rows, 1]), "
        f"or none; take a plan that keeps the parameter whole, or the weights alone (checkpoint.weights)"
    )


def require_state_fits(section: str, reader: CheckpointReader, boxes: Sequence[ParameterBox]) -> None:
    """That this rank's boxes of the parameters say what their boxes of the state are, else a `CheckpointError`."""
    entries = _entries(section, reader)
    for box in boxes:
        for entry in entries.get(box.name, ()) if box.is_split else ():
            key = f"{section}/{box.name}/{entry}"
            shape = reader.manifest.tensors[key].shape
            if shape not in ((), box.logical.shape, box.shape_by_row):
                raise _unknown_part(f"{reader.folder}: {key}", shape, box)


def _entries(section: str, reader: CheckpointReader) -> dict[str, list[str]]:
    """Of each parameter by name, what is saved of its state in tensors."""
    entries: dict[str, list[str]] = {}
    for name in reader.manifest.names(section):
        owner, _, entry = name.rpartition("/")
        entries.setdefault(owner, []).append(entry)
    return entries


def read_state(
    section: str,
    reader: CheckpointReader,
    values: Mapping[str, Any],
    boxes: Sequence[ParameterBox],
    existing: Mapping[Any, Mapping[str, Any]] | None = None,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of this rank's parameters, as `state_boxes` had it under whatever plan.

    What had the dtype of its parameter has it again, also where that is another now; what had a dtype of its own keeps
    it. Entries that the checkpoint does not have are as if the parameter had never been updated.

    Args:
        values: of the checkpoint, decoded.
        existing: what is kept now: memory that fits is filled, and no other is taken.
    """
    entries = _entries(section, reader)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for box in boxes:
        of_param = state.setdefault(box.parameter, {})
        for entry in entries.get(box.name, ()):
            key = f"{section}/{box.name}/{entry}"
            saved = reader.manifest.tensors[key]
            is_by_row = saved.shape == box.shape_by_row != box.logical.shape and box.is_split
            if saved.shape != box.logical.shape and not is_by_row:
                of_param[entry] = reader.tensor(key)
                continue
            if entry not in of_param:
                shape = _by_row(box.parameter) if is_by_row else box.parameter.shape
                is_as_parameter = saved.dtype == reader.manifest.tensors[f"model/{box.name}"].dtype
                dtype = box.parameter.dtype if is_as_parameter else DTYPES[saved.dtype]
                kept = (existing or {}).get(box.parameter, {}).get(entry)
                fits = isinstance(kept, Tensor) and (kept.shape, kept.dtype) == (shape, dtype)
                of_param[entry] = kept if fits else torch.zeros(shape, dtype=dtype, device=box.parameter.device)
            reader.read_into(box.tensor_box(key, of_param[entry]))
        of_param.update(values.get(f"{section}/{box.name}", {}))
    return {param: of_param for param, of_param in state.items() if of_param}


def _by_row(parameter: Tensor) -> torch.Size:
    """The shape of a number for each row."""
    return torch.Size((*parameter.shape[:1], *(1 for _ in parameter.shape[1:])))
