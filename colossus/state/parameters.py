"""Parameters and buffers in a checkpoint: what this rank has of them, which of it it writes, and how they are read."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import ModelTensor, Shape, WeightMatch, match_exactly
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_box import Entry, TensorBox, choose_writers, entries_of
from colossus.checkpoint.tensor_file import host_bytes
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.layout.layout import Box
from colossus.layout.parameter import LogicalParameter


@dataclass(frozen=True)
class ParameterBox:
    """A logical parameter and the rank's box of it: one of several where the rank holds it in ranges of rows.

    Attributes:
        name: full logical name, the first of a tied one.
        aliases: its other names on this rank.
        logical: where it lives.
        box: (start, stop) of every dim of the full shape; may be empty.
        writes: whether this rank writes it, and what else has its shape (its momentum).
        writes_scalars: whether it writes what is the same on all ranks (the number of its updates).
    """

    name: str
    aliases: tuple[str, ...]
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
        """Full shape of what has a number for each row of dim 0: [rows, 1, ..]."""
        return (*self.logical.shape[:1], *(1 for _ in self.logical.shape[1:]))

    def tensor_box(self, key: str, buffer: Tensor | None = None) -> TensorBox:
        """Of the parameter, or of a buffer of the shape of the torch parameter that holds it, or [its rows, 1, ..]:
        ranks with other columns have the same of that."""
        shape, box, writes = self.logical.shape, self.box, self.writes
        if buffer is not None and buffer.shape != self.parameter.shape:
            shape = self.shape_by_row
            writes = writes and all(start == 0 for start, _ in box[1:])
            box = (box[0], *((0, 1) for _ in box[1:]))
        return TensorBox.of_chunk(key, shape, box, self.logical.local(buffer), writes=writes)


def parameter_boxes(
    model: nn.Module, context: ParallelContext, counted_elsewhere: Iterable[nn.Parameter], *, replicas_differ: bool
) -> list[ParameterBox]:
    """The boxes of all parameters as the rank stores them, in the order of the model. No communication.

    Args:
        counted_elsewhere: tied parameters, as stored, that an earlier pipeline stage holds and writes.
        replicas_differ: each data rank has parameters of its own, and writes all of them.
    """
    sizes, at = context.grid.sizes, context.coordinates
    apart = ("pipeline", *(context.grid.axes("data") if replicas_differ else ()))
    elsewhere = {id(param) for param in counted_elsewhere}
    named = [
        (name, tuple(entry.names)[1:], entry.held)
        for name, entry in entries_of(model).items()
        if isinstance(entry.held, LogicalParameter)
    ]
    # the largest first, so that the small ones even out what ranks have
    by_size = sorted(named, key=lambda each: -math.prod(each[2].shape))
    held = [(logical.layout, logical.shape, logical.parameter.element_size()) for _, _, logical in by_size]
    writers = choose_writers(held, sizes, at, apart)
    writes = {name: is_writer for (name, _, _), is_writer in zip(by_size, writers, strict=True)}
    is_first = all(index == 0 for axis, index in at.items() if axis not in apart)
    boxes = []
    for name, aliases, logical in named:
        is_here = id(logical.parameter) not in elsewhere
        whole = logical.layout.box(logical.shape, sizes, at)
        for number, (part, box) in enumerate(_ranges(logical, whole)):
            writes_scalars = is_first and is_here and number == 0
            boxes.append(ParameterBox(name, aliases, part, box, writes[name] and is_here, writes_scalars))
    return boxes


def _ranges(logical: LogicalParameter, box: Box) -> Iterator[tuple[LogicalParameter, Box]]:
    """What a rank holds of a parameter, whose layout says ``box``: maybe several ranges of its rows."""
    if logical.intervals is None:
        yield logical, box
        return
    at = 0
    for start, stop in logical.intervals or [(0, 0)]:
        yield replace(logical, rows=(at, at + stop - start)), ((start, stop), *box[1:])
        at += stop - start


# -- buffers ----------------------------------------------------------------------------------------------


def buffers_of(model: nn.Module) -> dict[str, Entry]:
    """The persistent buffers of this rank, by first name."""
    return {name: entry for name, entry in entries_of(model).items() if isinstance(entry.held, Tensor)}


def buffer_checksums(buffers: Mapping[str, Entry]) -> dict[str, int]:
    """Of what this rank holds, by first name."""
    return {name: zlib.crc32(host_bytes(entry.held)) for name, entry in buffers.items()}  # type: ignore[arg-type]


def buffer_boxes(
    buffers: Mapping[str, Entry],
    rank: int,
    checksums: Sequence[Mapping[str, int]],
    means: Mapping[int, Tensor],
) -> Iterator[TensorBox]:
    """The buffers as the first rank has them, or their mean over replicas; beside them those of ranks that have others
    (BatchNorm's statistics of a rank's own samples).

    Args:
        checksums: of all ranks.
        means: over replicas, by id of the buffer.
    """
    for name, entry in buffers.items():
        buffer, mean = entry.held, means.get(id(entry.held))
        assert isinstance(buffer, Tensor)
        first = next(each for each, theirs in enumerate(checksums) if name in theirs)
        if rank == first:
            yield TensorBox.whole(f"model/{name}", buffer if mean is None else mean)
        if mean is not None or checksums[rank][name] != checksums[first][name]:
            yield TensorBox.whole(_own_key(rank, name), buffer)


def _own_key(rank: int, name: str) -> str:
    return f"ranks/{rank}/buffers/{name}"


# -- reading ----------------------------------------------------------------------------------------------


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


def require_same_model(reader: CheckpointReader, known: Mapping[str, ModelTensor]) -> WeightMatch:
    """That the checkpoint has the parameters and buffers of the model, and no others.

    Raises:
        CheckpointError: with the names.
    """
    match = match_exactly(known, reader.manifest.shapes("model"))
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
    tensors = reader.manifest.tensors

    def read(box: TensorBox, own_key: str) -> None:
        key = own_key if own_key in tensors else box.key
        box = _saved_rows(box, tensors[key].shape)
        reader.read_box(key, box.box, box.local)

    for box in boxes:
        if box.name in match.sources:
            key = f"model/{match.sources[box.name]}"
            read(box.tensor_box(key), prefix + key)
    for name, entry in buffers_of(model).items():
        if name in match.sources:
            assert isinstance(entry.held, Tensor)
            source = match.sources[name]
            read(TensorBox.whole(f"model/{source}", entry.held), "" if rank is None else _own_key(rank, source))


def _saved_rows(box: TensorBox, saved: Shape) -> TensorBox:
    """The part of a rank's box that lies in the rows which were saved, maybe nothing."""
    if saved == box.shape:
        return box
    (start, stop), *others = box.box
    stop = max(start, min(stop, saved[0]))
    return TensorBox(box.key, saved, ((start, stop), *others), box.local[: stop - start])
