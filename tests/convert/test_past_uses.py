"""Modules whose weight a forward uses past them, and those that the rule ``"torch"`` names, stay torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.user_models.cases import TOKENS, WIDTH, classify, tokens
from helpers.user_models.table import fill, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn

import colossus
from colossus.context.parallel_context import ParallelContext
from colossus.convert.parallelize import conversion_of

EXAMPLE = torch.ones(2, TOKENS, dtype=torch.long)


class Tied(nn.Module):
    """Logits by the rows of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.up, self.down = nn.Embedding(12, WIDTH), nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x + self.down(torch.tanh(self.up(x)))
        return F.linear(x, self.words.weight, self.bias)


class Fused(Tied):
    """As timm's BEiT: one product of query, key and value, whose key has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.q_bias = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Parameter(torch.ones(WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        bias = torch.cat((self.q_bias, torch.zeros_like(self.q_bias), self.q_bias))
        q, k, v = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v)
        return F.linear(self.down(torch.tanh(self.up(x))), self.words.weight)


class Steps(Tied):
    """As Mamba: a product without the bias, which is added later; and the linear is called, too."""

    def __init__(self) -> None:
        super().__init__()
        self.dt, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 12)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        dt = F.softplus(x @ self.dt.weight.T + self.dt.bias)
        return self.head(self.down(torch.tanh(self.up(self.dt(x) * dt))))


class Relative(Tied):
    """As DeBERTa: rows of a table of positions are projected as the words are; and a codebook's nearest row."""

    def __init__(self) -> None:
        super().__init__()
        self.places, self.query = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.codes, self.head = nn.Embedding(6, WIDTH), nn.Linear(WIDTH, 12)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        scores = self.query(x) @ self.query(self.places.weight).T
        x = x + self.down(torch.tanh(self.up(scores.softmax(-1) @ self.places.weight)))
        nearest = (x[..., None, :] - self.codes.weight).square().sum(-1).argmin(-1)
        return self.head(x + self.codes(nearest))


class Sized(nn.Module):
    """As CLIP: sizes of weights are read; and as XLM-RoBERTa: the tied head is made before the words."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 12)
        self.words, self.places, self.more = nn.Embedding(12, WIDTH), nn.Embedding(TOKENS, WIDTH), nn.Embedding(4, 8)
        self.up, self.down, self.scale = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH), nn.Linear(WIDTH, 6)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        if ids.shape[1] > self.places.weight.shape[0] or len(self.more.weight) != 4:
            raise ValueError("too many tokens")
        x = self.words(ids) + self.places(torch.arange(ids.shape[1])) + self.more(ids % 4) / self.more.weight.numel()
        x = x + self.down(torch.tanh(self.up(x))) * self.scale(x).sum(-1, keepdim=True) / self.scale.weight.size(0)
        return self.head(x)


class Gone(Tied):
    """In each of its layers one expert of two, of which a trial calls the first alone."""

    class Expert(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.up.weight

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.gate = nn.ModuleList(self.Expert() for _ in range(2)), nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        chosen = self.gate(x.mean((0, 1))).argmax()
        x = x + self.experts[int(chosen)](x) * self.gate(x)[..., :1]
        return F.linear(self.down(torch.tanh(self.up(x))), self.words.weight)


USES = {
    Tied: {"words"}, Fused: {"words", "qkv"}, Steps: {"dt"}, Relative: {"places", "codes"},
    Sized: {"places", "more", "scale"},
    Gone: {"words", "experts.0.up", "experts.1.up"},
}  # fmt: skip
MODELS = [unchanged(kind.__name__, kind, tokens, classify, example=EXAMPLE) for kind in USES]


def test_weights_that_are_used_past_their_module() -> None:
    plain = twins(MODELS)
    for plan, models in (("1d 2", MODELS[:-1]), ("2d 4", MODELS[:1])):
        for cell in fill(models, [plan], plain):
            assert cell.outcome == "equal", f"{cell.model} {cell.plan}: {cell.words}"


@pytest.mark.long
def test_and_under_other_plans() -> None:
    for cell in fill(MODELS[:-1], ["data 2 zero 3", "2d 4", "2.5d 8", "3d 8", "data 2 x 1d 2"], twins(MODELS)):
        assert cell.outcome == "equal", f"{cell.model} {cell.plan}: {cell.words}"


def left(context: ParallelContext) -> dict[str, set[str]]:
    found = {}
    for kind in USES:
        conversion = conversion_of(colossus.build(colossus.parallelize(kind, example=EXAMPLE), context))
        assert conversion is not None
        found[kind.__name__] = {name for name, each in conversion.swaps.items() if "outside the module" in each.why}
        pair = [conversion.swaps[name].became for name in ("up", "down")]
        assert pair == ["Linear(column)", "Linear(row)"], kind
    return found


def test_these_alone_are_left() -> None:
    assert run_ranks(2, left)[0] == {kind.__name__: names for kind, names in USES.items()}


class Headed(Tied):
    """A head, and the table that it is tied to, of which the forward adds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 12)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids) + self.words.weight[0]
        return self.head(x + self.down(torch.tanh(self.up(x))))


