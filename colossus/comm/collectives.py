"""Collectives over an `AxisGroup`, which are started and then waited for. No autograd here (see `conjugate`).

A collective runs in one of three ways. CPU tensors between processes of one host go through shared memory, several
times faster than gloo. Other tensors go through c10d, in place where the caller owns the tensor. While something
traces or records tensor operations, torch's functional ops run out of place: otherwise selective activation
checkpointing would cache a value that is overwritten later, and gradients would be silently wrong. Under gloo, tensors
of an accelerator are copied to the host first (`host_staging`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from colossus import torch_versions
from colossus.arithmetic import either, nearest_multiples
from colossus.comm import accounting, host_staging, log
from colossus.comm.autograd import is_recorded
from colossus.comm.pending import Pending, Ready
from colossus.comm.shared_memory import channel_for
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error

_functional = torch.ops._c10d_functional
#: from this size of the whole tensor on, gloo gathers and scatters by messages, which is at least twice as fast
_MESSAGES_BYTES = 1 << 20
_BROADCAST_BYTES = 8 << 20


def all_reduce(x: Tensor, group: AxisGroup, *, op: str = "sum", owned: bool = False, what: str = "") -> Pending:
    """Start to sum ``x`` over the group, or to take its maximum; every rank gets the result.

    Args:
        x: any shape, the same on all ranks.
        group: the ranks that take part.
        op: ``sum`` or ``max``.
        owned: the caller gives ``x`` away; it may be overwritten with the result.
        what: a label; the bytes are counted under ``all_reduce <what>``.
    """
    n = group.size
    if n == 1:
        return Ready(x)
    keep = owned and x.is_contiguous()
    if host_staging.is_needed(x, group):
        again = partial(all_reduce, group=group, op=op, owned=True, what=what)
        return host_staging.through_host(x, again, into=x if keep else None)
    entry = record("all_reduce", x, group, what=what)
    if is_recorded():
        out = _functional.all_reduce(x, op, group.name)
        return Pending(lambda: _functional.wait_tensor(out), entry)
    channel = channel_for(x, group)
    if channel is not None:
        into = x if keep else None
        return Pending(channel.start(x, lambda tensors: _combine(tensors, op, into)), entry)
    if not keep:
        x = x.clone(memory_format=torch.contiguous_format)
    reduce_op = dist.ReduceOp.SUM if op == "sum" else dist.ReduceOp.MAX
    work = dist.all_reduce(x, reduce_op, group=group.process_group, async_op=True)
    return work_pending([work], x, entry)


def all_gather(x: Tensor, group: AxisGroup, dim: int = 0, *, what: str = "") -> Pending:
    """Start to concatenate the tensors of the group along ``dim``: [.., s, ..] per rank -> [.., n s, ..].

    Args:
        x: a tensor of the same shape on all ranks.
        group: the n ranks that take part.
        dim: the dim that grows.
        what: a label; the bytes are counted under ``all_gather <what>``.
    """
    n = group.size
    if n == 1:
        return Ready(x)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(all_gather, group=group, dim=dim, what=what))
    flat = x.unsqueeze(0) if x.dim() == 0 else x
    dim = _dim(flat, dim)
    entry = record("all_gather", x, group, what=what)
    channel = None if is_recorded() else channel_for(flat, group)
    if channel is not None:
        return Pending(channel.start(flat, lambda shards: torch.cat(shards, dim)), entry)
    flat = flat.contiguous()
    if is_recorded():
        out = _functional.all_gather_into_tensor(flat, n, group.name)
        return Pending(lambda: _unstack(_functional.wait_tensor(out), n, dim), entry)
    gathered = flat.new_empty((n * flat.shape[0], *flat.shape[1:]))
    if x.device.type == "cpu" and gathered.nbytes >= _MESSAGES_BYTES:
        works = send_to_all(flat, gathered.split(len(flat)), group)
    else:
        works = [torch_versions.all_gather_single(gathered, flat, group=group.process_group, async_op=True)]
    return work_pending(works, gathered, entry, lambda out: _unstack(out, n, dim), reads=flat)


def reduce_scatter(x: Tensor, group: AxisGroup, dim: int = 0) -> Pending:
    """Start to sum over the group; each rank gets its shard along ``dim``: [.., n s, ..] -> [.., s, ..].

    Raises:
        ValueError: the size of ``dim`` does not divide by that of the group.
    """
    n = group.size
    if n == 1:
        return Ready(x)
    size = _chunk_size(x, dim, group)
    if host_staging.is_needed(x, group):
        return host_staging.through_host(x, partial(reduce_scatter, group=group, dim=dim))
    entry = record("reduce_scatter", x, group)
    channel = None if is_recorded() else channel_for(x, group)
    if channel is not None:
        at = dim, group.index * size, size
        return Pending(channel.start(x, lambda tensors: _combine([x.narrow(*at) for x in tensors], "sum", None)), entry)
    stacked = _stack_chunks(x, n, dim, group)
    if is_recorded():
        out = _functional.reduce_scatter_tensor(stacked.flatten(0, 1), "sum", n, group.name)
        return Pending(lambda: _functional.wait_tensor(out), entry)
    if x.device.type == "cpu" and stacked.nbytes >= _MESSAGES_BYTES:
        received = torch.empty_like(stacked)
        work = dist.all_to_all_single(
            received.flatten(0, 1), stacked.flatten(0, 1), group=group.process_group, async_op=True
        )
        return work_pending([work], received, entry, lambda addends: addends.sum(0), reads=stacked)
    own = x.new_empty(stacked.shape[1:])
    work = torch_versions.reduce_scatter_single(own, stacked.flatten(0, 1), group=group.process_group, async_op=True)
    return work_pending([work], own, entry, reads=stacked)


def all_to_all(x: Tensor, group: AxisGroup, split_dim: int, concat_dim: int) -> Pending:
    """Start to change which dim is sharded: send chunks along ``split_dim``, concatenate along ``concat_dim``.

    Raises:
        ValueError: the size of ``split_dim`` does not divide by that of the group.
    """
    n = group.size
    if n == 1:
        return Ready(x)
    concat_dim = _dim(x, concat_dim)
    size = _chunk_size(x, split_dim, group)
    if host_staging.is_needed(x, group):
        again = partial(all_to_all, group=group, split_dim=split_dim, concat_dim=concat_dim)
        return host_staging.through_host(x, again)
    entry = record("all_to_all", x, group)
    channel = None if is_recorded() else channel_for(x, group)
    if channel is not None:
        at = split_dim, group.index * size, size
        return Pending(channel.start(x, lambda tensors: torch.cat([x.narrow(*at) for x in tensors], concat_dim)), entry)
    flat = _stack_chunks(x, n, split_dim, group).flatten(0, 1)
    if is_recorded():
        splits = [flat.shape[0] // n] * n
        out = _functional.all_to_all_single(flat, splits, splits, group.name)
        return Pending(lambda: _unstack(_functional.wait_tensor(out), n, concat_dim), entry)
    received = torch.empty_like(flat)
    work = dist.all_to_all_single(received, flat, group=group.process_group, async_op=True)
    return work_pending([work], received, entry, lambda out: _unstack(out, n, concat_dim), reads=flat)


def broadcast(x: Tensor, group: AxisGroup, source: int) -> Tensor:
    """Overwrite ``x`` on every rank with that of the rank at index ``source`` of the group.

    Args:
        x: contiguous, of the same shape and dtype on all ranks.
    """
    if group.size > 1:
        if host_staging.is_needed(x, group):
            return host_staging.to_device(broadcast(host_staging.to_host(x), group, source), x.device, x)
        entry = record("broadcast", x, group)
        dist.broadcast(x, group.ranks[source], group=group.process_group)
        if entry is not None:
            entry.done = True
    return x


def broadcast_all(tensors: Sequence[Tensor], group: AxisGroup, source: int) -> None:
    """Overwrite tensors as `broadcast` does: those of a dtype travel together, a few megabytes at once."""
    for bucket in torch._utils._take_tensors(tensors, _BROADCAST_BYTES) if group.size > 1 else ():
        whole = broadcast(torch.cat([x.reshape(-1) for x in bucket]), group, source)
        for x, part in zip(bucket, whole.split([x.numel() for x in bucket]), strict=True):
            x.copy_(part.view_as(x))


def barrier(group: AxisGroup, device: torch.device) -> None:
    """Let the host wait until those of all ranks of the group have come here, and their devices, too."""
    if group.size > 1:
        all_reduce(torch.zeros(1, device=device), group, owned=True).wait().item()


def send_to_all(x: Tensor, parts: Sequence[Tensor], group: AxisGroup) -> list[dist.Work]:
    """Start an all-gather by messages: every rank sends ``x`` to every other one.

    Args:
        x: this rank's tensor; its length may differ between ranks.
        parts: the memory for the tensors of all ranks, in group order; this rank's own is copied.
    """
    n, me = group.size, group.index
    parts[me].copy_(x)
    messages = []
    for step in range(1, n):
        to, source = (me + step) % n, (me - step) % n
        if x.numel():
            messages.append(dist.P2POp(dist.isend, x, group.ranks[to], group.process_group))
        if parts[source].numel():
            messages.append(dist.P2POp(dist.irecv, parts[source], group.ranks[source], group.process_group))
    return dist.batch_isend_irecv(messages) if messages else []


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


def _combine(tensors: list[Tensor], op: str, into: Tensor | None) -> Tensor:
    """Return the sum or maximum of the ranks' tensors, in rank order on every rank, so that all get the same bits."""
    combine = torch.add if op == "sum" else torch.maximum
    total = combine(tensors[0], tensors[1]) if into is None else combine(tensors[0], tensors[1], out=into)
    for x in tensors[2:]:
        combine(total, x, out=total)
    return total


