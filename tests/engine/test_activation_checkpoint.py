"""``train.activation_checkpoint`` in one process: the same run to the bit; what is computed again and held, counted."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers.training import SIZES, batch_of, config_of
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.flop_counter import FlopCounterMode

import colossus
from colossus import layers
from colossus.config import ConfigError
from colossus.config.training import ActivationCheckpoint
from colossus.engine.checkpointed_modules import chosen_modules, with_activation_checkpoint
from colossus.layers.checkpointing import is_unit

KINDS: list[Any] = [
    "full",
    "selective",
    dict(type="full", every=2),
]


# -- the same numbers in one process ----------------------------------------------------------------------------


class Noisy(nn.Module):
    """Plain torch, with all that makes recomputation hard: dropout, draws of all generators, running statistics, a nest
    of arguments of which one tensor comes twice, a mask, and a keyword."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * width, width)
        self.stats = nn.BatchNorm1d(width)
        self.norm = spectral_norm(nn.Linear(width, width))
        self.drop = nn.Dropout(0.3)
        self.down = nn.Linear(width, width)
        self.register_buffer("calls", torch.zeros(100, 100))

    def forward(self, state: dict[str, Any], pair: tuple[Tensor, Tensor], *, kind: float, context: Any = None) -> Any:
        x = state["x"]
        assert pair[0] is pair[1] is x
        if random.random() < 0.3:  # the program's own decision, the same again
            return {**state, "x": x * 0.5}
        self.calls += 1  # large, and read
        y = torch.tanh(self.mix(torch.cat(pair, -1))) * self.calls[0, 0].clone()
        y = self.stats(y.transpose(1, 2)).transpose(1, 2)
        y = self.drop(F.gelu(self.norm(y))) + torch.from_numpy(np.random.rand(*y.shape[1:])).to(y.dtype)
        y = F.scaled_dot_product_attention(y, y, y, dropout_p=0.2)
        return {**state, "x": x + kind * self.down(self.drop(y)).masked_fill(state["mask"], 0.0)}


class Net(nn.Module):
    def __init__(self, block: Callable[[int], nn.Module] = Noisy) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZES["vocab_size"], 12)
        self.blocks = nn.ModuleList([block(12) for _ in range(4)])
        self.head = nn.Linear(12, SIZES["vocab_size"])
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        state = {"x": self.embedding(ids), "mask": (ids % 5 == 0).unsqueeze(-1), "name": "none"}
        for block in self.blocks:
            state = block(state, (state["x"], state["x"]), kind=0.5)
        out: Tensor = self.head(state["x"])
        return out


def loss_of(logits: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def trained(recompute: Any, model: Any = None, *, steps: int = 2, **options: Any) -> list[Any]:
    """Losses and norms, then gradients, parameters and buffers, of a few steps and an evaluation in one process."""
    config = config_of({}, steps, "fp64", train=dict(activation_checkpoint=recompute), model=options)
    config["schedule"] = dict(microbatches=2)
    engine = colossus.initialize(config, model=model, loss_fn=loss_of if model else None)
    out: list[Any] = []
    for step in range(steps):
        result = engine.train_step(batch_of(step))
        out.append((result.loss, result.grad_norm))
    out.append(engine.eval_step(batch_of(9)).loss)
    out += [value.clone() for value in engine.model.state_dict().values()]
    out += [param.grad.clone() for param in engine.model.parameters() if param.grad is not None]
    engine.close()
    return out


@cache
def trained_as_it_is(model: Any = None, **options: Any) -> list[Any]:
    return trained("none", model, **options)


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    assert len(found) == len(wanted)
    for mine, other in zip(found, wanted, strict=True):
        assert torch.equal(mine, other) if isinstance(mine, Tensor) else mine == other


@pytest.mark.rest("{'type': 'full', 'every': 2}", "{'type': 'full', 'modules': ['blocks.[02].*', 'blocks.3']}")
@pytest.mark.parametrize("recompute", [*KINDS, dict(type="full", modules=["blocks.[02].*", "blocks.3"])], ids=str)
def test_plain_modules_train_the_same_to_the_bit(recompute: Any) -> None:
    assert_equal(trained(recompute, Net), trained_as_it_is(Net))


@pytest.mark.parametrize("recompute", [*KINDS, dict(type="selective", modules=["blocks.*.mlp", "*norm"])], ids=str)
def test_our_blocks_train_the_same_to_the_bit(recompute: Any) -> None:
    options = dict(dropout=0.2, attention_dropout=0.1, mlp="swiglu", num_kv_heads=2, positions="rotary")
    assert_equal(trained(recompute, **options), trained_as_it_is(**options))


# -- which modules ----------------------------------------------------------------------------------------------


class Sequenced(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Embedding(5, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 5))


class Held(nn.Module):
    """Blocks in lists of lists and in dicts, as many write them, and in a module that has no forward."""

    def __init__(self) -> None:
        super().__init__()
        bare = nn.Module()
        bare.up = nn.Linear(4, 4)
        self.layers = nn.ModuleList(
            [
                nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4))]),
                nn.ModuleDict(dict(up=nn.Linear(4, 4), down=nn.ModuleList([nn.Linear(4, 4)]))),
                bare,
                nn.ParameterList([torch.ones(2)]),
            ]
        )


