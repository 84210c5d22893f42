"""Activation checkpointing on several ranks: the collectives it repeats, counted, and the same run under every plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from helpers.modes import BATCH, MODES, TOKENS, own, with_options
from helpers.ranks import run_ranks
from helpers.training import batch_of, config_of
from torch import Tensor

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.comm.accounting import Traffic
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.traffic import matmul_traffic

# -- what is moved again ----------------------------------------------------------------------------------------

HIDDEN, HEADS, WIDE = 24, 12, 48


def moved(context: ParallelContext, kind: str, dropout: float) -> Traffic:
    """By a step of one block."""
    block: Any = colossus.build(
        lambda: layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, dropout=dropout, activation_checkpoint=kind), context
    )
    x = own(context, torch.ones(BATCH, TOKENS, HIDDEN)).requires_grad_()
    weights = model_parallel_of(context).weights
    weights.begin_step()
    weights.set_last_microbatch()
    with accounting.count() as counted:
        layers.to_whole(block(layers.to_residual(x, block.parallel))).square().sum().backward()
        weights.end_step()
    return Traffic(counted.calls(), counted.bytes() / 4)


def repeated(context: ParallelContext) -> Traffic:
    """The formula: what the block's linears and norms move forward, but of the last product what backward needs."""
    shardings = model_parallel_of(context).shardings
    assert shardings is not None
    qkv = {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN}
    linears = [("column", HIDDEN, qkv), ("row", HIDDEN, {"": HIDDEN}), ("column", HIDDEN, {"": WIDE})]
    options, sizes = context.options, context.grid.sizes
    total = Traffic()
    for number, (split, inner, outputs) in enumerate([*linears, ("row", WIDE, {"": HIDDEN})]):
        sharding = shardings.choose(split, inner, outputs)
        assert isinstance(sharding, MatmulSharding)
        source, target = shardings.default_layouts(split)
        traffic = matmul_traffic(sharding, source, target, (BATCH, TOKENS, inner), sum(outputs.values()), sizes)
        is_last, weights = number == 3, options.weight_scope
        total += traffic.x.forward if options.keep_gathered or not is_last else Traffic()
        total += traffic.w.forward if weights == "microbatch" or (weights == "matmul" and not is_last) else Traffic()
        total += Traffic() if is_last else traffic.y.forward
    outer = model_parallel_of(context).regions.residual
    ranks = context.size(outer.features) if outer.features else 1
    if ranks > 1:  # each norm gathers a mean and a square of each row
        rows = BATCH * TOKENS / context.size(outer.batch)
        total += Traffic(2, 2 * 2 * (ranks - 1) * rows)
    return total


@pytest.mark.rest("1d", "1d_sequence")
@pytest.mark.parametrize(
    "mode", ["1d", "1d_sequence", "2d", *(pytest.param(name, marks=pytest.mark.long) for name in ("2.5d_depth2", "3d"))]
)
def test_a_block_repeats_no_collective_that_nothing_needs(mode: str) -> None:
    def body(context: ParallelContext) -> list[Any]:
        found: list[Any] = []
        for keep, weights in ((False, "matmul"), (True, "matmul"), (False, "microbatch"), (True, "step")):
            policy = dict(keep_gathered=keep, weight_scope=weights)
            under = with_options(context, **policy)
            plain, full, selective = (moved(under, kind, 0.1) for kind in ("none", "full", "selective"))
            again = Traffic(full.calls - plain.calls, full.elements - plain.elements)
            found.append((policy, again, repeated(under), selective, plain))
        return found

    for policy, again, formula, selective, plain in (entry for rank in MODES[mode].run(body) for entry in rank):
        assert again.calls == formula.calls, policy
        assert again.elements == pytest.approx(formula.elements, rel=1e-12), policy
        if policy["weight_scope"] == "matmul":
            assert selective == plain, policy  # it keeps the results


# -- the same run -----------------------------------------------------------------------------------------------

