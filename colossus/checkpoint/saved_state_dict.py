"""The plain ``torch.nn`` module's state dict out of a checkpoint folder: no processes, no engine, any plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import matches, nearest_names
from colossus.checkpoint.natural_order import natural_order
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.sources import find_weights, open_weights


def read_state_dict(path: Path | str, *, only: Sequence[str] | None = None, verify: bool = True) -> dict[str, Tensor]:
    """Whole parameters and buffers by full logical name, as ``torch.nn.Module.load_state_dict(.., strict=True)`` takes
    them: tied ones under each of their names, one tensor.

        model.load_state_dict(read_state_dict("runs/first"))

    Args:
        path: a checkpoint, a folder of them (the latest is read) or a run folder; or a model folder of Hugging Face,
            whose tensors are given by our names.
        only: patterns (`fnmatch`) of names; None is all.
        verify: compare the checksums of all files first.

    Returns:
        Tensors on the host, of full shape and of the dtype in which they were stored.

    Raises:
        CheckpointError: when there is no whole checkpoint, or a pattern meets nothing.
    """
    return dict(stream_saved_state_dict(path, only=only, verify=verify))


def stream_saved_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, verify: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """What `read_state_dict` gives, one after the other: no more than one whole parameter is held.

    What is wrong is raised at the call, before the first is read.

    Yields:
        (name, tensor); the names of a tied parameter follow each other, with the same tensor.
    """
    reader = open_weights(find_weights(path))
    aliases: dict[str, list[str]] = {}
    for alias, name in reader.manifest.aliases.items():
        aliases.setdefault(name, []).append(alias)
    names = [*reader.manifest.names("model"), *reader.manifest.aliases]
    for pattern in only or ():
        if not any(matches(name, (pattern,)) for name in names):
            raise CheckpointError(f"{reader.folder}: {pattern!r} meets no name{nearest_names(pattern, names)}")
    if verify:
        reader.verify()
    return _read(reader, aliases, only)


def _read(
    reader: CheckpointReader, aliases: dict[str, list[str]], only: Sequence[str] | None
) -> Iterator[tuple[str, Tensor]]:
    with reader:
        for first in sorted(reader.manifest.names("model"), key=natural_order):
            wanted = [name for name in (first, *aliases.get(first, ())) if only is None or matches(name, only)]
            if wanted:
                whole = reader.tensor(f"model/{first}")
                for name in wanted:
                    yield name, whole
                del whole
