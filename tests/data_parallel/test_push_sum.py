"""x and w of push-sum by themselves."""

from __future__ import annotations

import pytest
import torch

from colossus.data_parallel.gossip.push_sum import PushSum


@pytest.mark.parametrize("weight", [1 / 3, 0.012, 1.7])
def test_no_update_adds_nothing(weight: float) -> None:
    """In float32 z times w is not x; the difference that is added to x is of z, and exactly 0."""
    param = torch.linspace(-1, 1, 997) / 3
    held = PushSum([param])
    held.mix(weight, [])
    assert held.x is not None
    before = held.x.clone()
    for _ in range(5):
        held.take_update()
        held.debias()
    assert torch.equal(held.x, before)


def test_an_update_is_added_to_x() -> None:
    param = torch.linspace(-1, 1, 7, dtype=torch.float64)
    held = PushSum([param])
    held.mix(0.25, [])
    param += 3.0
    held.take_update()
    (x,) = held.vector.views(held.x)
    torch.testing.assert_close(x, torch.linspace(-1, 1, 7, dtype=torch.float64) * 0.25 + 3.0, rtol=0, atol=1e-14)
