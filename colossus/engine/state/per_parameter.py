"""State that is kept for each parameter, an optimizer's above all, as boxes of whole tensors by logical name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import decode, encode
from colossus.engine.state.boxes import ParameterBox

#: stored parameter -> name -> tensor of its shape, another tensor that is the same on all ranks, or a plain value
ParameterState = Mapping[nn.Parameter, Mapping[str, Any]]


def held_of_state(
    section: str, state: ParameterState, boxes: Iterable[ParameterBox], values: dict[str, Any]
) -> Iterator[HeldTensor]:
    """The tensors of a state under ``<section>/<name of the parameter>/<name>``; its plain values go to ``values``.

    Raises:
        CheckpointError: for a tensor that is neither of the shape of its parameter nor the same on all ranks.
    """
    for box in boxes:
        plain: dict[str, Any] = {}
        for entry, value in sorted(state.get(box.parameter, {}).items()):
            key = f"{section}/{box.name}/{entry}"
            if not isinstance(value, Tensor):
                plain[entry] = value
            elif value.shape == box.parameter.shape:
                yield box.held(key, value)
            elif value.dim() == 0 or not box.logical.layout.shard_axes:
                yield HeldTensor.whole(key, value.detach(), writes=box.writes_scalars)
            else:
                raise CheckpointError(
                    f"{key} has shape {tuple(value.shape)}, its parameter on this rank {tuple(box.parameter.shape)}, a "
                    f"shard of {box.logical.shape}: what it is of the whole is not known. State of a split parameter "
                    f"must have its shape, or none"
                )
        if plain and box.writes_scalars:
            tensors: dict[str, Tensor] = {}
            values[f"{section}/{box.name}"] = encode(plain, f"{section}/{box.name}", tensors)
            for key, tensor in tensors.items():
                yield HeldTensor.whole(key, tensor, writes=True)


def read_state(
    section: str, reader: CheckpointReader, boxes: Sequence[ParameterBox]
) -> dict[nn.Parameter, dict[str, Any]]:
    """The state of this rank's parameters, as `held_of_state` had it under whatever plan."""
    entries: dict[str, list[str]] = {}
    for name in reader.manifest.names(section):
        owner, _, entry = name.rpartition("/")
        entries.setdefault(owner, []).append(entry)
    state: dict[nn.Parameter, dict[str, Any]] = {}
    for box in boxes:
        of_param = state.setdefault(box.parameter, {})
        for entry in entries.get(box.name, ()):
            key = f"{section}/{box.name}/{entry}"
            saved = reader.manifest.tensors[key]
            if saved.shape != box.logical.shape:
                of_param[entry] = reader.tensor(key)
                continue
            if entry not in of_param:
                of_param[entry] = torch.zeros_like(box.parameter, dtype=DTYPES[saved.dtype], requires_grad=False)
            reader.read_into(box.held(key, of_param[entry]))
        plain = reader.manifest.values.get(f"{section}/{box.name}")
        if plain is not None:
            of_param.update(decode(plain, reader.tensor))
    return {param: of_param for param, of_param in state.items() if of_param}
