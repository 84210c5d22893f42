"""A ring of ranks, in which tensors are handed on from each to the next."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from colossus.comm.links import Links
from colossus.context.groups import AxisGroup

_links: weakref.WeakKeyDictionary[AxisGroup, Links] = weakref.WeakKeyDictionary()


class Ring:
    """This rank's place in a ring, and what goes round it."""

    def __init__(self, group: AxisGroup, device: torch.device) -> None:
        self.size, self.index = group.size, group.index
        self._links = _links_of(group, device) if group.size > 1 else None

    def blocks(self, k: Tensor, v: Tensor, documents: Tensor | None) -> Iterator[tuple[int, list[Tensor]]]:
        """Keys, values (and documents) of every rank, the own first, with the index of the rank they belong to.

        The next are on their way while the caller works with these.
        """
        here = [k, v] if documents is None else [k, v, documents]
        for step in range(self.size):
            coming = self.exchange(here, "keys and values") if step < self.size - 1 else None
            yield (self.index - step) % self.size, here
            if coming is not None:
                here = coming()

    def exchange(self, tensors: list[Tensor], what: str) -> Callable[[], list[Tensor]]:
        """Start sending to the next rank and receiving the same from the one before. The function returned waits."""
        links = self._links
        assert links is not None
        after, before = (self.index + 1) % self.size, (self.index - 1) % self.size
        if self.index % 2:  # with NCCL messages between two ranks run one after the other: not both send first
            incoming = links.receive(before, tensors, what)
            sent = links.send(after, tensors, what)
        else:
            sent = links.send(after, tensors, what)
            incoming = links.receive(before, tensors, what)

        def wait() -> list[Tensor]:
            received = incoming.wait()
            sent()
            return received

        return wait


def _links_of(group: AxisGroup, device: torch.device) -> Links:
    """The links round this group. All of its ranks make them, at the first call."""
    if group not in _links:
        pairs = [(index, (index + 1) % group.size) for index in range(group.size)]
        # of a twin: links that held the group itself would keep their own entry alive
        _links[group] = links = Links(dataclasses.replace(group), pairs, device)
        weakref.finalize(group, links.close)
    return _links[group]
