"""The language model over words against plain torch, under plans."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.sampled import drawn_in, sampled_loss
from helpers.twins import PlainBlock, plain_norm
from torch import Tensor, nn

import colossus
from colossus.config import Config, ConfigError
from colossus.config.plans import resolve_sizes
from colossus.data.make_loaders import loaders_of
from colossus.launch.checks import check_data
from colossus.sparse.words_options import WordsOptions
from colossus.state.model_state_dict import full_state_dict

STEPS, BATCH, SEED, LR = 3, 8, 5, 2.0
SIZES: dict[str, Any] = dict(
    vocab_size=43, pairs=29, hidden_size=8, num_layers=2, num_heads=2, seq_len=6, num_samples=13
)
TRUNKS = ("lstm", "gpt")


def batches() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(2)

    def ids(high: int) -> Tensor:
        return torch.randint(0, high, (BATCH, SIZES["seq_len"]), generator=generator)

    return [dict(inputs=dict(ids=ids(43), pairs=ids(29)), labels=ids(43)) for _ in range(STEPS)]


def config(trunk: str, plan: dict[str, Any]) -> dict[str, Any]:
    return dict(
        parallel=plan,
        model=dict(type="WordsLM", trunk=trunk, **SIZES),
        optimizer=dict(type="SGD", lr=LR),
        schedule=dict(microbatches=2),
        train=dict(steps=STEPS, global_batch_size=BATCH, precision="fp64", clip_grad_norm=None, seed=SEED),
    )


def train(rank: int, plan: dict[str, Any]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for trunk in TRUNKS if plan.get("sequence", 1) == 1 else ("gpt",):
        engine = colossus.initialize(config(trunk, plan))
        if engine.context.grid.world_size == 1:
            numbers[f"{trunk} start"] = full_state_dict(engine.model, engine.context)
            numbers[f"{trunk} start"] = {name: value.clone() for name, value in numbers[f"{trunk} start"].items()}
        index, share = engine.context.index("data"), BATCH // engine.context.size("data")
        own = slice(index * share, (index + 1) * share)
        for step, batch in enumerate(batches()):
            mine = dict(inputs={key: ids[own] for key, ids in batch["inputs"].items()}, labels=batch["labels"][own])
            result = engine.train_step(mine)
            numbers[f"{trunk} loss {step}"], numbers[f"{trunk} norm {step}"] = result.loss, result.grad_norm
        engine.model.eval()
        numbers[f"{trunk} whole"] = engine.eval_step(mine).loss
        engine.close()
    return numbers


class PlainWords(nn.Module):
    """The model in plain torch, up to what its head makes of the hidden states."""

    def __init__(self, trunk: str) -> None:
        super().__init__()
        o = WordsOptions(trunk=trunk, **SIZES)
        hidden, is_gpt = o.hidden_size, trunk == "gpt"
        self.embedding, self.pairs = nn.Embedding(o.vocab_size, hidden), nn.Embedding(o.pairs, hidden)
        self.positions = nn.Embedding(o.seq_len, hidden) if is_gpt and not o.is_rotary else None
        self.blocks = nn.ModuleList(PlainBlock(o) for _ in range(o.num_layers if is_gpt else 0))
        self.lstm = None if is_gpt else nn.LSTM(hidden, hidden, o.num_layers, batch_first=True)
        self.norm = plain_norm(o)
        self.head = nn.ParameterDict(
            {"weight": torch.zeros(o.vocab_size, hidden), "bias": torch.zeros(o.vocab_size, 1)}
        )

    def forward(self, inputs: dict[str, Tensor]) -> Tensor:
        x = self.embedding(inputs["ids"]) + self.pairs(inputs["pairs"])
        x = x if self.positions is None else x + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return self.norm(x if self.lstm is None else x + self.lstm(x)[0])


def train_plain(start: dict[str, Tensor], trunk: str) -> dict[str, float]:
    model = PlainWords(trunk).double()
    model.load_state_dict(start)
    head, numbers = model.head, {}
    for step, batch in enumerate(batches()):
        hidden = model(batch["inputs"])
        drawn = drawn_in(step, SIZES["num_samples"], SIZES["vocab_size"], seed=SEED)
        loss = sampled_loss(hidden, batch["labels"], head.weight, head.bias, drawn) / batch["labels"].numel()
        model.zero_grad()
        loss.backward()
        norm = torch.stack(
            [parameter.grad.norm() for parameter in model.parameters() if parameter.grad is not None]
        ).norm()
        numbers[f"{trunk} loss {step}"], numbers[f"{trunk} norm {step}"] = loss.item(), norm.item()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= LR * parameter.grad
    hidden = model(batch["inputs"])
    logits = F.linear(hidden, head.weight, head.bias.squeeze(1))
    numbers[f"{trunk} whole"] = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).item()
    return numbers


@pytest.fixture(scope="module")
def plain() -> dict[str, float]:
    numbers = run_ranks(1, train, {}, with_context=False)[0]
    starts = {trunk: numbers.pop(f"{trunk} start") for trunk in TRUNKS}
    want = {name: value for trunk, start in starts.items() for name, value in train_plain(start, trunk).items()}
    assert numbers == pytest.approx(want, rel=1e-11)
    return want


PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data": (2, dict(data=2, strategy="hybrid")),
    "2d": (4, dict(tensor=dict(mode="2d", size=4), strategy="hybrid")),
    "3d": (4, dict(tensor=dict(mode="3d", size=4, shape=[1, 2, 2]), strategy="hybrid")),
    "1d": (2, dict(tensor=dict(mode="1d", size=2, sequence_sharded=True))),
    "pipeline": (4, dict(pipeline=2, data=2, strategy="hybrid")),
    "sequence": (2, dict(sequence=2)),
}


@pytest.mark.parametrize("name", but(("1d", "2d", "3d", "data", "pipeline", "sequence"), PLANS))
def test_words_are_learned_as_in_plain_torch(name: str, plain: dict[str, float]) -> None:
    world, plan = PLANS[name]
    for numbers in run_ranks(world, train, plan, with_context=False):
        assert numbers == pytest.approx({key: plain[key] for key in numbers}, rel=1e-11)
        assert len(numbers) >= 2 * STEPS + 1


BAD = [
    (dict(num_samples=51_000), {}, "model.num_samples = 51000 different words of model.vocab_size = 50000"),
    (dict(tie_embeddings=True), {}, "model.tie_embeddings = True: the words and the softmax need tables of their own"),
    (dict(), dict(sequence=2), "model.trunk = 'lstm' goes through the words one after the other"),
    (dict(), dict(pipeline=4), "fewer than parallel.pipeline.size = 4"),
]


@pytest.mark.parametrize(("options", "plan", "words"), BAD, ids=[words for *_, words in BAD])
def test_bad_sizes(options: dict[str, Any], plan: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve_sizes(Config(parallel=plan, model=dict(type="WordsLM", **options), optimizer=dict(type="SGD", lr=1.0)))
    assert words in str(error.value)
    assert "sparse_embeddings" not in str(error.value)


def test_pairs_of_the_data_are_those_of_the_model() -> None:
    """Before a process starts; where the data says nothing they are the model's."""

    def given(**options: Any) -> Config:
        data = dict(type="PythonStdlibWords", max_bytes=60_000, **options)
        train = dict(steps=1, global_batch_size=2)
        return Config(model=dict(type="WordsLM", **SIZES), data=data, optimizer=dict(type="SGD", lr=1.0), train=train)

    with pytest.raises(ConfigError, match=r"data\.pairs = 5000, but model\.pairs = 29: remove data\.pairs"):
        check_data(given(pairs=5000))
    config = given(pairs=29)
    check_data(config)
    pairs = next(loaders_of(config, config.data, data_rank=0, data_size=1, device="cpu").train)["inputs"]["pairs"]
    assert 1 < int(pairs.max()) + 1 <= 29
