"""Saved under any plan, loaded under any other: every tensor and value the same to the bit, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import assert_same_contents, contents, run_chain
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import batch_of as tokens_of
from helpers.training import config_of
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.folder import name_of

Plan = dict[str, Any]

#: heads that divide over 8 ranks, fewer kv heads, a vocabulary that divides over none
SIZES: dict[str, Any] = dict(num_layers=4, hidden_size=32, num_heads=8, num_kv_heads=2, vocab_size=53, seq_len=16)
#: of a model whose key biases have no true gradient AdamW makes steps of rounding noise: compared by loss and norm
TOLERANCE = 1e-10


def gpt(parallel: Plan, schedule: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    model = {**SIZES, **more.pop("model", {})}
    settings = dict(model=model, schedule=schedule or {}, lr_schedule=dict(warmup_steps=2)) | more
    return config_of(parallel, 50, "fp64", **settings)


def gpt_batch(step: int, config: Mapping[str, Any]) -> dict[str, Tensor]:
    return tokens_of(step, SIZES)


# -- a chain of plans -----------------------------------------------------------------------------------------


def train_alone(
    rank: int, config: dict[str, Any], batch_of: Callable[..., Any], steps: int, options: dict[str, Any]
) -> list[tuple[float, float]]:
    engine = colossus.initialize(config, **options)
    results = [engine.train_step(batch_of(step, config)) for step in range(steps)]
    engine.close()
    return [(result.loss, result.grad_norm) for result in results]


def check_chain(
    root: Path,
    chain: Sequence[tuple[int, dict[str, Any]]],
    alone: dict[str, Any],
    batch_of: Callable[..., Any],
    **options: Any,
) -> None:
    """Each plan loads what the one before has saved, gives it back to the bit, and trains as one process would."""
    told = run_chain(root, chain, batch_of, **options)
    (wanted,) = run_ranks(1, train_alone, alone, batch_of, len(chain), options, with_context=False)
    for number, (world, config) in enumerate(chain):
        plan = f"{config['parallel']} {config.get('schedule')} on {world} ranks, {number} plans after the first"
        for mine, other in zip(told[number], wanted[number], strict=True):
            assert abs(mine - other) <= TOLERANCE * abs(other), f"{plan}: {mine!r}, one process {other!r}"
        if number:
            saved, again = (contents(root / str(link) / name_of(number)) for link in (number - 1, number))
            assert_same_contents(again, saved, plan)


def scheduled(name: str) -> dict[str, Any]:
    return dict(type=name, microbatches=2)


REORDERED = ("tensor", "sequence", "data", "pipeline")
#: every mode once, pipelines that tie weights over stages, and other numbers of ranks
CHAIN: list[tuple[int, Plan, dict[str, Any] | None]] = [
    (4, dict(pipeline=2, tensor=dict(mode="2d", shape=(2, 1))), scheduled("interleaved")),
    (4, dict(tensor=dict(mode="3d", shape=(2, 1, 2))), None),
    (4, dict(pipeline=2, tensor=dict(size=2, sequence_sharded=True)), scheduled("zb-v")),
    (4, dict(sequence=dict(size=2, mode="ring"), data=2, zero=3, rank_order=REORDERED), None),
    (1, dict(), None),
]
LONG_CHAIN: list[tuple[int, Plan, dict[str, Any] | None]] = [
    (8, dict(data=2, pipeline=2, tensor=dict(mode="2d", shape=(2, 1)), zero=2), scheduled("interleaved")),
    (8, dict(tensor=dict(mode="3d", size=8)), None),
    (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), None),
    (8, dict(data=4, zero=dict(stage=3, shard=2), tensor=2, rank_order=REORDERED), None),
    (8, dict(sequence=dict(size=4, mode="hybrid"), pipeline=2), scheduled("zb-h1")),
    (8, dict(data=2, pipeline=2, tensor=dict(mode="3d", shape=(2, 1, 1)), zero=1), scheduled("gpipe")),
    (4, dict(tensor=dict(mode="2d", size=4)), None),
    (4, dict(data=2, sequence=dict(size=2, mode="ulysses")), None),
    (2, dict(data=2, zero=3), None),
    (4, dict(pipeline=4), scheduled("1f1b")),
]


@pytest.mark.parametrize("plans", [CHAIN, *long(LONG_CHAIN)], ids=["chain", "long"])
def test_a_chain_of_plans_is_the_run_of_one_process(tmp_path: Path, plans: list[Any]) -> None:
    chain = [(world, gpt(parallel, schedule)) for world, parallel, schedule in plans]
    check_chain(tmp_path, chain, gpt({}), gpt_batch)


# -- a model and an optimizer of a user's own -----------------------------------------------------------------

WORDS, WIDTH = 11, 6


class Net(nn.Module):
    """Of everything that a model may hold: ours and plain, shared and tied, frozen, without dims, complex, buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = layers.Embedding(WORDS, WIDTH)
        self.first = layers.Linear(WIDTH, 12, split="column")
        self.second = layers.Linear(12, WIDTH, split="row")
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.again = self.shared
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.phase = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex128))
        self.odd = nn.Parameter(torch.randn(5, 1, 3))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.shared.weight
        self.head = layers.LMHead(WIDTH, WORDS, tied_to=self.words)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))
        self.norm.register_buffer("scale", self.scale)
        self.register_buffer("number", torch.tensor([7, 9]))
        self.register_buffer("unsaved", torch.ones(3), persistent=False)

    def bottom(self, ids: Tensor) -> Tensor:
        return self.shared(self.words(ids))

    def middle(self, x: Tensor) -> Tensor:
        return self.norm(x + self.second(torch.tanh(self.first(x)))) * self.temperature

    def top(self, x: Tensor) -> Tensor:
        x = self.again(x) + self.frozen(x) + self.tied(x)
        return self.head(x * self.phase.abs() * self.scale + self.odd.sum().tanh())

    def forward(self, ids: Tensor) -> Tensor:
        return self.top(self.middle(self.bottom(ids)))

    def pipeline_blocks(self) -> list[Any]:
        top = (self.again, self.frozen, self.tied, self.phase, self.odd, self.head, self.scale)
        middle = (self.first, self.second, self.norm, self.temperature, self.number)
        return [
            layers.PipelineBlock(self.bottom, self.shared, self.words),
            layers.PipelineBlock(self.middle, *middle),
            layers.PipelineBlock(self.top, *top),
        ]