KINDS: list[Any] = [
    "full",
    "selective",
    dict(type="full", every=2),
    dict(type="full", modules=["*.mlp", "*.attention"]),
]
DROPPED = dict(dropout=0.2, num_layers=3)
PLANS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "data": (2, dict(data=2), dict(comm=dict(bucket_mb=0.01))),
    "1d": (2, dict(tensor=2), dict(model=dict(attention_dropout=0.1))),
    "1d sequence sharded": (2, dict(tensor=dict(size=2, sequence_sharded=True, weights="step")), {}),
    "ring": (2, dict(sequence=2), {}),
    "1f1b": (2, dict(pipeline=2), dict(schedule=dict(type="1f1b", microbatches=4))),
    "zb-h1": (2, dict(pipeline=2), dict(schedule=dict(type="zb-h1", microbatches=4))),
    "zb-v": (2, dict(pipeline=2), dict(schedule=dict(type="zb-v", microbatches=4))),
    "2d": (4, dict(tensor=dict(mode="2d", size=4)), {}),
    "ulysses, 1d": (4, dict(sequence=dict(size=2, mode="ulysses"), tensor=2), {}),
    "zb-v, 1d": (4, dict(pipeline=2, tensor=2), dict(schedule=dict(type="zb-v", microbatches=4))),
    "2.5d": (4, dict(tensor=dict(mode="2.5d", size=4, depth=1)), {}),
    "3d": (8, dict(tensor=dict(mode="3d", size=8)), dict(train=dict(global_batch_size=8))),
    "zb-h1, 2d": (
        8,
        dict(pipeline=2, tensor=dict(mode="2d", size=4)),
        dict(schedule=dict(type="zb-h1", microbatches=2)),
    ),
}
SHORT = ("1d",)


def run(recompute: Any, plan: dict[str, Any], more: dict[str, Any], model: Any = None, loss: Any = None) -> list[Any]:
    """Losses, norms, weights and gradients of this rank after two steps."""
    settings = config_of(plan, 2, "fp64", **{**more, "model": {**DROPPED, **more.get("model", {})}})
    settings["train"]["activation_checkpoint"] = recompute
    engine = colossus.initialize(settings, model=model, loss_fn=loss)
    out: list[Any] = []
    index, count = engine.context.index("data"), engine.context.size("data")
    for step in range(2):
        whole = batch_of(step)
        result = engine.train_step({key: value.chunk(count)[index] for key, value in whole.items()})
        out.append((result.loss, result.grad_norm))
    out += [param.detach().clone() for param in engine.model.parameters()]
    out += [param.grad.clone() for param in engine.model.parameters() if param.grad is not None]
    engine.close()
    return out


def differences(rank: int, names: list[str], kinds: list[Any], *more: Any) -> list[str]:
    found = []
    for name in names:
        ranks, plan, options = PLANS[name]
        plain = run("none", plan, options, *more)
        for kind in kinds:
            pairs = list(zip(run(kind, plan, options, *more), plain, strict=True))
            same = [is_same(mine, other, exact=ranks <= 2) for mine, other in pairs]
            if not all(same):
                found.append(f"{name}, {kind}: {same}")
    return found


def is_same(mine: Any, other: Any, *, exact: bool) -> bool:
    """To the bit; with more ranks than cores to the last digits, in which two plain runs differ, too."""
    if not isinstance(mine, Tensor):
        mine, other = (torch.tensor(each, dtype=torch.float64) for each in (mine, other))
    with as_shards():
        return torch.equal(mine, other) if exact else torch.allclose(mine, other, rtol=1e-12, atol=1e-15)


def by_ranks(names: Iterable[str]) -> list[list[str]]:
    def ranks(name: str) -> int:
        return PLANS[name][0]

    return [list(group) for _, group in itertools.groupby(sorted(names, key=ranks), ranks)]


LONG = [name for name in PLANS if name not in SHORT]


@pytest.mark.parametrize(
    "names",
    [
        *by_ranks(SHORT),
        *(pytest.param(names, marks=pytest.mark.long) for names in by_ranks(LONG)),
    ],
    ids=", ".join,
)
def test_every_plan_trains_the_same(names: list[str]) -> None:
    for found in run_ranks(PLANS[names[0]][0], differences, names, KINDS, with_context=False):
        assert not found, "\n".join(found)
