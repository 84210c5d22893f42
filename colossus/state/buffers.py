"""Persistent buffers: the same on all ranks, or (running statistics of a rank's own samples) each rank's own."""

from __future__ import annotations

import zlib
from collections.abc import Container, Iterator, Mapping, Sequence

from torch import Tensor, nn

from colossus.checkpoint.entries import Entry
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import host_bytes
from colossus.state.of_ranks import own_path


def own_key(rank: int, name: str) -> str:
    """Of a buffer of a rank that differs from the first rank's."""
    return own_path(rank, f"buffers/{name}")


def checksums(buffers: Mapping[str, Entry]) -> dict[str, int]:
    """Of what this rank holds, by first name."""
    return {name: zlib.crc32(host_bytes(entry.held)) for name, entry in buffers.items()}  # type: ignore[arg-type]


def held_buffers(
    buffers: Mapping[str, Entry],
    rank: int,
    of_ranks: Sequence[Mapping[str, int]],
    means: Mapping[int, Tensor],
    prefix: str,
) -> Iterator[HeldTensor]:
    """The buffers under their names as the first rank has them; those of ranks that differ under names of their own.

    Args:
        of_ranks: checksums.
        means: over replicas, by id of the buffer.
        prefix: before the names of these; none: they take the place of the first rank's.
    """
    for name, entry in buffers.items():
        first = next(each for each, theirs in enumerate(of_ranks) if name in theirs)
        mean = means.get(id(entry.held))
        if rank == first and mean is not None:
            yield HeldTensor.whole(f"{prefix}model/{name}", mean)
        if rank == first and (mean is None or prefix):
            yield HeldTensor.whole(f"model/{name}", entry.held)  # type: ignore[arg-type]
        if mean is not None or of_ranks[rank][name] != of_ranks[first][name]:
            yield HeldTensor.whole(own_key(rank, name), entry.held)  # type: ignore[arg-type]


def persistent_names(model: nn.Module) -> set[str]:
    """Of this rank, under all names."""
    kept = model.state_dict(keep_vars=True)
    return {name for name, _ in model.named_buffers(remove_duplicate=False) if name in kept}


def require_no_late_buffers(model: nn.Module, made: Container[str]) -> None:
    """That all buffers were there when the engine was made: a model that begins anew has no place for others.

    Raises:
        CheckpointError: with the names of the others.
    """
    late = sorted(name for name in persistent_names(model) if name not in made)
    if late:
        raise CheckpointError(
            f"buffers that the model did not have when the engine was made: {', '.join(late)}. A fresh model could not "
            f"take them from a checkpoint: give them a tensor of their shape in __init__, or register them with "
            f"persistent=False"
        )


def read_buffer(reader: CheckpointReader, name: str, buffer: HeldTensor, rank: int | None) -> None:
    """Fill a buffer, under the plan it was saved with (``rank`` is not None) by what the rank itself had."""
    own = own_key(rank, name) if rank is not None else ""
    key = own if own in reader.manifest.tensors else buffer.key
    reader.read_box(key, buffer.box, buffer.local)
