"""Fine-tuning with adapters: every plan follows one process, and that plain torch with the same formula."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import pytest
import torch
from helpers.examples import example
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.training import Trace, assert_close_states, batch_of, relative
from helpers.twins import PlainGPT
from torch import Tensor, nn

import colossus
from colossus.construct.initial_values import uniform_box
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict

SIZES: dict[str, Any] = dict(num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=12)
BATCH, STEPS = 8, 4

PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "data2": (2, dict(parallel=dict(data=2))),
    "1d": (2, dict(parallel=dict(tensor=2), schedule=dict(microbatches=2))),
    "2d": (4, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
    "3d_2x1x2": (4, dict(parallel=dict(tensor=dict(mode="3d", shape=(2, 1, 2))))),
    "1f1b": (2, dict(parallel=dict(pipeline=2), schedule=dict(type="1f1b", microbatches=4))),
    "zb-v": (2, dict(parallel=dict(pipeline=2), schedule=dict(type="zb-v", microbatches=4))),
    "data2_1d": (4, dict(parallel=dict(data=2, tensor=2))),
    "sequence2": (2, dict(parallel=dict(sequence=2))),
    "zero1": (2, dict(parallel=dict(data=2, zero=1))),
    "zero2": (2, dict(parallel=dict(data=2, zero=2))),
    "zero3": (2, dict(parallel=dict(data=2, zero=3))),
    "zero3_1d": (4, dict(parallel=dict(data=2, tensor=2, zero=3))),
}


def train(rank: int, more: dict[str, Any]) -> tuple[Trace, dict[str, Any]]:
    """Body of a rank: the example's model and optimizer; what it trains, and what it keeps of gradients."""
    module = example("finetune")
    vars(module)["SIZES"] = SIZES
    config: dict[str, Any] = dict(
        train=dict(global_batch_size=BATCH, precision="fp64", clip_grad_norm=0.5, steps=STEPS), device="cpu", **more
    )
    engine = colossus.initialize(config, model=module.adapted, optimizer=module.make_optimizer)
    load_trunk(engine, trunk_state(engine))
    trace, part = Trace(), BATCH // engine.context.size("data")
    trace.start = full_state_dict(engine.model, engine.context)
    rows = slice(engine.context.index("data") * part, (engine.context.index("data") + 1) * part)
    for step in range(STEPS):
        batch = {key: value[rows] for key, value in batch_of(step, SIZES, BATCH).items()}
        result = engine.train_step(batch)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
    trace.end = full_state_dict(engine.model, engine.context)
    parameters = dict(engine.model.named_parameters())
    names = {
        "frozen": sorted(
            name for name, param in parameters.items() if not param.requires_grad and param.grad is not None
        ),
        "trained": sorted(name for name, param in parameters.items() if param.requires_grad),
        "in the optimizer": [name for group in engine.optimizer.param_groups for name in group.get("param_names", [])],
    }
    engine.close()
    return trace, names


def load_trunk(engine: Any, state: dict[str, Tensor]) -> None:
    """Put whole weights of the trunk, by its own names, into the adapted model; adapters stay as they are."""
    own = full_state_dict(engine.model, engine.context)
    load_full_state_dict(
        engine.model, {name: state.get(name.replace(".base.", "."), own[name]) for name in own}, engine.context
    )


def trunk_state(engine: Any) -> dict[str, Tensor]:
    """Other values than the model starts with, by the names of the trunk."""
    shapes = {
        name.replace(".base.", "."): value for name, value in full_state_dict(engine.model, engine.context).items()
    }
    state = {}
    for number, (name, value) in enumerate(shapes.items()):
        if not example("finetune").is_adapter(name) and name != "head.weight":
            whole = tuple((0, size) for size in value.shape)
            state[name] = torch.from_numpy(uniform_box(number, tuple(value.shape), whole) - 0.5)
    return {**state, "head.weight": state["embedding.weight"]}


