"""Fewer key/value heads than ranks: all of these store them, and each multiplies by the head of its queries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.laws import assert_parity
from helpers.modes import Mode
from helpers.parts import laid_out
from helpers.ranks import RankError, run_ranks
from helpers.training import batch_of, config_of, run_plan, shared_run

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.comm.accounting import Traffic
from colossus.config import load_config
from colossus.construct.build_model import build
from colossus.context.grid import LayerOptions, build_grid
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.models.gpt import GPT
from colossus.sharded_tensor.tensor import plain
from colossus.state.model_state_dict import full_state_dict, load_full_state_dict
from colossus.tensor_parallel.traffic import matmul_traffic, route_traffic

STEPS = 3
SIZES = dict(num_layers=2, hidden_size=36, num_heads=6, ffn_hidden_size=24, vocab_size=53, seq_len=12)
LLAMA = dict(positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False)

#: world, plan, key/value heads of six heads, other options
RUNS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "1d_6_of_2": (6, dict(tensor=6), 2, {}),
    "data2_1d_2_of_1_step": (4, dict(data=2, tensor=dict(size=2, weights="step")), 1, LLAMA),
    "pipeline2_1d_3_of_1": (6, dict(pipeline=2, tensor=3), 1, {}),
    "sequence2_1d_2_of_1": (4, dict(sequence=2, tensor=2), 1, LLAMA),
    "2d_1x6_of_3": (6, dict(tensor=dict(mode="2d", shape=(1, 6))), 3, LLAMA),
    "2.5d_2_of_1": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), 1, {}),
    "3d_1x2x2_2_of_1": (4, dict(tensor=dict(mode="3d", shape=(1, 2, 2))), 1, LLAMA),
}
#: much like others
FOR_LONG = (
    "1d_6_of_2",
    "pipeline2_1d_3_of_1",
    "2.5d_2_of_1",
    "3d_1x2x2_2_of_1",
    "2d_1x6_of_3",
)


def _config(parallel: dict[str, Any], kv_heads: int, options: dict[str, Any], **more: Any) -> dict[str, Any]:
    model = dict(type="GPT", **SIZES, num_kv_heads=kv_heads, **options)
    return config_of(parallel, STEPS, "fp64", model=model, schedule=dict(microbatches=2), **more)


@pytest.mark.rest("data2_1d_2_of_1_step")
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if name in FOR_LONG else ()) for name in RUNS],
)
def test_few_kv_heads_follow_the_one_process_run(name: str) -> None:
    """Losses, norms, every gradient and weight."""
    world, parallel, kv_heads, options = RUNS[name]
    reference = shared_run(1, _config({}, kv_heads, options), STEPS)[0]
    assert_parity(run_plan(world, _config(parallel, kv_heads, options), STEPS), reference, "fp64")


def _own_weights(rank: int) -> list[torch.Tensor]:
    """Keys' and values' on this rank after some steps in float32."""
    model = dict(type="GPT", **{**SIZES, "num_heads": 4}, num_kv_heads=2)
    engine = colossus.initialize(config_of(dict(tensor=4), STEPS, "fp32", model=model))
    for step in range(STEPS):
        engine.train_step(batch_of(step, model))
    projections = engine.model.blocks[0].attention.qkv
    return [projections.get_submodule(name).weight.detach().clone() for name in ("key", "value")]


def test_replicated_weights_stay_equal_to_the_bit() -> None:
    first, *others = run_ranks(4, _own_weights, with_context=False)
    for weights in others:
        for mine, other in zip(first, weights, strict=True):
            assert torch.equal(mine, other)


# -- what moves -----------------------------------------------------------------------------------------------

MODES = {
    "1d": (Mode("1d", (6,)), 2),
    "1d_sequence": (Mode("1d", (2,), sequence_sharded=True), 1),
    "2d": (Mode("2d", (2, 2)), 1),
    "3d": (Mode("3d", (1, 2, 2)), 1),
}


def _moved(context: ParallelContext, kv_heads: int, microbatches: int) -> tuple[Traffic, Traffic]:
    """Of the projections: what is counted, and what the formula says of x moved once and of three products."""
    hidden, heads = 36, 6
    layer = build(lambda: layers.Attention(hidden, heads, kv_heads), context).qkv
    parallel, sizes, shape = model_parallel_of(context), context.grid.sizes, (8, 6, hidden)
    residual, inner = parallel.regions.residual, parallel.regions.inner
    x = torch.zeros(residual.at(3).chunk(shape, sizes), requires_grad=True)
    parallel.weights.begin_step()
    with accounting.count() as moved:
        for _ in range(microbatches):
            outputs = layer(laid_out(x * 1.0, residual, parallel))
            sum(plain(part).sum() for part in outputs).backward()
        parallel.weights.end_step()
    once = route_traffic(residual.at(3), layer.x_layout.at(3), math.prod(shape), sizes)
    formula = (once.forward + once.backward) * microbatches
    copies = context.size(inner.features) // kv_heads
    for name, out in layer.outputs.items():
        sharding = layer.get_submodule(name).sharding
        # of y there is one head a rank; of the weight there are the heads that are
        moves = matmul_traffic(sharding, layer.x_layout, inner, shape, out, sizes)
        if name != "query":
            whole = matmul_traffic(sharding, layer.x_layout, inner, shape, out * copies, sizes)
            moves = replace(moves, y=whole.y)
        formula += moves.step(microbatches)
    return Traffic(moved.calls(), moved.bytes() / 4), formula


@pytest.mark.rest("1d", "2d")
@pytest.mark.parametrize("name", MODES)
def test_counted_bytes_are_the_formula(name: str) -> None:
    mode, kv_heads = MODES[name]
    for counted, formula in mode.run(_moved, kv_heads, 2):
        assert counted.calls == formula.calls
        assert counted.elements == pytest.approx(formula.elements, rel=1e-12)


# -- what is stored -------------------------------------------------------------------------------------------

SMALL: dict[str, Any] = dict(num_layers=1, hidden_size=24, num_heads=4, num_kv_heads=1, vocab_size=11, seq_len=6)
PLANS: list[dict[str, Any]] = [
    dict(size=4),
    dict(mode="2d", size=4),
    dict(mode="3d", shape=(1, 2, 2)),
    dict(mode="2.5d", size=4, depth=1),
]


def _stored(context: ParallelContext) -> list[dict[str, torch.Tensor]]:
    """The state dict of one plan after another, each loaded with that of the one before, its values doubled."""
    states: list[dict[str, torch.Tensor]] = []
    for plan in PLANS:
        config = load_config(dict(parallel=dict(tensor=plan), train=dict(seed=5)), nproc=4)
        options = LayerOptions.from_config(config)
        own = ParallelContext(build_grid(config.parallel), context.rank, seed=5, options=options)
        model = build(lambda: GPT(**SMALL), own)
        states.append(full_state_dict(model, own))
        doubled = {name: 2 * value for name, value in states[0].items()}
        load_full_state_dict(model, doubled, own)
        for name, value in full_state_dict(model, own).items():
            assert torch.equal(value, doubled[name]), (plan, name)
        own.close()
    return states


def test_state_dicts_are_logical_and_ranks_store_what_is_counted() -> None:
    ranks = run_ranks(4, _stored)
    alone = ParallelContext(build_grid(load_config({}).parallel), seed=5)
    whole = full_state_dict(build(lambda: GPT(**SMALL), alone), alone)
    assert whole["blocks.0.attention.qkv.key.weight"].shape == (6, 24)
    for states in ranks:
        for state in states:
            assert state.keys() == whole.keys()
            for name, value in whole.items():
                assert torch.equal(state[name], value), name


def test_heads_that_do_not_divide_the_ranks_are_refused() -> None:
    def body(context: ParallelContext) -> None:
        build(lambda: layers.Attention(36, 6, 2), context)

    message = "num_kv_heads = 2 does not divide the 3 ranks of tensor: .* each must serve equally many ranks"
    with pytest.raises(RankError, match=message):
        run_ranks(3, body)
