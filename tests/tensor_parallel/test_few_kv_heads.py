"""Fewer key/value heads than ranks: each head has copies on neighbouring ranks, whose gradients are summed once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modes import Mode
from helpers.ranks import RankError, run_ranks
from helpers.training import assert_same_numbers, assert_same_run, batch_of, config_of, run_plan, shared_run

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict, load_full_state_dict
from colossus.comm import accounting
from colossus.comm.cost import Traffic, move_traffic
from colossus.config import load_config
from colossus.construct.build_model import build
from colossus.context.grid import build_grid
from colossus.context.layer_options import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.copies import CopiedGradients
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import spec_of
from colossus.models.gpt import GPT
from colossus.models.options import GPTOptions
from colossus.tensor_parallel.traffic import matmul_traffic

FP64 = dict(loss=1e-10, norm=1e-10, parameter=1e-9)
STEPS = 3
SIZES = dict(num_layers=2, hidden_size=36, num_heads=6, ffn_hidden_size=24, vocab_size=53, seq_len=12)
LLAMA = dict(positions="rotary", norm="rmsnorm", mlp="swiglu", bias=False)

#: world, plan, key/value heads of six heads, other options
RUNS: dict[str, tuple[int, dict[str, Any], int, dict[str, Any]]] = {
    "1d_6_of_2": (6, dict(tensor=6), 2, {}),
    "1d_sharded_2_of_1": (2, dict(tensor=dict(size=2, sequence_sharded=True)), 1, LLAMA),
    "data2_1d_2_of_1_step": (4, dict(data=2, tensor=dict(size=2, weights="step")), 1, LLAMA),
    "pipeline2_1d_3_of_1": (6, dict(pipeline=2, tensor=3), 1, {}),
    "sequence2_1d_2_of_1": (4, dict(sequence=2, tensor=2), 1, LLAMA),
    "2d_2_of_1": (4, dict(tensor=dict(mode="2d", size=4)), 1, {}),
    "2d_1x6_of_3": (6, dict(tensor=dict(mode="2d", shape=(1, 6))), 3, LLAMA),
    "2.5d_2_of_1": (8, dict(tensor=dict(mode="2.5d", size=8, depth=2)), 1, {}),
    "3d_2_of_1": (8, dict(tensor=dict(mode="3d", size=8)), 1, {}),
    "3d_1x2x2_2_of_1": (4, dict(tensor=dict(mode="3d", shape=(1, 2, 2))), 1, LLAMA),
}
#: much like others
FOR_LONG = (
    "1d_6_of_2",
    "1d_sharded_2_of_1",
    "pipeline2_1d_3_of_1",
    "2d_2_of_1",
    "2.5d_2_of_1",
    "3d_2_of_1",
    "3d_1x2x2_2_of_1",
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
    traces = run_plan(world, _config(parallel, kv_heads, options), STEPS)
    for trace in traces:
        assert_same_run(trace, reference, **FP64)
        assert_same_numbers(trace, reference)


def _own_rows(rank: int) -> list[torch.Tensor]:
    """Rows of keys and values on this rank after some steps in float32."""
    model = dict(type="GPT", **{**SIZES, "num_heads": 4}, num_kv_heads=2)
    engine = colossus.initialize(config_of(dict(tensor=4), STEPS, "fp32", model=model))
    for step in range(STEPS):
        engine.train_step(batch_of(step, model))
    spec = spec_of(engine.model.blocks[0].attention.qkv.weight)
    assert spec is not None
    query, *others = (shard.rows for shard in spec.shards)
    weight = engine.model.blocks[0].attention.qkv.weight.detach()
    assert weight.shape[0] == query[1] + 2 * 9
    return [weight[slice(*rows)].clone() for rows in others]


def test_copies_stay_equal_to_the_bit() -> None:
    ranks = run_ranks(4, _own_rows, with_context=False)
    for first, second, same in ((0, 1, True), (2, 3, True), (1, 2, False)):
        for mine, other in zip(ranks[first], ranks[second], strict=True):
            assert torch.equal(mine, other) is same


# -- what moves -----------------------------------------------------------------------------------------------

MODES = {
    "1d": (Mode("1d", (6,)), 2),
    "1d_sequence": (Mode("1d", (2,), sequence_sharded=True), 1),
    "2d": (Mode("2d", (2, 2)), 1),
    "3d": (Mode("3d", (1, 2, 2)), 1),
}


def _moved(context: ParallelContext, kv_heads: int, microbatches: int) -> list[tuple[Traffic, Traffic]]:
    """Of the projections, and of the sum over the copies: what is counted, and what the formula says."""
    hidden, heads = 36, 6
    layer = build(lambda: layers.Attention(hidden, heads, kv_heads), context)
    linear, parallel, sizes = layer.qkv, model_parallel_of(context), context.grid.sizes
    assert parallel.shardings is not None
    assert linear.sharding is not None
    source, target = parallel.shardings.default_layouts("column")
    shape = (8, 6, hidden)
    x = torch.zeros(source.at(3).chunk(shape, sizes), requires_grad=True)
    parallel.weights.begin_step()
    with accounting.count() as moved:
        for _ in range(microbatches):
            sum(part.sum() for part in linear.apply_local(x, source, target)).backward()
        parallel.weights.end_step()
    ranks = context.size(parallel.regions.inner.features)
    copies = ranks // kv_heads
    computed = hidden + 2 * copies * kv_heads * (hidden // heads)
    formula = matmul_traffic(linear.sharding, source, target, shape, computed, sizes)
    found = [(Traffic(moved.calls(), moved.bytes() / 4), formula.step(microbatches))]
    with accounting.count() as moved:
        CopiedGradients(layer.parameters(), context).sum()
    # one head of keys and one of values with their biases; the weights are split by inputs over the other ranks
    held = 2 * (hidden // heads) * (hidden // (context.world_size // ranks) + 1)
    flags = 4
    found.append((Traffic(moved.calls(), moved.bytes() / 4), move_traffic("sum", copies, held + flags)))
    return found


@pytest.mark.parametrize("name", MODES)
def test_counted_bytes_are_the_formula(name: str) -> None:
    """A projection moves what one with as many heads as ranks does; the copies add one all-reduce of their rows."""
    mode, kv_heads = MODES[name]
    for each in mode.run(_moved, kv_heads, 2):
        for counted, formula in each:
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
        parallel = config.parallel
        own = ParallelContext(build_grid(parallel), context.rank, seed=5, options=LayerOptions.from_config(parallel))
        model = build(lambda: GPT(**SMALL), own)
        held = sum(parameter.numel() for parameter in model.parameters())
        assert held == GPTOptions(**SMALL).num_parameters_per_rank(parallel), plan
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
            assert list(state) == list(whole)
            for name, value in whole.items():
                assert torch.equal(state[name], value), name


def _keys_alone(context: ParallelContext) -> float:
    """A column linear that has copies of all its outputs, as of the memory of a cross-attention."""
    x = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    scales = torch.arange(1.0, 5.0, dtype=torch.float64)  # of each of the four features, among them two copies each
    copies = {"key": 2, "value": 2}
    linear = build(lambda: layers.Linear(6, {"key": 2, "value": 2}, split="column", copies=copies), context)
    linear.double()
    sum((layers.to_whole(part) * scales).square().sum() for part in linear(x)).backward()
    CopiedGradients(linear.parameters(), context).sum()
    plain = {name: weight.requires_grad_() for name, weight in full_state_dict(linear, context).items()}
    parts = [x @ plain[f"{name}.weight"].t() + plain[f"{name}.bias"] for name in ("key", "value")]
    sum((part.repeat_interleave(2, -1) * scales).square().sum() for part in parts).backward()
    gradients = full_state_dict(linear, context, gradients=True)
    return max((gradients[name] - plain[name].grad).abs().max().item() for name in plain)


def test_a_linear_of_ones_own_has_copies() -> None:
    assert max(run_ranks(4, _keys_alone)) < 1e-10


def test_heads_that_cannot_have_equally_many_copies_are_refused() -> None:
    def body(context: ParallelContext) -> None:
        build(lambda: layers.Attention(36, 6, 2), context)

    said = "num_kv_heads = 2 does not divide the 3 ranks of tensor: .* copied, each to as many ranks; nearest: 1"
    with pytest.raises(RankError, match=said):
        run_ranks(3, body)