@pytest.mark.parametrize(
    ("model", "options", "names"),
    [
        (Held, {}, ["layers.0.0", "layers.0.1", "layers.1.up", "layers.1.down.0", "layers.2.up"]),
        (Held, dict(modules=["layers.[12]*"]), ["layers.1.up", "layers.1.down.0", "layers.2.up"]),
        (Net, {}, ["blocks.0", "blocks.1", "blocks.2", "blocks.3"]),
        (Net, dict(every=3), ["blocks.0", "blocks.3"]),
        (Net, dict(modules=["*.down", "head"], every=2), ["blocks.0.down", "blocks.2.down", "head"]),
        (Net, dict(modules=["*"]), ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "head"]),
        (Sequenced, {}, ["0", "1.0", "2"]),
    ],
)
def test_which_modules(model: type[nn.Module], options: dict[str, Any], names: list[str]) -> None:
    assert chosen_modules(model(), ActivationCheckpoint(type="full", **options)) == names


@pytest.mark.parametrize(
    ("wanted", "options", "message"),
    [
        (dict(type="full", modules=["blok.*"]), {}, r"\['blok\.\*'\] match no module that the model calls"),
        (
            "full",
            dict(activation_checkpoint="selective"),
            "= 'selective' and train.activation_checkpoint = 'full': keep",
        ),
        (dict(every=2), {}, "every = 2, but type is 'none': set type='full'"),
    ],
)
def test_refused(wanted: Any, options: dict[str, Any], message: str) -> None:
    config = config_of({}, 1, "fp64", train=dict(activation_checkpoint=wanted), model=options)
    with pytest.raises(ConfigError, match=message):
        colossus.initialize(config)


def test_an_input_that_is_changed_in_place_is_refused() -> None:
    class InPlace(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.up = nn.Linear(width, width)

        def forward(self, state: dict[str, Any], pair: Any, kind: float) -> Any:
            state["x"].mul_(kind)
            return {**state, "x": self.up(state["x"])}

    with pytest.raises(ValueError, match=r"InPlace changes its input of shape \(4, 12, 12\) in place"):
        trained("full", lambda: Net(InPlace))


# -- what is computed again -------------------------------------------------------------------------------------

BATCH, TOKENS, HIDDEN, HEADS, BLOCKS = 2, 6, 8, 2, 4
ATTENTION = 2 * 2 * BATCH * TOKENS * TOKENS * HIDDEN


def blocks_of(recompute: Any, dropout: float = 0.0) -> nn.Module:
    """Four transformer blocks in a row."""

    def make() -> nn.Module:
        return nn.Sequential(*(layers.TransformerBlock(HIDDEN, HEADS, dropout=dropout) for _ in range(BLOCKS)))

    wanted = ActivationCheckpoint.model_validate(recompute)
    return colossus.build(with_activation_checkpoint(make, wanted), dtype=torch.float64)


def flops(recompute: Any) -> int:
    model = blocks_of(recompute, 0.1)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    # torch counts no attention on CPU: its forwards are counted here, its backwards not
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={attention: lambda *_, **__: ATTENTION})
    with counter:
        model(x).sum().backward()
    return int(counter.get_total_flops())