class Counting(torch.optim.Optimizer):
    """SGD with momentum, whose state has values and tensors of other shapes, too."""

    def __init__(self, groups: Any) -> None:
        super().__init__(groups, dict(lr=0.05, note=("mine", None)))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                if not state:
                    state |= dict(count=0, seen=[], window=(1, 2.5, None))
                    state |= dict(velocity=torch.zeros_like(param), total=torch.zeros((), dtype=torch.float64))
                state["count"] += 1
                state["seen"].append(state["count"] / 3)
                state["total"] += state["count"]
                state["velocity"].mul_(0.9).add_(param.grad)
                param.sub_(state["velocity"], alpha=group["lr"])


def two_groups(named: Any) -> torch.optim.Optimizer:
    named = list(named)
    slow = [param for name, param in named if "shared" in name]
    fast = [param for name, param in named if "shared" not in name]
    return Counting([dict(params=fast), dict(params=slow, lr=0.01)])


def word_loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return layers.cross_entropy(outputs, batch["labels"])


def words_of(step: int, config: Mapping[str, Any]) -> dict[str, Tensor]:
    ids = torch.randint(0, WORDS, (8,), generator=torch.Generator().manual_seed(step))
    return {"inputs": ids, "labels": ids.flip(0)}


def own_config(parallel: Plan, **more: Any) -> dict[str, Any]:
    train = dict(steps=20, global_batch_size=8, precision="fp64", seed=3, clip_grad_norm=1.0)
    return dict(parallel=parallel, train=train, device="cpu") | more


OWN_PLANS: list[tuple[int, Plan, dict[str, Any]]] = [
    (4, dict(data=2, tensor=2, zero=2), {}),
    (4, dict(data=2, pipeline=2, zero=3), dict(type="1f1b", microbatches=2)),
    (4, dict(tensor=dict(mode="2d", size=4)), {}),
    (3, dict(pipeline=3), dict(type="1f1b", microbatches=2)),
    (1, dict(), {}),
]


def test_a_model_and_an_optimizer_of_ones_own(tmp_path: Path) -> None:
    chain = [(world, own_config(parallel, schedule=schedule)) for world, parallel, schedule in OWN_PLANS]
    check_chain(tmp_path, chain, own_config({}), words_of, model=Net, loss_fn=word_loss, optimizer=two_groups)
    saved = contents(tmp_path / "4" / name_of(5))
    assert "model/unsaved" not in saved.tensors
    assert saved.tensors["model/phase"].is_complex()
    assert saved.tensors["model/number"].tolist() == [7, 9]
    assert saved.tensors["optimizer/shared.weight/total"].item() == sum(range(1, 6))
    assert saved.values["optimizer/shared.weight"]["window"] == (1, 2.5, None)
    assert saved.values["groups"][1]["note"] == ("mine", None)
    assert not any(key.startswith("optimizer/frozen") for key in saved.tensors)
    assert saved.aliases["tied.weight"] == saved.aliases["again.weight"] == "shared.weight"
