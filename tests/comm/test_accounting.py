"""Bytes and calls counted equal the formulas of the ring algorithms, whatever algorithm ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.parts import laid_out
from helpers.ranks import grid, run_ranks

from colossus import layers
from colossus.comm import accounting, collectives
from colossus.comm.conjugate import conjugate
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.sharded_tensor.tensor import plain

# -- the counter ----------------------------------------------------------------------------------------------


def test_sums_by_axes_and_operation() -> None:
    counter = accounting.Counter()
    counter.add("all_reduce", "tensor", torch.float32, 10)
    counter.add("all_reduce", "tensor", torch.float32, 5)
    counter.add("all_reduce", "data", torch.float64, 100)
    counter.add("all_gather", "tensor", torch.float32, 1000)
    assert (counter.calls(), counter.bytes()) == (4, 1115)
    assert (counter.calls("tensor"), counter.bytes("tensor")) == (3, 1015)
    assert (counter.calls(operation="all_reduce"), counter.bytes(operation="all_reduce")) == (3, 115)
    assert (counter.calls("data", "all_gather"), counter.bytes("data", "all_gather")) == (0, 0)
    assert counter.rows() == [
        {"operation": "all_gather", "axes": "tensor", "dtype": "float32", "calls": 1, "bytes": 1000},
        {"operation": "all_reduce", "axes": "data", "dtype": "float64", "calls": 1, "bytes": 100},
        {"operation": "all_reduce", "axes": "tensor", "dtype": "float32", "calls": 2, "bytes": 15},
    ]


# -- collectives ----------------------------------------------------------------------------------------------


def _each(context: ParallelContext) -> dict[str, Any]:
    out = {}
    x = torch.zeros(6, 4, dtype=torch.float64)
    for axes in ("tensor", "data", ("data", "tensor")):
        group = context.group(axes)
        calls = {
            "all_reduce": lambda group=group: collectives.all_reduce(x, group),
            "all_gather": lambda group=group: collectives.all_gather(x, group, 1),
            "reduce_scatter": lambda group=group: collectives.reduce_scatter(x.repeat(2, 1), group, 0),
            "all_to_all": lambda group=group: collectives.all_to_all(x.repeat(1, 3), group, 0, 1),
        }
        for name, call in calls.items():
            with accounting.count() as moved:
                call().wait()
            out[name, str(group)] = moved.rows()
    return out


def test_every_collective_counts_its_ring_bytes() -> None:
    """With S bytes on a rank: all-reduce 2(n-1)/n S, all-gather (n-1) S, reduce-scatter and all-to-all (n-1)/n S."""
    size = 6 * 4 * 8
    for rank in run_ranks(6, _each, plan=grid(data=2, tensor=3)):
        for axes, n in (("tensor", 3), ("data", 2), ("dataxtensor", 6)):
            expected = {
                "all_reduce": 2 * (n - 1) / n * size,
                "all_gather": (n - 1) * size,
                "reduce_scatter": (n - 1) / n * 2 * size,
                "all_to_all": (n - 1) / n * 3 * size,
            }
            for name, sent in expected.items():
                (row,) = rank[name, axes]
                assert row == {"operation": name, "axes": axes, "dtype": "float64", "calls": 1, "bytes": sent}


def _conjugates(context: ParallelContext) -> dict[str, Any]:
    group = context.group("tensor")
    out = {}
    for pair in [
        ("gather", "reduce_scatter"),
        ("sum", "identity"),
        ("slice", "gather"),
        ("slice", "pad"),
        ("gather", "slice"),
    ]:
        x = torch.zeros(4, 3, requires_grad=True)
        with accounting.count() as there:
            y = conjugate(x, *pair, group, 0)
        with accounting.count() as back:
            y.sum().backward()
        out["/".join(pair)] = there.bytes(), back.bytes()
    return out


def test_conjugates_count_forward_and_backward() -> None:
    s = 4 * 3 * 4
    expected = {
        "gather/reduce_scatter": (s, s),
        "sum/identity": (s, 0),
        "slice/gather": (0, s / 2),
        "slice/pad": (0, 0),
        "gather/slice": (s, 0),
    }
    assert run_ranks(2, _conjugates) == [expected] * 2


# -- a transformer block --------------------------------------------------------------------------------------

BATCH, TOKENS, HIDDEN = 2, 8, 16
ELEMENTS = BATCH * TOKENS * HIDDEN  # S h, of the whole activation


def _block(context: ParallelContext, options: dict[str, Any]) -> dict[str, Any]:
    block = build(lambda: layers.TransformerBlock(HIDDEN, 4, **options), context)
    parallel = block.parallel
    tokens = TOKENS // context.size("tensor") if context.options.sequence_sharded else TOKENS
    outer = parallel.regions.residual
    x = torch.randn(BATCH, tokens, HIDDEN, requires_grad=True)
    with accounting.count() as there:
        y = block(laid_out(x * 1.0, outer, parallel))
    with accounting.count() as back:
        plain(y).sum().backward()
    assert x.grad is not None
    return {
        "forward": (there.calls(), there.bytes()),
        "backward": (back.calls(), back.bytes()),
        "operations": {row["operation"]: row["calls"] for row in there.rows() + back.rows()},
        "axes": {row["axes"] for row in there.rows() + back.rows()},
    }


OPTIONS = [{}, {"mlp": "swiglu", "norm": "rmsnorm", "bias": False, "num_kv_heads": 4}]


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=["gelu", "swiglu"])
def test_block_1d(world: int, options: dict[str, Any]) -> None:
    """One all-reduce for each of attention and MLP in forward and one in backward: 8 (p-1)/p S h elements in 4 calls.

    (Hidden 512, tokens 128, batch 16 in fp32 on 4 ranks: 25.2 MB.)
    """
    one = 2 * (world - 1) / world * ELEMENTS * 4
    for counted in run_ranks(world, _block, options):
        assert counted["forward"] == (2, 2 * one)
        assert counted["backward"] == (2, 2 * one)
        assert sum(counted[part][1] for part in ("forward", "backward")) == 8 * (world - 1) / world * ELEMENTS * 4
        assert counted["axes"] == {"tensor"}
    assert pytest.approx(25.2e6, rel=0.002) == 8 * 3 / 4 * 16 * 128 * 512 * 4


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=["gelu", "swiglu"])
def test_block_1d_sequence_sharded(world: int, options: dict[str, Any]) -> None:
    """Each half of the block gathers its input and scatters its output: 4 (p-1)/p S h elements in 4 calls forward.

    Backward gathers the gradient of the output, gathers the input once more (it is not kept whole) for the weight's
    gradient, and scatters the gradient of the input: 6 (p-1)/p S h in 6 calls. In all 10 (p-1)/p S h.
    """
    one = (world - 1) / world * ELEMENTS * 4
    for counted in run_ranks(world, _block, options, sequence_sharded=True):
        assert counted["forward"] == (4, 4 * one)
        assert counted["backward"] == (6, 6 * one)
        assert counted["axes"] == {"tensor"}
        assert counted["operations"].keys() == {"all_gather", "reduce_scatter"}


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_block_recomputed(kind: str) -> None:
    """Full recomputation repeats the forward's traffic but for the block's last reduction; selective repeats none."""
    one = 2 * 1 / 2 * ELEMENTS * 4
    for counted in run_ranks(2, _block, {"activation_checkpoint": kind}):
        again = one if kind == "full" else 0
        assert counted["forward"] == (2, 2 * one)
        assert counted["backward"][1] == 2 * one + again
