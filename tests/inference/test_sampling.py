"""The choice of a token against its definition, one probability after the other."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from colossus.inference import Sampling
from colossus.inference.decoding import pick, probabilities

LOGITS = st.lists(st.floats(-8, 8, width=32), min_size=1, max_size=12)
TEMPERATURES = st.floats(0.05, 5.0)


def defined(logits: list[float], sampling: Sampling) -> list[float]:
    """Softmax at a temperature; the k likeliest, and what is as likely as the last; of those, from the likeliest on,
    until the sum reaches p."""
    highest = max(logits)
    scores = [(each - highest) / sampling.temperature for each in logits]
    if sampling.top_k is not None:
        least = sorted(scores, reverse=True)[min(sampling.top_k, len(scores)) - 1]
        scores = [each if each >= least else -math.inf for each in scores]
    weights = [math.exp(each) for each in scores]
    found = [each / math.fsum(weights) for each in weights]
    kept, total = set(), 0.0
    for index in sorted(range(len(found)), key=lambda index: -found[index]):
        if total >= sampling.top_p:
            break
        kept.add(index)
        total += found[index]
    found = [each if index in kept else 0.0 for index, each in enumerate(found)]
    return [each / math.fsum(found) for each in found]


def is_on_the_edge(logits: list[float], sampling: Sampling) -> bool:
    """Whether rounding decides what top-p keeps."""
    ordered = sorted(defined(logits, Sampling(sampling.temperature, sampling.top_k)), reverse=True)
    return any(abs(total - sampling.top_p) < 1e-9 for total in itertools.accumulate(ordered))


@given(LOGITS, TEMPERATURES, st.none() | st.integers(1, 14), st.floats(0.01, 1.0))
def test_probabilities_are_those_of_the_definition(
    logits: list[float], temperature: float, top_k: int | None, top_p: float
) -> None:
    sampling = Sampling(temperature, top_k, top_p)
    if top_p < 1 and is_on_the_edge(logits, sampling):
        return
    found = probabilities(torch.tensor([logits, logits[::-1]]), sampling)
    wanted = torch.tensor(defined(logits, sampling), dtype=torch.float64)
    assert torch.equal(found[0] > 0, wanted > 1e-300)
    assert torch.allclose(found[0], wanted, rtol=1e-9, atol=1e-15)
    assert found.sum(-1).sub(1).abs().max() < 1e-12


@given(LOGITS, TEMPERATURES, st.none() | st.integers(1, 14), st.floats(0.0, 1.0, exclude_max=True))
def test_a_number_cuts_the_distribution(
    logits: list[float], temperature: float, top_k: int | None, number: float
) -> None:
    sampling = Sampling(temperature, top_k)
    heights = list(itertools.accumulate(probabilities(torch.tensor([logits]), sampling)[0].tolist()))
    token = int(pick(torch.tensor([logits]), sampling, torch.tensor([number], dtype=torch.float64)))
    assert probabilities(torch.tensor([logits]), sampling)[0, token] > 0, "a token that was left out"
    below = heights[token - 1] if token else 0.0
    assert below - 1e-12 <= number * heights[-1] <= heights[token] + 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_first_of_the_likeliest(dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 5.0, 5.0, 2.0], [0.0, 0.0, 0.0, 9.0]], dtype=dtype)
    assert pick(logits, Sampling(greedy=True), torch.zeros(2)).tolist() == [1, 3]
    assert pick(logits, Sampling(greedy=True), torch.zeros(2), num_ids=3).tolist() == [1, 0]


def test_ids_that_stand_for_nothing_are_never_taken() -> None:
    logits = torch.tensor([[0.0, 0.0, 50.0]]).expand(50, -1)
    numbers = torch.linspace(0.001, 0.999, 50, dtype=torch.float64)
    assert set(pick(logits, Sampling(), numbers, num_ids=2).tolist()) == {0, 1}
    assert set(pick(logits, Sampling(), numbers).tolist()) == {2}


@pytest.mark.parametrize(
    "options",
    [dict(temperature=0.0), dict(temperature=float("nan")), dict(top_k=0), dict(top_p=1.1), dict(seed=-1)],
    ids=str,
)
def test_what_means_nothing_is_refused(options: dict[str, float]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(ValueError, match=f"{name} = {value}"):
        Sampling(**options)  # type: ignore[arg-type]