def headed(context: ParallelContext, rules: dict[str, str]) -> set[str]:
    model = colossus.build(colossus.parallelize(Headed, rules, example=EXAMPLE), context)
    conversion = conversion_of(model)
    assert conversion is not None
    assert model(EXAMPLE).shape == (2, TOKENS, 12)
    return {name for name, each in conversion.swaps.items() if not each.became}


@pytest.mark.parametrize("kind", ["head", "whole"])
def test_a_rule_that_splits_a_weight_gives_way(kind: str) -> None:
    assert run_ranks(2, headed, {"head": kind})[0] == {"words", "head"}


# -- the rule ---------------------------------------------------------------------------------------------------


class Everything(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm, self.drop = nn.Embedding(12, WIDTH), nn.BatchNorm1d(TOKENS), nn.Dropout(0.5)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))
        self.head = nn.Linear(WIDTH, 12)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.drop(self.mlp(self.norm(self.words(ids)))))


def ruled(context: ParallelContext, rules: dict[str, str]) -> Any:
    try:
        model = colossus.build(colossus.parallelize(Everything, rules, example=EXAMPLE), context)
    except ValueError as error:
        return str(error)
    assert model(EXAMPLE).shape == (2, TOKENS, 12)
    conversion = conversion_of(model)
    assert conversion is not None
    assert all((type(each).__module__.partition(".")[0] == "torch") == (not conversion.swaps[name].became)
               for name, each in model.named_modules() if name in conversion.swaps)  # fmt: skip
    return {name for name, each in conversion.swaps.items() if not each.became}


RULES: dict[str, tuple[dict[str, str], Any]] = {
    "tied": ({"words": "torch"}, {"words", "head"}),
    "tied, by the head": ({"head": "torch"}, {"words", "head"}),
    "inside": ({"mlp": "torch"}, {"mlp.0", "mlp.2"}),
    "before another": ({"mlp.0": "whole", "mlp.*": "torch"}, {"mlp.2"}),
    "without weights": ({"drop": "torch", "n*": "torch"}, {"drop", "norm"}),
    "all": ({"*": "torch"}, {"words", "norm", "drop", "mlp.0", "mlp.2", "head"}),
    "none": ({"wrds": "torch"}, "rules: 'wrds' matches none of the 9 modules of the model; did you mean 'words'?"),
}


def test_a_rule_leaves_modules_as_torchs() -> None:
    def body(context: ParallelContext) -> dict[str, Any]:
        return {name: ruled(context, rules) for name, (rules, _) in RULES.items()}

    assert run_ranks(2, body)[0] == {name: wanted for name, (_, wanted) in RULES.items()}
