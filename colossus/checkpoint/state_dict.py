"""State dicts by logical name and full shape, from a folder."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from torch import Tensor

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import matches, natural_order
from colossus.checkpoint.weight_sources import find_weights, open_weights


def read_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> dict[str, Tensor]:
    """Return whole parameters and buffers from a folder, as ``torch.nn.Module.load_state_dict(.., strict=True)`` needs.

    They are by full logical name, tied ones under each of their names, as one tensor. It needs no processes and no
    engine, whatever plan saved them.

        model.load_state_dict(read_state_dict("runs/first"))

    Args:
        path: a checkpoint, a folder of them (the latest is read) or a run folder; or a model folder of Hugging Face,
            whose tensors are returned under our names.
        only: patterns (`fnmatch`) of names; None is all.
        average: name of an average of the weights, "ema" or "swa", to read in place of the parameters.
        verify: whether to compare the checksums of all files first.

    Returns:
        Tensors on the host, of full shape and of the dtype in which they were stored.

    Raises:
        CheckpointError: if there is no whole checkpoint, or a pattern matches nothing.
    """
    return dict(stream_saved_state_dict(path, only=only, average=average, verify=verify))


def stream_saved_state_dict(
    path: Path | str, *, only: Sequence[str] | None = None, average: str | None = None, verify: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `read_state_dict` one after the other, with no more than one whole parameter in memory.

    Errors are raised at the call, before the first is read.

    Yields:
        (name, tensor); the names of a tied parameter follow each other, with the same tensor.
    """
    reader = open_weights(find_weights(path), average)
    names: dict[str, list[str]] = {name: [name] for name in sorted(reader.manifest.names("model"), key=natural_order)}
    for alias, name in reader.manifest.aliases.items():
        names[name].append(alias)
    if only is not None:
        for pattern in only:
            if not any(matches(name, (pattern,)) for aliases in names.values() for name in aliases):
                raise CheckpointError(f"{reader.folder}: {pattern!r} matches no name")
        names = {first: [name for name in aliases if matches(name, only)] for first, aliases in names.items()}
    if verify:
        reader.verify()

    def read() -> Iterator[tuple[str, Tensor]]:
        with reader:
            for first, wanted in names.items():
                whole = reader.tensor(f"model/{first}") if wanted else None
                yield from ((name, whole) for name in wanted if whole is not None)
                del whole

    return read()