def test_flops_are_those_of_one_more_forward() -> None:
    """But for the last product of each block, which nothing needs again."""
    rows = BATCH * TOKENS
    up_to_the_last = 2 * rows * HIDDEN * (3 * HIDDEN + HIDDEN + 4 * HIDDEN) + ATTENTION
    last = 2 * rows * 4 * HIDDEN * HIDDEN
    plain = flops("none")
    forward = BLOCKS * (up_to_the_last + last)
    assert plain == forward + 2 * (forward - BLOCKS * ATTENTION)
    assert flops("full") == plain + BLOCKS * up_to_the_last
    assert flops(dict(type="full", every=2)) == plain + BLOCKS // 2 * up_to_the_last
    assert flops(dict(type="full", modules=["*.mlp"])) == plain + BLOCKS * 2 * rows * HIDDEN * 4 * HIDDEN
    assert flops("selective") == plain


def test_selective_keeps_attention_unless_it_drops() -> None:
    """What is kept is not drawn again, which would shift what is drawn after it. CPUs drop in other operations."""
    q, aten = torch.empty(1, 1, 1, 8, device="meta"), torch.ops.aten
    for func, more in (
        (aten._scaled_dot_product_flash_attention.default, ()),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True)),
    ):
        assert [is_unit(func, (q, q, q, *more, *rate)) for rate in ((), (0.0,), (0.1,))] == [True, True, False]
    assert not is_unit(aten.relu.default, (q,))


# -- what is held -----------------------------------------------------------------------------------------------


def held_after_forward(recompute: Any, dropout: float = 0.0) -> float:
    """What a forward leaves allocated without its output, in float64 numbers for each token and feature of a block."""
    model = blocks_of(recompute, dropout)
    x = torch.randn(BATCH, TOKENS, HIDDEN, dtype=torch.float64, requires_grad=True)
    model(x)
    gc.collect()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = model(x)
    results: Any = profile.profiler
    left = sum(event.nbytes() for event in results.kineto_results.events() if event.name() == "[memory]")
    return (left - out.nbytes) / (8 * BATCH * TOKENS * HIDDEN * BLOCKS)


#: what a block keeps for each token, in features: of its two norms the inputs, outputs, means and deviations, query,
#: key and value, what attention returns with its log-sum-exp, what gelu takes and returns
ALL = 2 * (1 + 1 + 2 / HIDDEN) + 3 + 1 + HEADS / HIDDEN + 4 + 4
#: its input, and the results of attention and of its products but the last, which no recomputation needs
PRODUCTS = 1 + 3 + 1 + HEADS / HIDDEN + 1 + 4
#: the input of the first block is there anyway
GIVEN = 1 / BLOCKS


def test_a_forward_leaves_what_the_formula_says() -> None:
    found = {str(kind): held_after_forward(kind) for kind in ("none", *KINDS)}
    assert found == {
        "none": ALL - GIVEN,
        "full": 1 - GIVEN,
        "selective": PRODUCTS - GIVEN,
        str(dict(type="full", every=2)): (1 + ALL) / 2 - GIVEN,
    }
    # a mask of dropout is a byte for each feature; a recomputation needs none to be kept
    assert held_after_forward("none", 0.1) == pytest.approx(ALL - GIVEN + 2 / 8, rel=0.002)
    assert held_after_forward("full", 0.1) == 1 - GIVEN
