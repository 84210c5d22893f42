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
    one = torch.tensor([addend(True, signum), *[0.0] * (ranks - 1)], dtype=dtype)
    every = torch.full((ranks,), addend(True, signum), dtype=dtype)
    mixed = torch.tensor([addend(True, signum), *[addend(True, None)] * (ranks - 1)], dtype=dtype)
    for requests in (one, every, mixed):
        assert signal_of(requests.sum().item()) == signum


def test_a_request_without_a_signal_names_none() -> None:
    assert addend(False, None) == 0.0 == addend(False, signal.SIGTERM)
    assert signal_of(0.0) is None
    assert addend(True, None) > 0
    assert signal_of(4097 * addend(True, None)) is None
    assert signal_of(addend(True, signal.SIGWINCH)) is None


def test_of_two_signals_one_is_told_on_all_ranks() -> None:
    total = 3 * addend(True, signal.SIGINT) + 2 * addend(True, signal.SIGTERM)
    assert signal_of(total) == signal.SIGTERM
