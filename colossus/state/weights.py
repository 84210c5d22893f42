"""Parameters and buffers of a model out of a checkpoint: all of them, or those that fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.matching import ModelTensor, Shape, WeightMatch, match_exactly
from colossus.checkpoint.reader import CheckpointReader
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.state.boxes import ParameterBox, buffers_of
from colossus.state.buffers import read_buffer


def known_weights(model: nn.Module, boxes: Sequence[ParameterBox], context: ParallelContext) -> dict[str, ModelTensor]:
    """The parameters and buffers of the whole model, by first name. Collective."""
    mine = {box.name: ModelTensor(tuple(box.logical.shape), (box.name, *box.aliases)) for box in boxes}
    mine |= {name: ModelTensor(entry.shape, tuple(entry.names)) for name, entry in buffers_of(model).items()}
    known: dict[str, ModelTensor] = {}
    for of_rank in all_gather_object(mine, context.group(context.grid.names)):
        for name, entry in of_rank.items():
            names = dict.fromkeys((*known.get(name, entry).names, *entry.names))
            known[name] = ModelTensor(entry.shape, tuple(names))
    return known


def saved_weights(reader: CheckpointReader) -> dict[str, Shape]:
    """Shapes of the parameters and buffers of a checkpoint, by the names under which the values are."""
    return reader.manifest.shapes("model")


#: options that change what a model computes of the same weights
_OF_FUNCTION = (
    "num_heads", "num_kv_heads", "head_dim", "mlp", "norm", "norm_eps", "positions", "rotary_base", "rotary_scaling",
    "pool", "image_size", "patch_size",
)  # fmt: skip


def other_functions(saved: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> list[str]:
    """What makes a model compute something else than the one whose weights it takes, although all shapes fit.

    Args:
        saved, here: section ``model`` of both configs, with all options.

    Returns:
        ``mlp = 'gelu_tanh' there, 'gelu' here``, ..
    """
    if not saved or not here:
        return []
    return [
        f"{key} = {saved[key]!r} there, {here[key]!r} here"
        for key in _OF_FUNCTION
        if key in saved and key in here and saved[key] != here[key]
    ]


def require_same_model(reader: CheckpointReader, known: Mapping[str, ModelTensor]) -> WeightMatch:
    """That the checkpoint has the parameters and buffers of the model, and no others.

    Raises:
        CheckpointError: with the names.
    """
    match = match_exactly(known, saved_weights(reader))
    if not match.is_complete:
        raise CheckpointError(f"{reader.folder} is of another model: {match}")
    return match


def load_matched(
    reader: CheckpointReader,
    match: WeightMatch,
    model: nn.Module,
    boxes: Sequence[ParameterBox],
    rank: int | None,
    prefix: str = "",
) -> None:
    """Fill this rank's boxes of what is matched. What has more rows here than were saved keeps the values of those;
    of what has fewer, the first ones are read.

    Args:
        rank: under the plan that the checkpoint was saved with, whose own buffers are read; else None.
        prefix: before the keys; one that is not there is read without.
    """
    for box in boxes:
        if box.name in match.sources:
            key = f"model/{match.sources[box.name]}"
            key = prefix + key if prefix + key in reader.manifest.tensors else key
            held = _saved_rows(box.held(key), reader.manifest.tensors[key].shape)
            reader.read_box(key, held.box, held.local)
    for name, entry in buffers_of(model).items():
        if name in match.sources:
            assert isinstance(entry.held, Tensor)
            source = match.sources[name]
            key = f"model/{source}"
            key = prefix + key if prefix + key in reader.manifest.tensors else key
            held = _saved_rows(HeldTensor.whole(key, entry.held.detach()), reader.manifest.tensors[key].shape)
            read_buffer(reader, source, held, rank)


def _saved_rows(held: HeldTensor, saved: Shape) -> HeldTensor:
    """The part of a rank's box that lies in the rows which were saved, maybe nothing."""
    if saved == held.shape:
        return held
    (start, stop), *others = held.box
    stop = max(start, min(stop, saved[0]))
    return HeldTensor(held.key, saved, ((start, stop), *others), held.local[: stop - start])
