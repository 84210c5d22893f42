"""What an optimizer keeps in the shape of its parameters, as bytes of a message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

_ALIGNMENT = 64
#: of each parameter, by name
Entries = Sequence[Mapping[str, Tensor]]


def entries_of(optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> list[dict[str, Tensor]]:
    """The floating tensors of each parameter's shape, sorted by name; none before its first update."""
    return [
        {
            name: value
            for name, value in sorted(optimizer.state.get(param, {}).items())
            # a count is a scalar, as some parameters are
            if name != "step"
            and isinstance(value, Tensor)
            and value.shape == param.shape
            and (value.is_floating_point() or value.is_complex())
        }
        for param in params
    ]


def num_bytes(entries: Entries) -> int:
    """Of what `pack` fills."""
    return _aligned(8 * len(entries)) + sum(map(_size, entries))


def most_bytes(params: Sequence[Tensor]) -> int:
    """What no optimizer's state is above: eight tensors of the widest numbers."""
    return sum(8 * (16 * param.numel() + _ALIGNMENT) for param in params) + _aligned(8 * len(params))


def pack(entries: Entries, into: Tensor) -> None:
    """Copy them to ``into``, uint8 [`num_bytes`] on the host: how many bytes each parameter's take, then these."""
    sizes = [_size(of_param) for of_param in entries]
    into[: 8 * len(sizes)].view(torch.int64).copy_(torch.tensor(sizes, dtype=torch.int64))
    for view, value in zip(_views(into, entries), _values(entries), strict=True):
        view.copy_(value)


def unpack(raw: Tensor, entries: Entries) -> list[dict[str, Tensor]]:
    """Views of what `pack` has written on another rank, named and shaped as this rank's ``entries``.

    Empty for the parameters of which one of the two has no state.
    """
    sizes = raw[: 8 * len(entries)].view(torch.int64).tolist()
    start, found = _aligned(8 * len(entries)), []
    for size, of_param in zip(sizes, entries, strict=True):
        is_ours = size == _size(of_param)
        found.append(dict(zip(of_param, _cut(raw, start, of_param.values()), strict=True)) if is_ours else {})
        start += size
    return found


@torch.no_grad()
def mix(entries: Entries, kept: float, others: Sequence[tuple[float, Tensor]]) -> None:
    """Each becomes the mean of itself and of what others have packed, by weights: what is positive stays so.

    Who has no state of a parameter yet, since its first update was skipped, gives none, and takes none.

    Args:
        kept: the weight of what there is.
        others: (weight, bytes of `pack`).
    """
    unpacked = [(weight, unpack(raw, entries)) for weight, raw in others]
    for number, of_param in enumerate(entries):
        came = [(weight, each[number]) for weight, each in unpacked if each[number]]
        total = kept + sum(weight for weight, _ in came)
        for name, value in of_param.items() if came else ():
            value.mul_(kept / total)
            for weight, theirs in came:
                value.add_(theirs[name].to(value.device), alpha=weight / total)


def _views(raw: Tensor, entries: Entries) -> Iterator[Tensor]:
    return _cut(raw, _aligned(8 * len(entries)), _values(entries))


def _cut(raw: Tensor, start: int, like: Iterable[Tensor]) -> Iterator[Tensor]:
    for value in like:
        yield raw[start : start + value.nbytes].view(value.dtype).view(value.shape)
        start += _aligned(value.nbytes)


def _values(entries: Entries) -> Iterator[Tensor]:
    return (value for of_param in entries for value in of_param.values())


def _size(of_param: Mapping[str, Tensor]) -> int:
    return sum(_aligned(value.nbytes) for value in of_param.values())


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
