"""Random streams: functions of the position and of what they are for, not of the order of calls."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from colossus.context.rng_streams import RngStreams
from colossus.random import GLOBAL_RNG, GlobalRng, hash_key

positions = st.tuples(st.integers(0, 1000), st.integers(0, 64))
keys = st.lists(st.one_of(st.integers(-5, 5), st.text("ab/=", max_size=3)), max_size=3)


@given(st.integers(0, 2**40), positions, keys)
def test_a_draw_depends_on_its_key_alone(seed: int, position: tuple[int, int], parts: list[object]) -> None:
    first, second = RngStreams(seed), RngStreams(seed)
    second.move_to(7, 3)  # another history
    second.next_call("x")
    first.move_to(*position)
    second.move_to(*position)
    assert first.key("dropout", *parts) == second.key("dropout", *parts)


def test_every_part_of_the_key_matters() -> None:
    seen = {}
    grid = itertools.product((0, 1), ("dropout", "data"), ((), ("a",), ("b",), ("a", "b"), ("ab",)))
    for seed, stream, parts in grid:
        seen[RngStreams(seed).key(stream, *parts)] = True
    assert len(seen) == 2 * 2 * 5


def test_hash_is_pinned() -> None:
    """Another hash would make old runs resume with other numbers."""
    assert hash_key(0, "init", "weight") == 5377686943302770139


# -- calls ----------------------------------------------------------------------------------------------------


def test_replay_repeats_and_puts_back() -> None:
    rng = RngStreams(1)
    rng.move_to(4, 2)
    rng.next_call("a")
    at = rng.snapshot()
    first = [rng.next_call("a"), rng.next_call("a")]
    assert first == [1, 2]
    rng.move_to(9, 0)
    assert (rng.next_call("a"), rng.next_call("b")) == (0, 0)  # counted by name and position
    later = rng.snapshot()
    with rng.replay(at):
        assert [rng.next_call("a"), rng.next_call("a")] == first
    assert rng.snapshot() == later
    with pytest.raises(RuntimeError), rng.replay(at):
        raise RuntimeError
    assert rng.snapshot() == later


class Noise(torch.nn.Module):
    def __init__(self, rng: RngStreams) -> None:
        super().__init__()
        self.rng = rng
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.rng.next_call("noise"))
        generator = torch.Generator().manual_seed(self.rng.key("noise", self.seen[-1]))
        return x * torch.rand(3, generator=generator)


def test_several_uses_under_torchs_own_checkpoint_are_an_error() -> None:
    noise = Noise(RngStreams())
    x = torch.ones(3, requires_grad=True)
    y = torch_checkpoint(noise, x, use_reentrant=False)
    y.sum().backward()
    assert noise.seen == [0, 0]  # a single use is repeated
    assert torch.equal(x.grad, y.detach())
    noise = Noise(RngStreams())
    with noise.rng.replay(noise.rng.snapshot()):
        pass  # a replay that is over does not count as one
    y = torch_checkpoint(lambda x: noise(noise(x)).square(), x, use_reentrant=False)
    with pytest.raises(ValueError, match=r"noise draws random numbers 2 times .* use colossus\.layers\.recompute"):
        y.sum().backward()


def _drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.rand())


def test_global_generators_are_seeded_and_put_back() -> None:
    with GLOBAL_RNG.preserved(5):
        expected = _drawn()
    state = GLOBAL_RNG.get_state()
    following = _drawn()
    GLOBAL_RNG.set_state(state)
    RngStreams().key("init")  # which draws from none of them

    @GLOBAL_RNG.preserved(5)
    def fails() -> None:
        assert _drawn() == expected
        raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert _drawn() == following


def test_only_torchs_generator_where_asked() -> None:
    with GLOBAL_RNG.preserved(3):
        first = _drawn()
    with GLOBAL_RNG.preserved(3), GlobalRng(torch_only=True).preserved(4):
        other = _drawn()
    assert other[0] != first[0]
    assert other[1:] == first[1:]