@cache
def alone() -> Trace:
    return run_ranks(1, train, {}, with_context=False)[0][0]


class Adapter(nn.Module):
    """The formula: base(x) + alpha / rank * second(first(x)), with alpha / rank = 2."""

    def __init__(self, base: nn.Linear, first: nn.Linear) -> None:
        super().__init__()
        self.base, self.first = base.requires_grad_(False), first
        self.second = nn.Linear(first.out_features, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2.0 * self.second(self.first(x))


def of_twin(name: str) -> str:
    """The name in the twin, where query, key and value are three linears with one ``first``."""
    name = re.sub(r"qkv\.(base|second)\.(query|key|value)\.", r"qkv.\2.\1.", name)
    return name.replace("qkv.first.", "qkv.query.first.")


def plain() -> Trace:
    """Plain torch from the weights with which one process of ours starts."""
    rank = example("finetune").RANK
    model = PlainGPT(**SIZES).requires_grad_(False).double()
    for block in model.blocks:
        first = nn.Linear(SIZES["hidden_size"], rank, bias=False)
        for name, base in list(block.attention.qkv.items()):
            block.attention.qkv[name] = Adapter(base, first)
        for owner, name in ((block.attention, "out"), (block.mlp, "up"), (block.mlp, "down")):
            base = getattr(owner, name)
            setattr(owner, name, Adapter(base, nn.Linear(base.in_features, rank, bias=False)))
    model.double()
    wanted = Trace()
    wanted.start = alone().start
    missing = model.load_state_dict({of_twin(name): value for name, value in wanted.start.items()}, strict=False)
    assert not missing.unexpected_keys
    assert all(re.search(r"(key|value)\.first", name) for name in missing.missing_keys)
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2, weight_decay=0.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = batch_of(step, SIZES, BATCH)
        total, count = model.loss_sum(batch["inputs"], batch["labels"])
        (total / count).backward()
        wanted.losses.append((total / count).item())
        wanted.norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), 0.5).item())
        wanted.gradients.append({name: param.grad.clone() for name, param in trained.items()})
        optimizer.step()
    wanted.end = {name: value.detach() for name, value in model.state_dict().items()}
    return wanted


def assert_follows(trace: Trace, wanted: Trace, rename: Any = str) -> None:
    for step, (mine, other) in enumerate(zip(trace.losses + trace.norms, wanted.losses + wanted.norms, strict=True)):
        assert relative(mine, other) < 1e-10, f"loss or norm {step}: {mine}, {other}"
    for mine, other in zip(trace.gradients, wanted.gradients, strict=True):
        mine = {rename(name): value for name, value in mine.items()}
        assert_close_states({name: mine[name] for name in other}, other, "gradient", atol=1e-12)
        assert len(mine) == len(other)
    end = {rename(name): value for name, value in trace.end.items()}
    assert_close_states(end, {name: wanted.end[name] for name in end}, "weight", atol=1e-10)


def test_one_process_follows_plain_torch() -> None:
    wanted = plain()
    assert_follows(alone(), wanted, of_twin)
    moved = {name for name, value in alone().end.items() if not torch.equal(value, alone().start[name])}
    assert moved == {name for name in alone().start if example("finetune").is_adapter(name)}
    # everything is as large as it must be for a mistake to be seen
    assert all(value.norm() > 1e-4 for value in wanted.gradients[-1].values())


@pytest.mark.parametrize("plan", but(PLANS.keys() - {"zero3"}, PLANS))
def test_every_plan_follows_one_process(plan: str) -> None:
    world, more = PLANS[plan]
    for trace, names in run_ranks(world, train, more, with_context=False):
        for name, value in alone().start.items():
            assert torch.equal(trace.start[name], value), f"{name} starts differently"
        assert_follows(trace, alone())
        assert names["frozen"] == []
        assert sorted(names["in the optimizer"]) == names["trained"]
        assert all(example("finetune").is_adapter(name) for name in names["trained"])
