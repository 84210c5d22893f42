"""What the layers move, counted, equals the formula, in every mode and under every policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.long import long
from helpers.modes import MODES, Mode, with_options
from helpers.parts import laid_out

from colossus import layers
from colossus.comm import accounting
from colossus.comm.accounting import Traffic
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.sharded_tensor.tensor import plain
from colossus.tensor_parallel.traffic import matmul_traffic

SHAPE, WIDE = (12, 6, 24), 36
POLICIES = [(keep, weights) for keep in (False, True) for weights in ("matmul", "microbatch", "step")]


def _counted(context: ParallelContext, split: str | None, sizes: tuple[int, int], microbatches: int) -> dict[str, Any]:
    """Calls and elements of a linear over a step, and what its formula says."""
    layer = build(lambda: layers.Linear(*sizes, split=split), context)
    parallel = model_parallel_of(context)
    assert parallel.shardings is not None
    assert layer.sharding is not None
    source, target = parallel.shardings.default_layouts(split)
    local_x = torch.zeros([math.ceil(n) for n in _local(SHAPE[:2] + sizes[:1], source, context)], requires_grad=True)
    parallel.weights.begin_step()
    with accounting.count() as moved:
        for index in range(microbatches):
            y = plain(layer(laid_out(local_x * 1.0, source, parallel, return_layout=target)))
            if index == microbatches - 1:
                parallel.weights.set_last_microbatch()
            y.sum().backward()
        parallel.weights.end_step()
    formula = matmul_traffic(layer.sharding, source, target, (*SHAPE[:2], sizes[0]), sizes[1], context.grid.sizes)
    want = formula.step(microbatches, keep=context.options.keep_gathered, weights=context.options.weight_scope)
    return {"counted": Traffic(moved.calls(), moved.bytes() / 4), "formula": want}


def _local(shape: tuple[int, ...], layout: Any, context: ParallelContext) -> tuple[int, ...]:
    return layout.at(len(shape)).chunk(shape, context.grid.sizes)


def _of_every_policy(context: ParallelContext) -> list[dict[str, Any]]:
    out = []
    for keep, weights in POLICIES:
        policy = with_options(context, keep_gathered=keep, weight_scope=weights)
        for split, sizes in (("column", (24, 36)), ("row", (36, 24)), (None, (24, 36)), (None, (36, 24))):
            for microbatches in (1, 3):
                case = {"case": (keep, weights, split, sizes, microbatches)}
                out.append({**case, **_counted(policy, split, sizes, microbatches)})
    return out


@pytest.mark.parametrize("mode", ["2d", *long("1d_sequence", "1d", "2d_2x3", "2.5d_depth2", "3d", "3d_1x2x3")])
def test_counted_is_the_formula(mode: str) -> None:
    for found in MODES[mode].run(_of_every_policy):
        for entry in found:
            assert entry["counted"].calls == entry["formula"].calls, entry
            assert entry["counted"].elements == pytest.approx(entry["formula"].elements, rel=1e-12), entry


# -- the formulas of the literature ---------------------------------------------------------------------------

HIDDEN, SAMPLES, TOKENS = 512, 16, 128
S = SAMPLES * TOKENS
A, W = S * HIDDEN, HIDDEN * HIDDEN  # elements of an activation and of a square weight


def block(mode: Mode, keep: bool, weights: str) -> Traffic:
    """The four linears of a transformer block, by their shardings."""
    from colossus.layout.activation import Activation
    from colossus.registry import TENSOR_MODES
    from colossus.tensor_parallel.choose_sharding import Shardings
    from colossus.tensor_parallel.mode import MatmulSharding

    kind = TENSOR_MODES.get(mode.name)
    sizes = dict(zip(kind.axes, mode.shape, strict=True))
    shardings = Shardings.of(kind, Activation(), sizes, sequence_sharded=mode.sequence_sharded, keep=keep)
    total = Traffic()
    qkv = {"query": HIDDEN, "key": HIDDEN, "value": HIDDEN}
    for split, inner, outputs in (
        ("column", HIDDEN, qkv),
        ("row", HIDDEN, {"": HIDDEN}),
        ("column", HIDDEN, {"": 4 * HIDDEN}),
        ("row", 4 * HIDDEN, {"": HIDDEN}),
    ):
        sharding = shardings.choose(split, inner, outputs)
        assert isinstance(sharding, MatmulSharding)
        source, target = shardings.default_layouts(split)
        out = sum(outputs.values())
        total += matmul_traffic(sharding, source, target, (SAMPLES, TOKENS, inner), out, sizes).step(
            1, keep=keep, weights=weights
        )
    return total


@pytest.mark.parametrize("q", [2, 4])
def test_2d_in_closed_form(q: int) -> None:
    """Each linear moves the narrower of x and y twice, and its weight twice: 2 (q-1)/q^2 (S min(in, out) + in out)."""
    mode = Mode("2d", (q, q))
    part = (q - 1) / q**2
    assert block(mode, True, "microbatch") == Traffic(16, pytest.approx(part * (8 * A + 24 * W)))
    # gathered again: x of the expanding linears once more, every weight once more
    again = block(mode, False, "matmul")
    assert again.elements == pytest.approx(part * (10 * A + 36 * W))
    # as SUMMA is published: x, w and y move in forward and backward, 3 (q-1)/q^2 (S in + in out) for each
    assert block(mode, True, "microbatch").elements < 0.75 * 3 * part * (7 * A + 12 * W)


@pytest.mark.parametrize("p", [2, 4])
def test_1d_in_closed_form(p: int) -> None:
    """8 (p-1)/p S h in 4 calls; with activations split by tokens the same, and two gathers more unless kept."""
    assert block(Mode("1d", (p,)), False, "matmul") == Traffic(4, pytest.approx(8 * (p - 1) / p * A))
    split = Mode("1d", (p,), sequence_sharded=True)
    assert block(split, True, "matmul") == Traffic(8, pytest.approx(8 * (p - 1) / p * A))
    assert block(split, False, "matmul") == Traffic(10, pytest.approx(10 * (p - 1) / p * A))


def test_two_and_a_half_d_is_2d_of_a_share_of_the_batch() -> None:
    deep = block(Mode("2.5d", (2, 2, 2)), True, "microbatch")
    assert deep.elements == pytest.approx((8 * A / 2 + 24 * W) / 4)
