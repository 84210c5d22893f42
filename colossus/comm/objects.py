"""Small pickled objects between the ranks of a group: sent once rather than in every step, and not counted."""

from __future__ import annotations

import pickle
import warnings
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.context.groups import AxisGroup, is_fake

T = TypeVar("T")


def all_gather_object(value: T, group: AxisGroup) -> list[T]:
    """The values of all ranks of the group, in group order, on each of them. Fake ranks have this one's value."""
    out = [value] * group.size
    if group.process_group is not None and not is_fake(group.process_group):
        dist.all_gather_object(out, value, group=group.process_group)
    return out


def broadcast_object(value: T, group: AxisGroup, source: int) -> T:
    """The value of the rank at index ``source`` of the group; what the others pass is not looked at. Fake ranks have
    this one's value."""
    out = [value]
    if group.process_group is not None and not is_fake(group.process_group):
        dist.broadcast_object_list(out, src=group.ranks[source], group=group.process_group)
    return out[0]


def gather_object(value: T, group: AxisGroup) -> list[T] | None:
    """The values of all ranks, in group order, on the first rank of the group; None on the others."""
    if group.process_group is None or is_fake(group.process_group):
        return [value] * group.size
    out: list[Any] | None = [None] * group.size if group.index == 0 else None
    dist.gather_object(value, out, dst=group.ranks[0], group=group.process_group)
    return out


def to_bytes(value: Any) -> Tensor:
    """The pickled object, uint8 ``[number of bytes]``."""
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)


def from_bytes(data: Tensor) -> Any:
    """The object of `to_bytes`. Only for what a rank of this run has sent: unpickling runs code."""
    return unpickled(bytes(data.cpu().numpy()))


def unpickled(data: bytes) -> Any:
    """The object that a rank of this run has pickled."""
    with warnings.catch_warnings():  # torch's own LeafSpec warns of itself when it is unpickled
        warnings.simplefilter("ignore", FutureWarning)
        return pickle.loads(data)
