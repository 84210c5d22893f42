"""Parameters and buffers in a checkpoint: the buffers that a rank writes, and what it reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import Tensor, nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import WeightMatch, match_exactly
from colossus.checkpoint.part import Part
from colossus.checkpoint.reader import CheckpointReader

log = logging.getLogger("colossus.engine")


# -- buffers ----------------------------------------------------------------------------------------------


def saved_buffers(
    buffers: Sequence[Part],
    rank: int,
    checksums: Sequence[Mapping[str, int]],
    means: Mapping[int, Tensor],
) -> Iterator[Part]:
    """Yield the buffers that this rank writes.

    The first rank that has a buffer writes it, or its mean over replicas. A rank whose buffer differs (BatchNorm's
    statistics of its own samples) writes its own beside it.

    Args:
        buffers: the rank's buffers.
        rank: this rank.
        checksums: checksums by name of the buffer, for each rank.
        means: means over replicas, by id of the buffer.
    """
    for part in buffers:
        mean = means.get(id(part.memory))
        first = next(other for other, sums in enumerate(checksums) if part.key in sums)
        if rank == first:
            yield Part.whole(f"model/{part.key}", part.memory if mean is None else mean, names=part.names)
        if mean is not None or checksums[rank][part.key] != checksums[first][part.key]:
            yield Part.whole(_own_key(rank, part.key), part.memory)


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


def _own_key(rank: int | None, name: str) -> str:
    return f"ranks/{rank}/buffers/{name}"


# -- reading ----------------------------------------------------------------------------------------------


def require_same_model(reader: CheckpointReader, weights: Mapping[str, Part]) -> WeightMatch:
    """Raise `CheckpointError` unless the checkpoint has the parameters and buffers of the model and no others.

    Args:
        reader: reader of the checkpoint.
        weights: those of the whole model (`whole_tensors`).
    """
    match = match_exactly({name: part.shape for name, part in weights.items()}, reader.manifest.shapes("model"))
    if not match.is_complete:
        raise CheckpointError(f"{reader.folder} is of another model: {match}")
    return match


def load_matched(
    reader: CheckpointReader,
    match: WeightMatch,
    parts: Iterable[Part],
    rank: int | None,
    prefix: str = "",
) -> None:
    """Fill this rank's parts of the matched parameters and buffers.

    A parameter with more rows than were saved keeps its values in the others; one with fewer reads the first rows.

    Args:
        reader: reader of the checkpoint.
        match: the match of saved tensors to names.
        parts: the rank's parts of parameters and buffers.
        rank: the rank whose own buffers are read, under the plan of the checkpoint; None under another plan.
        prefix: prefix of the keys; a key that does not exist with it is read without.
    """
    tensors = reader.manifest.tensors
    for part in parts:
        if part.key not in match.sources:
            continue
        source = match.sources[part.key]
        own = f"{prefix}model/{source}" if isinstance(part.memory, nn.Parameter) else _own_key(rank, source)
        key = own if own in tensors else f"model/{source}"
        if tensors[key].shape == part.shape:
            reader.read_box(key, part.box, part.local)
        else:  # the rows that were saved, maybe none
            (start, stop), *others = part.box
            stop = max(start, min(stop, tensors[key].shape[0]))
            reader.read_box(key, ((start, stop), *others), part.local[: stop - start])
