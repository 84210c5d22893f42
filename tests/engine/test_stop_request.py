"""Requests to stop as they are summed: the total says that there is one, and which signal was the reason."""

from __future__ import annotations

import signal

import pytest
import torch

from colossus.engine.results import addend, signal_of
from colossus.launch.stop import STOP_SIGNALS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4097])
@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_the_signal_of_one_rank_is_known_to_all(signum: signal.Signals, ranks: int, dtype: torch.dtype) -> None:
    one = torch.tensor([addend(signum), *[0.0] * (ranks - 1)], dtype=dtype)
    every = torch.full((ranks,), addend(signum), dtype=dtype)
    mixed = torch.tensor([addend(signum), *[addend(None)] * (ranks - 1)], dtype=dtype)
    for requests in (one, every, mixed):
        assert signal_of(requests.sum().item()) == signum
