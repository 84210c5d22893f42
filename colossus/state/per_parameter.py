"""State that is kept for each parameter, an optimizer's above all, as boxes of whole tensors by logical name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import decode, encode
from colossus.comm.objects import all_gather_object
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.state.boxes import ParameterBox

#: stored parameter -> name -> tensor of its shape, another tensor that is the same on all ranks, or a plain value
ParameterState = Mapping[nn.Parameter, Mapping[str, Any]]


def held_of_state(
    section: str, state: ParameterState, boxes: Iterable[ParameterBox], values: dict[str, Any]
) -> Iterator[HeldTensor]:
    """The tensors of a state under ``<section>/<name of the parameter>/<name>``; its plain values go to ``values``.

    Raises:
        CheckpointError: for a tensor that is neither of the shape of its parameter, nor a number for each of its rows,
            nor the same on all ranks.
    """
    for box in boxes:
        plain: dict[str, Any] = {}
        of_param = state.get(box.parameter, {})
        _require_names(f"{section}/{box.name}", of_param)
        for entry, value in sorted(of_param.items()):
            key = f"{section}/{box.name}/{entry}"
            if not isinstance(value, Tensor):
                plain[entry] = value
            elif value.shape == box.parameter.shape:
                yield box.held(key, value)
            elif value.dim() == box.parameter.dim() > 1 and value.shape == _by_row(box.parameter):
                yield box.held_by_row(key, value)
            elif value.dim() == 0 or not box.logical.layout.shard_axes:
                yield HeldTensor.whole(key, value.detach(), writes=box.writes_scalars)
            else:
                raise CheckpointError(
                    f"{key} has shape {tuple(value.shape)}, its parameter on this rank {tuple(box.parameter.shape)}, a "
                    f"shard of {box.logical.shape}: what it is of the whole is not known. State of a split parameter "
                    f"must have its shape, a number for each row ([rows, 1]), or none"
                )
        if plain and box.writes_scalars:
            tensors: dict[str, Tensor] = {}
            values[f"{section}/{box.name}"] = encode(plain, f"{section}/{box.name}", tensors)
            for key, tensor in tensors.items():
                if tensor.dim() and box.logical.layout.shard_axes:
                    raise CheckpointError(
                        f"{key} is a tensor of shape {tuple(tensor.shape)} in a nest, kept for a parameter of which "
                        f"this rank holds a shard: whether it is one, too, is not known. Keep state of a split "
                        f"parameter as tensors of its shape by name, not in lists or dicts"
                    )
                yield HeldTensor.whole(key, tensor, writes=True)


def _require_names(owner: str, of_param: Mapping[Any, Any]) -> None:
    wrong = [name for name in of_param if not isinstance(name, str) or "/" in name]
    if wrong:
        raise CheckpointError(
            f"{owner}: state is kept under {wrong[0]!r}; a checkpoint needs names: strings without a slash"
        )


def require_state_fits(
    sections: Iterable[str], reader: CheckpointReader, boxes: Sequence[ParameterBox], world: AxisGroup
) -> None:
    """That this rank's boxes of the parameters say what their boxes of the state are. Collective.

    Raises:
        CheckpointError: on all ranks, for a tensor that is neither of the shape of its parameter, nor a number for each
            of its rows, nor without dims, where a rank has a part of the parameter.
    """
    problem = None
    entries = {section: _entries(section, reader) for section in sections}
    for section, box in product(entries, boxes):
        for entry in entries[section].get(box.name, ()):
            key = f"{section}/{box.name}/{entry}"
            shape = reader.manifest.tensors[key].shape
            if shape not in ((), box.logical.shape, box.shape_by_row) and box.logical.layout.shard_axes:
                problem = problem or (
                    f"{reader.folder}: {key} has shape {shape}, its parameter {box.logical.shape}, of which a rank "
                    f"holds a part here: what is of that part is not known. Load it under a plan that keeps this "
                    f"parameter whole, or begin a run with the weights alone (checkpoint.weights)"
                )
    found = next((each for each in all_gather_object(problem, world) if each is not None), None)
    if found is not None:
        raise CheckpointError(found)


def _entries(section: str, reader: CheckpointReader) -> dict[str, list[str]]:
    """Of each parameter by name, what is saved of its state in tensors."""
    entries: dict[str, list[str]] = {}
    for name in reader.manifest.names(section):
        owner, _, entry = name.rpartition("/")
        entries.setdefault(owner, []).append(entry)
    return entries


def read_state(
    sections: Sequence[str],
    reader: CheckpointReader,
    boxes: Sequence[ParameterBox],
    existing: Mapping[Any, Mapping[str, Any]] | None = None,
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of this rank's parameters, as `held_of_state` had it under whatever plan.

    What had the dtype of its parameter has it again, also where that is another now; what had a dtype of its own keeps
    it. Entries that the checkpoint does not have are as if the parameter had never been updated.

    Args:
        sections: those of several replicas become one: floating tensors of the shape of their parameter are averaged,
            over the replicas that have them; all else (numbers of updates) is of the first that has it.
        existing: what is kept now: memory that fits is filled, and no other is taken.

    """
    entries = {section: _entries(section, reader) for section in sections}
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for box in boxes:
        of_param = state.setdefault(box.parameter, {})
        for entry in dict.fromkeys(entry for each in entries.values() for entry in each.get(box.name, ())):
            keys = [f"{each}/{box.name}/{entry}" for each in sections if entry in entries[each].get(box.name, ())]
            saved = reader.manifest.tensors[keys[0]]
            is_by_row = saved.shape == box.shape_by_row != box.logical.shape and bool(box.logical.layout.shard_axes)
            if saved.shape != box.logical.shape and not is_by_row:
                of_param[entry] = reader.tensor(keys[0])
                continue
            if entry not in of_param:
                kept = (existing or {}).get(box.parameter, {}).get(entry)
                shape = _by_row(box.parameter) if is_by_row else box.parameter.shape
                saved_parameter = reader.manifest.tensors[f"model/{box.name}"].dtype
                of_param[entry] = _buffer(kept, box, shape, saved.dtype, saved_parameter)
            held = (box.held_by_row if is_by_row else box.held)(keys[0], of_param[entry])
            if len(keys) == 1 or not held.local.is_floating_point():
                reader.read_into(held)
            else:
                _read_mean(keys, reader, held)
        for section in reversed(sections):
            plain = reader.manifest.values.get(f"{section}/{box.name}")
            if plain is not None:
                of_param.update(decode(plain, reader.tensor))
    return {param: of_param for param, of_param in state.items() if of_param}


def _read_mean(keys: Sequence[str], reader: CheckpointReader, into: HeldTensor) -> None:
    """Fill a box with the mean of several tensors. Memory: two more boxes."""
    wide = torch.float32 if into.local.dtype in LOW else into.local.dtype
    total, other = torch.zeros_like(into.local, dtype=wide), torch.empty_like(into.local, dtype=wide)
    for key in keys:
        reader.read_into(replace(into, key=key, local=other))
        total += other
    into.local.copy_(total / len(keys))


def _by_row(parameter: Tensor) -> torch.Size:
    """The shape of a number for each row."""
    return torch.Size((*parameter.shape[:1], *(1 for _ in parameter.shape[1:])))


def _buffer(kept: Any, box: ParameterBox, shape: torch.Size, saved: str, saved_parameter: str) -> Tensor:
    """Memory for state of a rank's parameter."""
    dtype = box.parameter.dtype if saved == saved_parameter else DTYPES[saved]
    if isinstance(kept, Tensor) and kept.shape == shape and kept.dtype == dtype:
        return kept
    return torch.zeros(shape, dtype=dtype, device=box.parameter.device)
