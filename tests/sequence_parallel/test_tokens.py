"""The whole region under ``parallel.sequence``: what works on each token by itself is right, the rest is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.parts import part_of_tokens as tokens
from helpers.ranks import run_ranks
from helpers.token_modules import MIXING, OF_ALL_TOKENS, POSITION_WISE, Of, Square
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.layers.model_parallel import model_parallel_of
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS = 4, 13


class Table(nn.Module):
    """All modules of a table on the same embeddings."""

    def __init__(self, modules: dict[str, Callable[[], nn.Module]]) -> None:
        super().__init__()
        self.table = nn.Embedding(19, 16)
        self.parts = nn.ModuleDict({name: make() for name, make in modules.items()})

    def forward(self, ids: Tensor) -> dict[str, Tensor]:
        x = self.table(ids)
        return {name: part(x) for name, part in self.parts.items()}


def batch(num_tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, 19, (BATCH, num_tokens), generator=generator)
    targets = torch.randn(BATCH, num_tokens, 16, dtype=torch.float64, generator=generator)
    return {"inputs": ids, "labels": ids * 0, "targets": targets}


def loss_of(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    valid = batch["labels"] != -100
    losses = [(out - batch["targets"]).square().sum(-1).masked_fill(~valid, 0.0).sum() for out in outputs.values()]
    return torch.stack(losses).sum(), valid.sum()


def _train(rank: int, parallel: dict[str, Any], modules: dict[str, Callable[[], nn.Module]], num_tokens: int) -> Any:
    outputs: dict[str, Tensor] = {}

    def loss(outs: dict[str, Tensor], batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        assert all(isinstance(out, layers.ShardedTensor) for out in (*outs.values(), *batch.values()))
        outputs.update({name: layers.local(out.detach()) for name, out in outs.items()})
        return loss_of(outs, batch)

    settings = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=0.1),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=7),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=lambda: Table(modules), loss_fn=loss)
    state = full_state_dict(engine.model, engine.context)
    evaluated = engine.eval_step(batch(num_tokens)).loss
    inputs: list[Any] = []
    engine.model.table.register_forward_hook(lambda module, args, out: inputs.extend((args[0], out)))  # type: ignore[union-attr]
    result = engine.train_step(batch(num_tokens))
    sequence = model_parallel_of(engine.context).sequence
    assert sequence is not None
    (first, *_) = outputs.values()
    assert [repr(x) for x in inputs] == [
        f"ShardedTensor(local {tuple(shape)}, dim 1 over sequence)" for shape in (first.shape[:2], first.shape)
    ]
    count = first.shape[1]
    positions = sequence.positions(count, engine.context.index("sequence"), sequence.num_shards, torch.device("cpu"))
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    engine.close()
    return result.loss, evaluated, state, gradients, outputs, positions


PLANS = {
    "ring": (2, dict(sequence=dict(size=2, mode="ring", pad=True))),
    "ulysses and 1d": (4, dict(sequence=dict(size=2, mode="ulysses", pad=True), tensor=2)),
    "hybrid": (4, dict(sequence=dict(size=4, mode="hybrid", ulysses=2))),
    "1d, tokens split": (4, dict(sequence=2, tensor=dict(size=2, sequence_sharded=True))),
    "2d": (8, dict(sequence=2, tensor=dict(mode="2d", size=4))),
}


@pytest.mark.parametrize("name", ["ring", *long("ulysses and 1d")])
def test_what_works_on_each_token_is_exact(name: str) -> None:
    _compare(name, POSITION_WISE, TOKENS)


@pytest.mark.parametrize("name", ["ring", *long(*list(PLANS)[1:])])
def test_what_looks_at_all_tokens_is_exact(name: str) -> None:
    _compare(name, OF_ALL_TOKENS, 16)


def _compare(name: str, modules: dict[str, Callable[[], nn.Module]], num_tokens: int) -> None:
    world, parallel = PLANS[name]
    ranks = run_ranks(world, _train, parallel, modules, num_tokens, with_context=False)
    twin = Table(modules).double()
    twin.load_state_dict(ranks[0][2])
    whole = batch(num_tokens)
    wanted = twin(whole["inputs"])
    total, number = loss_of(wanted, whole)
    (total / number).backward()
    assert len(modules) >= 20
    for loss, evaluated, _, gradients, outputs, positions in ranks:
        real = positions < num_tokens
        for name, out in outputs.items() if len(ranks) < 8 else ():  # 2D splits samples, too
            part = wanted[name][:, positions[real]]
            torch.testing.assert_close(out[:, real], part, rtol=1e-10, atol=1e-12, msg=f"output of {name}")
        assert loss == pytest.approx((total / number).item(), rel=1e-12)
        assert evaluated == pytest.approx(loss, rel=1e-12)
        for name, parameter in twin.named_parameters():
            grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            own_grad = gradients.get(name, torch.zeros_like(grad))
            torch.testing.assert_close(own_grad, grad, rtol=1e-9, atol=1e-11, msg=f"gradient of {name}")


@pytest.mark.parametrize("name", MIXING)
def test_what_mixes_tokens_is_refused(name: str) -> None:
    make, words = MIXING[name]
    model = nn.ModuleDict({"mix": make()})

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inside["mix"](x)

    with pytest.raises(ValueError, match=words) as caught:
        Net()(tokens(3, 8, 16))
    message = str(caught.value)
    assert "Its input is a rank's part of a tensor (ShardedTensor(local " in message
    assert "colossus.layers.local(x)" in message
    place = r"\(in inside\.mix(\.\w+)? \(\w+\), at \S*(test_tokens|token_modules)\.py:\d+: |^(LSTM|GRU)"
    assert re.search(place, message), message
    assert make()(torch.randn(3, 16, 16)).dim() >= 2  # a plain tensor may be what it wants


def test_the_way_out_and_back() -> None:
    x = tokens(3, 8, 16).requires_grad_()
    plain = layers.local(x)
    assert type(plain) is Tensor
    plain.mean(1).square().sum().backward()
    assert x.grad is not None
    assert type(x.grad) is layers.ShardedTensor
    whole = torch.randn(2, 3)
    assert layers.local(whole) is whole


# -- our layers, pipelines -----------------------------------------------------------------------------------------


class Ours(nn.Module):
    """Our layers between a user's own, in stages that pass tokens on in other dims than 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = layers.Embedding(19, 16)
        self.positions = layers.PositionEmbedding(TOKENS, 16)
        self.block = layers.TransformerBlock(16, 4, 2)
        self.block.mlp = Of(lambda m, x: m.down(torch.relu(m.up(x))), up=nn.Linear(16, 24), down=nn.Linear(24, 16))
        self.first = nn.Linear(16, 16)
        self.attention = layers.Attention(16, 4, mask=layers.Mask.full(), rotary=True)
        self.pair = nn.Sequential(layers.Linear(16, 24, split="column"), nn.GELU(), layers.Linear(24, 16, split="row"))
        self.norm = layers.LayerNorm(16)
        self.head = layers.LMHead(16, 19)

    def pipeline_blocks(self) -> list[Any]:
        return [
            layers.PipelineBlock(self.start, self.table, self.positions, self.block, self.first),
            layers.PipelineBlock(self.end, self.attention, self.pair, self.norm, self.head),
        ]

    def start(self, inputs: dict[str, Tensor]) -> Any:
        x = self.positions(Square.apply(self.table(inputs["ids"])))
        x = self.block(x, documents=inputs["documents"]) + inputs["weights"].unsqueeze(-1)
        more = {"scale": inputs["scale"], "documents": inputs["documents"]}
        return {"x": self.first(x).transpose(1, 2), "flat": x.flatten(0, 1), **more}

    def end(self, tensors: dict[str, Tensor]) -> Tensor:
        x = (
            Square.apply(tensors["x"]).mT
            + tensors["flat"].unflatten(0, (tensors["x"].shape[0], -1)) * tensors["scale"][:, None]
        )
        x = x + self.attention(x, documents=tensors["documents"])
        x = x + self.pair(self.norm(x.flatten(0, 1))).view(x.shape)
        return self.head(x).sub(0.1)

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        return self.end(self.start(inputs))

    def loss(self, logits: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        return layers.cross_entropy(logits, batch["labels"])


def _our_layers(rank: int, parallel: dict[str, Any], schedule: dict[str, Any]) -> Any:
    settings = dict(
        parallel=parallel,
        schedule=schedule,
        optimizer=dict(type="AdamW", lr=1e-2),
        train=dict(global_batch_size=BATCH, precision="fp64", clip_grad_norm=1.0, seed=7),
        device="cpu",
    )
    engine = colossus.initialize(settings, model=Ours)
    numbers = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(0, 19, (BATCH, TOKENS + 1), generator=generator)
        inputs = {
            "ids": ids[:, :-1],
            "documents": (torch.arange(TOKENS) > 5 + step).long().expand(BATCH, -1),
            "weights": torch.rand(BATCH, TOKENS, generator=generator),
            "scale": torch.rand(BATCH, 16, generator=generator),  # no tokens: whole on every rank
        }
        result = engine.train_step({"inputs": inputs, "labels": ids[:, 1:]})
        numbers += [result.loss, result.grad_norm]
    gradients = full_state_dict(engine.model, engine.context, gradients=True)
    engine.close()
    return numbers, gradients


def padded(size: int, mode: str = "ring") -> dict[str, Any]:
    return dict(size=size, mode=mode, pad=True)


@pytest.mark.rest("pipeline zb-h1")
@pytest.mark.parametrize(
    ("world", "parallel", "schedule"),
    [
        (2, dict(sequence=padded(2)), {}),
        (4, dict(sequence=padded(2), pipeline=2), dict(type="zb-h1", microbatches=2)),
        (4, dict(sequence=padded(2), tensor=dict(size=2, sequence_sharded=True)), {}),
        pytest.param(4, dict(sequence=padded(2, "ulysses"), pipeline=2), dict(microbatches=2), marks=pytest.mark.long),
        pytest.param(4, dict(sequence=padded(2), tensor=2), {}, marks=pytest.mark.long),
        pytest.param(8, dict(sequence=padded(2), tensor=dict(mode="2d", size=4)), {}, marks=pytest.mark.long),
        (4, dict(sequence=padded(2), tensor=dict(mode="3d", shape=(2, 1, 1))), {}),
    ],
    ids=["ring", "pipeline zb-h1", "1d sequence sharded", "pipeline ulysses", "1d", "2d", "3d"],
)
def test_our_layers_and_stages_pass_tokens_on(world: int, parallel: dict[str, Any], schedule: dict[str, Any]) -> None:
    wanted, wanted_gradients = run_ranks(1, _our_layers, {}, {}, with_context=False)[0]
    for numbers, gradients in run_ranks(world, _our_layers, parallel, schedule, with_context=False):
        assert numbers == pytest.approx(wanted, rel=1e-10)
        for name, value in wanted_gradients.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-8, atol=1e-11, msg=name)


def test_a_layer_of_ours_refuses_tokens_where_it_takes_something_else() -> None:
    x = tokens(3, 8, 16)
    for call, words in (
        (
            lambda: layers.LayerNorm(8)(x.mT),
            r"takes features last, but its input of local shape \(3, 16, 8\)",
        ),
        (lambda: layers.LayerNorm((8, 16))(x), r"takes features in the last 2 dims, .* has tokens in dim 1"),
        (lambda: layers.MLP(8, 16)(x.mT), r"takes features last"),
        (
            lambda: layers.Attention(16, 4)(x.transpose(0, 1)),
            r"takes \[batch, tokens, features\], .* in dim 0",
        ),
        (
            lambda: layers.TransformerBlock(16, 4)(x.flatten(0, 1)),
            r"takes .* in dim 0",
        ),
        (lambda: layers.cross_entropy(x.mT, tokens(3, 8).long()), r"takes features last"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
