"""Messages round a ring: the ranks of a group in the order of their indices, the first following the last.

`exchange` is for ranks any number of steps apart, and is what all-gathers are built from. `rotate` hands tensors on to
the next rank, again and again; it keeps its links, through shared memory where it can.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.comm.links import Links
from colossus.context.groups import AxisGroup

_links: weakref.WeakKeyDictionary[AxisGroup, Links] = weakref.WeakKeyDictionary()


def exchange(group: AxisGroup, *messages: tuple[int, Tensor, Tensor]) -> list[dist.Work]:
    """Start to send and receive through c10d; wait for every work that is returned.

    Args:
        messages: (step, outgoing, incoming): ``outgoing`` goes to the rank ``step`` further on in the ring, while
            ``incoming``, of the same shape, is filled by the rank as far behind. Steps may be negative.
    """
    ranks, n, me = group.ranks, group.size, group.index
    operations = []
    for step, outgoing, incoming in messages:
        operations.append(dist.P2POp(dist.isend, outgoing, ranks[(me + step) % n], group.process_group))
        operations.append(dist.P2POp(dist.irecv, incoming, ranks[(me - step) % n], group.process_group))
    return dist.batch_isend_irecv(operations)


def rotate(tensors: list[Tensor], group: AxisGroup, description: str) -> Callable[[], list[Tensor]]:
    """Start to send tensors to the next rank of the ring, and to receive as many of the same shapes from the last one.

    Returns:
        A function that waits for both, and returns what was received.
    """
    links = _links_of(group, tensors[0].device)
    following, preceding = (group.index + 1) % group.size, (group.index - 1) % group.size
    if links.has_batches:
        return links.exchange(following, preceding, tensors, description)
    if group.index % 2:  # two sends that face each other would wait for ever, where nothing holds a message
        incoming = links.receive(preceding, tensors, description)
        sent = links.send(following, tensors, description)
    else:
        sent = links.send(following, tensors, description)
        incoming = links.receive(preceding, tensors, description)

    def wait() -> list[Tensor]:
        received = incoming.wait()
        sent()
        return received

    return wait


def _links_of(group: AxisGroup, device: torch.device) -> Links:
    """The links round this group. All of its ranks make them, at the first call."""
    if group not in _links:
        pairs = [(index, (index + 1) % group.size) for index in range(group.size)]
        # of a copy: links that refer to the group itself would keep their own entry alive
        _links[group] = links = Links(dataclasses.replace(group), pairs, device)
        weakref.finalize(group, links.close)
    return _links[group]
