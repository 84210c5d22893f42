"""Shared memory of the ranks of a host, one of which runs, on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch import Tensor

from colossus.comm import shared_memory
from colossus.comm.channel import Channel, Consume
from colossus.comm.pending import Pending
from colossus.comm.tensor_transport import Fill
from colossus.context.groups import AxisGroup
from colossus.planner.fake_tensors import CountedFakeTensors


class FakeChannel(Channel):
    """A channel whose other ranks are there at once. Its slots are not counted, and what it copies is not observed.

    The slots are no memory of one rank, and the copies are a part of the collective.

    Args:
        group: the ranks.
        fake: counts bytes.
    """

    def __init__(self, group: AxisGroup, fake: CountedFakeTensors) -> None:
        slot = fake.uncounted(shared_memory.SLOT_BYTES)
        super().__init__(group, [[slot, slot]] * group.size, {})
        self._fake = fake

    def start(self, shape: torch.Size, dtype: torch.dtype, fill: Fill, consume: Consume) -> Pending:
        with self._fake.unobserved():
            pending = super().start(shape, dtype, fill, consume)

        def wait() -> Tensor:
            with self._fake.unobserved():
                return pending.wait()

        return Pending(wait)


@contextmanager
def fake_channels(fake: CountedFakeTensors) -> Iterator[None]:
    """Let collectives of CPU tensors go through a `FakeChannel` inside the context, as between ranks of one host."""
    with patch.object(shared_memory, "_open_channel", lambda group: FakeChannel(group, fake)):
        yield