def record(
    operation: str, x: Tensor, group: AxisGroup, *, what: str = "", sent: float | None = None
) -> log.Entry | None:
    """Log and count a collective of ``x`` under ``<operation> <what>``; compiled code does neither.

    Args:
        sent: bytes that this rank sends; by default, those of a collective whose chunks are equal.
    """
    if torch.compiler.is_compiling():
        return None
    axes, name = str(group), f"{operation} {what}" if what else operation
    for counter in accounting.listeners:
        counter.add(name, axes, x.dtype, accounting.sent(operation, group.size, x.nbytes) if sent is None else sent)
    return log.record(name, axes, tuple(x.shape), x.dtype)


def work_pending(
    works: Sequence[dist.Work],
    out: Tensor,
    entry: log.Entry | None,
    shape: Callable[[Tensor], Tensor] | None = None,
    *,
    reads: Tensor | None = None,
) -> Pending:
    """Return a pending result: ``out``, or ``shape(out)``, once the works of c10d are done.

    ``reads``, the works' input, stays alive until then.
    """

    def finish(reads: Tensor | None = reads) -> Tensor:
        for work in works:
            work.wait()
        if entry is not None:
            entry.done = True
        return out if shape is None else shape(out)

    return Pending(finish, None)


def _stack_chunks(x: Tensor, n: int, dim: int, group: AxisGroup) -> Tensor:
    """Return the chunks along ``dim`` one below the other: [.., n s, ..] -> contiguous [n, .., s, ..]."""
    return x.unflatten(dim, (n, _chunk_size(x, dim, group))).movedim(_dim(x, dim), 0).contiguous()


def _unstack(x: Tensor, n: int, dim: int) -> Tensor:
    """Turn a concatenation of n tensors along dim 0, [n s0, ..], into one along ``dim``."""
    if dim == 0:
        return x
    return x.unflatten(0, (n, x.shape[0] // n)).movedim(0, dim).flatten(dim, dim + 1)


def _dim(x: Tensor, dim: int) -> int:
    if not -x.dim() <= dim < x.dim():
        raise located_error(f"a tensor of shape {tuple(x.shape)} has no dim {dim}")
    return dim % x.dim()
