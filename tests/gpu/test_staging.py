"""Ranks that share the device under gloo: what they exchange goes through the host, in the right order of events.

Where a test lets the device sleep, a copy that did not wait for it, or memory that was reused before it was read, gives
other numbers. On the CPU nothing is staged, and the values alone are checked.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from helpers.device_ranks import DeviceRanks
from helpers.staged_bodies import BODIES, ORDERED, WORLD, run_body


@pytest.fixture(scope="module")
def sharing(device: torch.device) -> Iterator[DeviceRanks]:
    """Yield ranks that share the first device, however many there are."""
    ranks = DeviceRanks(device, num_devices=0)
    yield ranks
    ranks.close()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "c10d"])
@pytest.mark.parametrize("name", BODIES)
def test_values(sharing: DeviceRanks, name: str, shared: bool) -> None:
    sharing.run(WORLD, run_body, BODIES[name], shared)


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "c10d"])
@pytest.mark.parametrize("name", ORDERED)
def test_order(cuda: torch.device, sharing: DeviceRanks, name: str, shared: bool) -> None:
    sharing.run(WORLD, run_body, ORDERED[name], shared)
