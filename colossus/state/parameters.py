"""Parameters and buffers in a checkpoint: the boxes that a rank has, which of them it writes, and how it reads them."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import ModelTensor, WeightMatch, match_exactly
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.state_dict import whole_tensors
from colossus.checkpoint.tensor_box import Entry, TensorBox, choose_writers, entries_of
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Box
from colossus.layout.parameter import LogicalParameter

log = logging.getLogger("colossus.engine")


@dataclass(frozen=True)
class ParameterBox:
    """A logical parameter and the rank's box of it. A rank that stores several ranges of its rows has one for each.

    Attributes:
        name: full logical name, the first of a tied one.
        logical: the logical parameter, with its place in the stored one.
        box: (start, stop) of every dim of the full shape; may be empty.
        writes: whether this rank writes the box, and state of its shape (its momentum).
        writes_scalars: whether this rank writes state that is the same on all ranks (the number of its updates).
    """

    name: str
    logical: LogicalParameter
    box: Box
    writes: bool
    writes_scalars: bool

    @property
    def parameter(self) -> nn.Parameter:
        return self.logical.parameter

    @property
    def is_split(self) -> bool:
        return bool(self.logical.layout.shard_axes)

    @property
    def shape_by_row(self) -> tuple[int, ...]:
        """Full shape of a tensor with one number for each row of dim 0: [rows, 1, ..]."""
        return (*self.logical.shape[:1], *(1 for _ in self.logical.shape[1:]))

    def tensor_box(self, key: str, buffer: Tensor | None = None) -> TensorBox:
        """Return the box of the parameter, or of a buffer.

        Args:
            key: key in the checkpoint.
            buffer: a buffer of the stored parameter's shape, or [its rows, 1, ..], which ranks with other columns have
                alike.
        """
        shape, box, writes = self.logical.shape, self.box, self.writes
        if buffer is not None and buffer.shape != self.parameter.shape:
            shape = self.shape_by_row
            writes = writes and all(start == 0 for start, _ in box[1:])
            box = (box[0], *((0, 1) for _ in box[1:]))
        return TensorBox.of_chunk(key, shape, box, self.logical.local(buffer), writes=writes)


def parameter_boxes(
    model: nn.Module, context: ParallelContext, counted_elsewhere: Iterable[nn.Parameter], *, replicas_differ: bool
) -> list[ParameterBox]:
    """Return the boxes of all parameters as the rank stores them, in the order of the model.

    Args:
        model: the rank's part of the model.
        context: the rank's context.
        counted_elsewhere: tied parameters, as stored, that an earlier pipeline stage has and writes.
        replicas_differ: whether each data rank has parameters of its own, and writes all of them.
    """
    sizes, coordinates = context.grid.sizes, context.coordinates
    apart = ("pipeline", *(context.grid.axes("data") if replicas_differ else ()))
    elsewhere = {id(param) for param in counted_elsewhere}
    entries = {name: entry.value for name, entry in entries_of(model).items()}
    named = {name: value for name, value in entries.items() if isinstance(value, LogicalParameter)}
    # the largest first, so that the small ones even out what ranks write
    by_size = sorted(named, key=lambda name: -math.prod(named[name].shape))
    sized = [(named[name].layout, named[name].shape, named[name].parameter.element_size()) for name in by_size]
    writes = dict(zip(by_size, choose_writers(sized, sizes, coordinates, apart), strict=True))
    is_first = all(index == 0 for axis, index in coordinates.items() if axis not in apart)
    boxes = []
    for name, logical in named.items():
        is_here = id(logical.parameter) not in elsewhere
        whole = logical.layout.box(logical.shape, sizes, coordinates)
        for number, (part, box) in enumerate(_ranges(logical, whole)):
            writes_scalars = is_first and is_here and number == 0
            boxes.append(ParameterBox(name, part, box, writes[name] and is_here, writes_scalars))
    return boxes


def _ranges(logical: LogicalParameter, box: Box) -> Iterator[tuple[LogicalParameter, Box]]:
    """Yield the ranges of rows that a rank stores of a parameter, each with its box.

    Args:
        logical: a logical parameter.
        box: the box that its layout gives this rank.
    """
    if logical.intervals is None:
        yield logical, box
        return
    coordinates = 0
    for start, stop in logical.intervals or [(0, 0)]:
        yield replace(logical, rows=(coordinates, coordinates + stop - start)), ((start, stop), *box[1:])
        coordinates += stop - start


# -- buffers ----------------------------------------------------------------------------------------------


def buffers_of(model: nn.Module) -> dict[str, Entry]:
    """Return the persistent buffers of this rank, by first name."""
    return {name: entry for name, entry in entries_of(model).items() if isinstance(entry.value, Tensor)}


def buffer_boxes(
    buffers: Mapping[str, Entry],
    rank: int,
    checksums: Sequence[Mapping[str, int]],
    means: Mapping[int, Tensor],
) -> Iterator[TensorBox]:
    """Yield the buffers that this rank writes.

    The first rank that has a buffer writes it, or its mean over replicas. A rank whose buffer differs (BatchNorm's
    statistics of its own samples) writes its own beside it.

    Args:
        buffers: the rank's buffers by name.
        rank: this rank.
        checksums: checksums by name of the buffer, for each rank.
        means: means over replicas, by id of the buffer.
    """
    for name, entry in buffers.items():
        buffer, mean = entry.value, means.get(id(entry.value))
        assert isinstance(buffer, Tensor)
        first = next(other for other, sums in enumerate(checksums) if name in sums)
        if rank == first:
            yield TensorBox.whole(f"model/{name}", buffer if mean is None else mean)
        if mean is not None or checksums[rank][name] != checksums[first][name]:
            yield TensorBox.whole(_own_key(rank, name), buffer)


def warn_of_own_buffers(checksums: Sequence[Mapping[str, int]]) -> None:
    """Log which buffers differ between the ranks that have them, by the checksums of all ranks."""
    names = dict.fromkeys(name for sums in checksums for name in sums)
    own = [name for name in names if len({sums[name] for sums in checksums if name in sums}) > 1]
    if own:
        log.warning(
            "buffers differ between ranks (%s): something else than the forwards of steps and evaluations has changed "
            "them. The checkpoint stores those of each rank, for the same plan, and those of the first rank, for "
            "other plans and exports",
            ", ".join(own),
        )


def _own_key(rank: int, name: str) -> str:
    return f"ranks/{rank}/buffers/{name}"


# -- reading ----------------------------------------------------------------------------------------------


def model_weights(model: nn.Module, context: ParallelContext) -> dict[str, ModelTensor]:
    """Return the shapes and names of the parameters and buffers of the whole model, by first name. Collective."""
    tensors = whole_tensors(model, context)
    return {name: ModelTensor(tensor.shape, tuple(tensor.names)) for name, tensor in tensors.items()}


def require_same_model(reader: CheckpointReader, weights: Mapping[str, ModelTensor]) -> WeightMatch:
    """Raise `CheckpointError` unless the checkpoint has the parameters and buffers of the model and no others."""
    match = match_exactly(weights, reader.manifest.shapes("model"))
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
    """Fill this rank's boxes of the matched parameters and buffers.

    A parameter with more rows than were saved keeps its values in the others; one with fewer reads the first rows.

    Args:
        reader: reader of the checkpoint.
        match: the match of saved tensors to names.
        model: the rank's part of the model.
        boxes: the rank's boxes of parameters.
        rank: the rank whose own buffers are read, under the plan of the checkpoint; None under another plan.
        prefix: prefix of the keys; a key that does not exist with it is read without.
    """
    tensors = reader.manifest.tensors

    def read(box: TensorBox, own_key: str) -> None:
        key = own_key if own_key in tensors else box.key
        if tensors[key].shape == box.shape:
            reader.read_box(key, box.box, box.local)
        else:  # the rows that were saved, maybe none
            (start, stop), *others = box.box
            stop = max(start, min(stop, tensors[key].shape[0]))
            reader.read_box(key, ((start, stop), *others), box.local[: stop - start])

    for box in boxes:
        if box.name in match.sources:
            key = f"model/{match.sources[box.name]}"
            read(box.tensor_box(key), prefix + key)
    for name, entry in buffers_of(model).items():
        if name in match.sources:
            assert isinstance(entry.value, Tensor)
            source = match.sources[name]
            read(TensorBox.whole(f"model/{source}", entry.value), "" if rank is None else _own_key(rank, source))
