"""`colossus.parallelize` on models of plain torch: what becomes of modules, ties, rules, values; models in a config."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.modes import BATCH, MODES, own
from helpers.ranks import grid, run_ranks
from torch import Tensor, nn

import colossus
from colossus.context.parallel_context import ParallelContext
from colossus.convert.parallelize import conversion_of
from colossus.state.model_state_dict import full_state_dict

VOCAB, HIDDEN = 13, 16


class Words(nn.Module):
    """Tied words, a gated pair, a frozen linear, a batch norm without a bias, a bias that the model holds too, values
    set in the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, HIDDEN, padding_idx=0)
        self.again = nn.Embedding(VOCAB, HIDDEN)
        self.gate, self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.norm, self.frozen = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, HIDDEN).requires_grad_(False)
        self.head, self.tokens = nn.Linear(HIDDEN, VOCAB), nn.BatchNorm1d(4, bias=False)
        nn.init.normal_(self.up.weight, std=0.3)
        with torch.no_grad():
            self.down.weight.mul_(2.0)
        self.again.weight = self.head.weight = self.words.weight
        self.bias = self.head.bias

    def forward(self, ids: Tensor, scale: float = 1.0) -> Tensor:
        x = self.words(ids) + self.again(ids.flip(1)) * scale
        x = x + self.down(F.silu(self.gate(x)) * self.up(x))
        return self.head(self.frozen(self.norm(self.tokens(x))))


RULES = {"gate": "column", "up": "column", "down": "row"}


IDS = torch.arange(BATCH * 4).view(BATCH, 4) * 5 % VOCAB


def body(context: ParallelContext, rules: dict[str, str]) -> dict[str, Any]:
    model = colossus.build(colossus.parallelize(Words, rules), context, dtype=torch.float64)
    unswapped = colossus.build(Words, context, dtype=torch.float64)
    state = {name: value.clone() for name, value in full_state_dict(model, context).items()}
    plain = Words().double()
    plain.load_state_dict(state)
    out, wanted = model({"ids": own(context, IDS), "scale": 0.5}), own(context, plain(IDS, 0.5))
    torch.testing.assert_close(out, wanted, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(value, state[name]) for name, value in unswapped.state_dict().items()), "its first values"
    assert [*state] == [*plain.state_dict()]
    trained = [name for name, param in model.named_parameters() if param.requires_grad]
    assert trained == [name for name, param in plain.named_parameters() if param.requires_grad]
    assert model.words.weight is model.again.weight is model.head.weight
    assert model.bias is model.head.bias
    conversion = conversion_of(model)
    assert conversion is not None
    return {name: swap.became for name, swap in conversion.swaps.items()}


@pytest.mark.rest("2d-alone", "2d-pair")
@pytest.mark.parametrize("rules", [{}, RULES], ids=["alone", "pair"])
@pytest.mark.parametrize("mode", ["1d_sequence", "2d", "3d_2x1x2"])
def test_the_model_computes_what_it_is_written_to(mode: str, rules: dict[str, str]) -> None:
    became = MODES[mode].run(body, rules)[0]
    assert became.pop("gate") == became.pop("up") == ("Linear(column)" if rules else "Linear")
    assert became.pop("down") == ("Linear(row)" if rules else "Linear")
    assert became.pop("tokens") == "BatchNorm1d"
    assert became == {"words": "Embedding", "again": "Embedding", "frozen": "Linear", "head": "LMHead"}


class Odd(nn.Module):
    """What stays as it is: derived classes, a weight that is read, sizes that no rank can split."""

    def __init__(self) -> None:
        super().__init__()
        self.mine = type("Mine", (nn.Linear,), {"forward": lambda self, x: x})(4, 4)
        self.shared, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.shared.weight
        self.scaled = nn.Embedding(6, 4, scale_grad_by_freq=True)
        self.odd = nn.Linear(5, 7)
        self.attention = nn.MultiheadAttention(4, 2)


def odd_body(context: ParallelContext) -> dict[str, Any]:
    model = colossus.build(colossus.parallelize(Odd), context)
    conversion = conversion_of(model)
    assert conversion is not None
    return {name: (swap.became, swap.why) for name, swap in conversion.swaps.items()}


def test_what_stays_says_why() -> None:
    reasons = run_ranks(2, odd_body)[0]
    assert reasons == {
        "mine": ("", "its class has a forward of its own"),
        "attention.out_proj": ("", "nn.MultiheadAttention reads its weight itself"),
        "shared": ("", "its weight is also other.weight"),
        "other": ("", "its weight is also shared.weight"),
        "scaled": ("", "max_norm and scale_grad_by_freq change or weigh rows by the lookups of one rank"),
        "odd": ("Linear", ""),
    }


def refusals(context: ParallelContext, rules: dict[str, str]) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        colossus.build(colossus.parallelize(Words, rules), context)
    return str(caught.value)


@pytest.mark.parametrize(
    ("rules", "words"),
    [
        ({"gates": "column"}, "'gates' matches none of the 5 linears of the model; did you mean 'gate'?"),
        ({"gate": "columns"}, "'columns' is none of 'column', 'row', 'head', 'whole', 'experts', 'torch'"),
        ({"head": "row"}, "shares the weight of an embedding"),
    ],
)
def test_rules_that_cannot_be_followed(rules: dict[str, str], words: str) -> None:
    assert words in run_ranks(2, refusals, rules)[0]


def test_a_pipeline_without_an_example() -> None:
    context = ParallelContext(grid(pipeline=2), connect=False)
    for blocks in (None, "layers"):
        with pytest.raises(ValueError, match=r"^Words: parallel.pipeline = 2 finds the blocks .* needs an example"):
            colossus.build(colossus.parallelize(Words, blocks=blocks), context)
    chain = colossus.build(colossus.parallelize(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh())), context)
    assert isinstance(chain, nn.Sequential)


def test_outside_of_a_build() -> None:
    with pytest.raises(ValueError, match=r"colossus.initialize\(model=...\)"):
        colossus.parallelize(Words)()


def test_a_config_shows_the_name_of_what_is_parallelized() -> None:
    assert colossus.parallelize(Words).__qualname__ == "Words"


class Normed(nn.Module):
    """A linear whose weight is computed, before one that could be the row of its pair."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.weight_norm(nn.Linear(6, 8))
        self.down = nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def normed_body(context: ParallelContext) -> dict[str, Any]:
    model = colossus.build(colossus.parallelize(Normed, example=torch.zeros(2, 6)), context)
    conversion = conversion_of(model)
    assert conversion is not None
    assert model(torch.ones(2, 6)).shape == (2, 6)
    return {name: swap.became for name, swap in conversion.swaps.items()}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_linear_that_stays_is_of_no_pair() -> None:
    assert run_ranks(2, normed_body)[0] == {"up": "", "down": "Linear"}
