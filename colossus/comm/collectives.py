"""Collectives over an `AxisGroup`, which are started and then waited for. No autograd here (see `conjugate`).

Each is checked, counted and logged here, and runs on the `TensorTransport` of its tensor and group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from colossus.arithmetic import either, nearest_multiples
from colossus.comm import accounting, host_staging, log
from colossus.comm.autograd import is_recorded
from colossus.comm.flat_buffer import split_as
from colossus.comm.pending import Pending
from colossus.comm.shared_memory import channel_for
from colossus.comm.step_regions import collective, timed
from colossus.comm.tensor_transport import Alone, Functional, Gloo, TensorTransport
from colossus.comm.tree_sum import tree_sum
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error

_BROADCAST_BYTES = 8 << 20


def transport_of(x: Tensor, group: AxisGroup, nbytes: float | None = None) -> TensorTransport:
    """Return the way of a tensor between the ranks of a group, which must all call alike.

    CPU tensors between processes of one host go through shared memory, several times faster than gloo, and others
    through c10d. Under gloo, tensors of an accelerator go through the host.

    Args:
        x: the tensor.
        group: the ranks.
        nbytes: the most bytes that a rank gives; None: those of ``x``.
    """
    if group.size == 1:
        return Alone(group)
    if host_staging.is_needed(x, group):
        return host_staging.ThroughHost(group, lambda copy: transport_of(copy, group, nbytes))
    if is_recorded():
        return Functional(group)
    if (channel := channel_for(x, group, nbytes)) is not None:
        return channel
    return Gloo(group) if x.device.type == "cpu" and not group.is_fake else TensorTransport(group)


@timed(collective("all_reduce"), starts=True)
def all_reduce(x: Tensor, group: AxisGroup, *, op: str = "sum", owned: bool = False, what: str = "") -> Pending:
    """Start to sum ``x`` over the group, or to take its maximum; every rank gets the result.

    Args:
        x: any shape, the same on all ranks.
        group: the ranks that take part.
        op: ``sum`` or ``max``.
        owned: the caller gives ``x`` away; it may be overwritten with the result.
        what: a label; the bytes are counted under ``all_reduce <what>``.
    """
    if group.sums_in_tree and op == "sum" and x.is_floating_point():
        return all_gather(x.unsqueeze(0), group, what=what).then(lambda terms: tree_sum(terms.unbind()))
    entry = record("all_reduce", x, group, what=what)
    return transport_of(x, group).all_reduce(x, op, owned and x.is_contiguous()).logged(entry)


@timed(collective("all_gather"), starts=True)
def all_gather(x: Tensor, group: AxisGroup, dim: int = 0, *, what: str = "") -> Pending:
    """Start to concatenate the tensors of the group along ``dim``: [.., s, ..] per rank -> [.., n s, ..].

    Args:
        x: a tensor of the same shape on all ranks.
        group: the n ranks that take part.
        dim: the dim that grows.
        what: a label; the bytes are counted under ``all_gather <what>``.
    """
    rows = x.unsqueeze(0) if x.dim() == 0 else x
    dim = _dim(rows, dim)
    entry = record("all_gather", x, group, what=what)
    return transport_of(rows, group).all_gather(rows, dim).logged(entry)


@timed(collective("reduce_scatter"), starts=True)
def reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Start to sum over the group; each rank gets its shard along ``dim``: [.., n s, ..] -> [.., s, ..].

    Raises:
        ValueError: the size of ``dim`` does not divide by that of the group.
    """
    dim = _dim(x, dim)
    _chunk_size(x, dim, group)
    entry = record("reduce_scatter", x, group)
    return transport_of(x, group).reduce_scatter(x, dim).logged(entry)


@timed(collective("all_to_all"), starts=True)
def all_to_all(x: Tensor, group: AxisGroup, split_dim: int, concat_dim: int) -> Pending:
    """Start to change which dim is sharded: send chunks along ``split_dim``, concatenate along ``concat_dim``.

    Raises:
        ValueError: the size of ``split_dim`` does not divide by that of the group.
    """
    split_dim, concat_dim = _dim(x, split_dim), _dim(x, concat_dim)
    _chunk_size(x, split_dim, group)
    entry = record("all_to_all", x, group)
    return transport_of(x, group).all_to_all(x, split_dim, concat_dim).logged(entry)


@timed(collective("broadcast"))
def broadcast(x: Tensor, group: AxisGroup, source: int) -> Tensor:
    """Overwrite ``x`` on every rank with that of the rank at index ``source`` of the group.

    Args:
        x: contiguous, of the same shape and dtype on all ranks.
    """
    entry = record("broadcast", x, group)
    # it is too rare for the memory of slots
    return transport_of(x, group, float("inf")).broadcast(x, source).logged(entry).wait()


def broadcast_all(tensors: Sequence[Tensor], group: AxisGroup, source: int) -> None:
    """Overwrite tensors as `broadcast` does: those of a dtype travel together, a few megabytes at once."""
    for bucket in torch._utils._take_tensors(tensors, _BROADCAST_BYTES) if group.size > 1 else ():
        whole = broadcast(torch.cat([x.reshape(-1) for x in bucket]), group, source)
        for x, part in zip(bucket, split_as(whole, bucket), strict=True):
            x.copy_(part)


def barrier(group: AxisGroup, device: torch.device) -> None:
    """Let the host wait until those of all ranks of the group have come here, and their devices, too."""
    if group.size > 1:
        all_reduce(torch.zeros(1, device=device), group, owned=True).wait().item()


def own_chunk(x: Tensor, group: AxisGroup, dim: int) -> Tensor:
    """Return this rank's chunk along ``dim``, a view; no communication."""
    if group.size == 1:
        return x
    size = _chunk_size(x, dim, group)
    return x.narrow(dim, group.index * size, size)


def _chunk_size(x: Tensor, dim: int, group: AxisGroup) -> int:
    """Return the size of each rank's chunk along ``dim``, which must divide by the size of the group."""
    size, rest = divmod(x.shape[_dim(x, dim)], group.size)
    if rest:
        dim = _dim(x, dim)
        raise located_error(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} has {x.shape[dim]} elements, which do not divide over "
            f"the {group.size} ranks of axis {group}. Pad it or choose sizes so that it has "
            f"{either(nearest_multiples(x.shape[dim], group.size))}; of an activation, dim 0 is the samples, the last "
            f"the features, and the one before the last the tokens"
        )
    return size


def record(
    operation: str, x: Tensor, group: AxisGroup, *, what: str = "", sent: float | None = None
) -> log.Entry | None:
    """Log and count a collective of ``x`` under ``<operation> <what>``; compiled code and lone ranks do neither.

    Args:
        sent: bytes that this rank sends; by default, those of a collective whose chunks are equal.
    """
    if group.size == 1 or torch.compiler.is_compiling():
        return None
    axes, name = str(group), f"{operation} {what}" if what else operation
    for counter in accounting.listeners:
        counter.add(name, axes, x.dtype, accounting.sent(operation, group.size, x.nbytes) if sent is None else sent)
    return log.record(name, axes, tuple(x.shape), x.dtype)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise located_error(f"a tensor of shape {tuple(x.shape)} has no dim {dim}")
    return dim % x.dim()
