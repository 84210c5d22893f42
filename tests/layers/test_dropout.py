"""What dropout drops: by its place in the whole tensor alone, at the rate it says, independently of all else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.modes import MODES
from helpers.ranks import RankError, grid, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.sequence_parallel.mask import CAUSAL, FULL
from colossus.sharded_tensor.placement import Place, placement_of
from colossus.sharded_tensor.regions import with_sequence
from colossus.sharded_tensor.tensor import plain, wrap

SAMPLES, TOKENS, HEADS, DIM = 2, 8, 3, 5


class Net(nn.Module):
    def __init__(self, rate: float = 0.4) -> None:
        super().__init__()
        self.drop, self.other = layers.Dropout(rate), layers.Dropout(rate)


def net_of(context: ParallelContext, rate: float = 0.4) -> Any:
    return colossus.build(lambda: Net(rate), context).train()


# -- by place -------------------------------------------------------------------------------------------------


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], -1, DIM).transpose(1, 2)


#: of [samples, tokens, heads x dim]
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda x: x,
    "tokens of all samples": lambda x: x.flatten(0, 1),
    "tokens last": lambda x: x.transpose(1, 2),
    "heads": heads,
    "heads of all samples": lambda x: heads(x).flatten(0, 1),
    "tokens of all heads": lambda x: heads(x).flatten(1, 2),
    "heads last": lambda x: heads(x).transpose(1, -1),
    "tokens and features flattened": lambda x: x.flatten(1),
}


def wrong_views(context: ParallelContext, net: Any, marked: Callable[[Tensor], Tensor]) -> list[str]:
    """Views of a split tensor of which this rank drops other elements than of the whole one."""
    ids = torch.arange(float(SAMPLES * TOKENS * HEADS * DIM)).view(SAMPLES, TOKENS, -1)
    found = []
    with net.drop.parallel.batch(BatchInfo(num_tokens=TOKENS, microbatch_size=SAMPLES)):
        for name, view in VIEWS.items():
            kept = []
            for x in (ids, marked(ids)):
                context.rng.move_to(0, 0)
                kept.append((plain(view(x)), plain(net.drop(torch.ones_like(view(x))))))
            (where, whole), (here, part) = kept
            by_id = whole.flatten()[where.flatten().argsort()]
            if not torch.equal(part.flatten(), by_id[here.flatten().long()]):
                found.append(name)
    return found


def test_a_rank_drops_what_one_process_drops_of_its_features() -> None:
    def body(context: ParallelContext) -> list[str]:
        net = net_of(context)
        up = colossus.build(lambda: layers.Linear(6, HEADS * DIM, split="column"), context)
        placement = placement_of(up(torch.ones(SAMPLES, TOKENS, 6)))
        return wrong_views(context, net, lambda x: wrap(x.chunk(3, -1)[context.rank].clone(), placement))

    assert run_ranks(3, body) == [[]] * 3


@pytest.mark.parametrize("mode", ["ring", "ulysses"])
def test_a_rank_drops_what_one_process_drops_of_its_tokens(mode: str) -> None:
    def body(context: ParallelContext) -> list[str]:
        net = net_of(context)
        parallel = model_parallel_of(context)
        assert parallel.sequence is not None
        shard = parallel.sequence.local_shard
        return wrong_views(context, net, lambda x: with_sequence(shard(x), Place(1), parallel))

    assert run_ranks(2, body, plan=grid(sequence=2), sequence_mode=mode) == [[]] * 2


def test_samples_that_a_layout_of_tokens_splits() -> None:
    """[samples, features]: one's tokens are its samples."""

    def body(context: ParallelContext) -> tuple[Tensor, Tensor]:
        net = net_of(context)
        with net.drop.parallel.batch(BatchInfo(microbatch_size=6)):
            whole = net.drop(torch.ones(6, 5))
            context.rng.move_to(0, 0)
            return whole, plain(net.drop(layers.to_residual(torch.ones(6, 5))))

    found = run_ranks(2, body, sequence_sharded=True)
    assert torch.equal(torch.cat([part for _, part in found]), found[0][0])


def test_a_tensor_without_samples_is_dropped_alike_in_all_microbatches() -> None:
    net = net_of(ParallelContext(grid()))
    found = []
    for microbatch in (0, 1):
        net.drop.context.rng.move_to(0, microbatch)
        with net.drop.parallel.batch(BatchInfo(microbatch_size=4)):
            found.append((net.drop(torch.ones(7, 5)), net.drop(torch.ones(4, 7, 5))))
    assert torch.equal(found[0][0], found[1][0])
    assert not torch.equal(found[0][1], found[1][1])


# -- by chance ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.93])
def test_it_is_dropout(rate: float) -> None:
    """The rate, the scale, and that neighbours of every kind know nothing of each other: five standard deviations."""
    context = ParallelContext(grid())
    net = net_of(context, rate)
    x = torch.full((16, 96, 129), 3.0, dtype=torch.float64)
    y = net.drop(x)
    kept = y != 0
    torch.testing.assert_close(y[kept], (x / (1 - rate))[kept], rtol=1e-15, atol=0)
    others = {"call": net.drop(x), "module": net.other(x)}
    context.rng.move_to(1, 0)
    others["step"] = net.drop(x)
    others["seed"] = net_of(ParallelContext(grid(), seed=1), rate).drop(x)

    def centred(mask: Tensor) -> Tensor:
        return (mask.double() - (1 - rate)) / math.sqrt(rate * (1 - rate))

    z = centred(kept)
    pairs = {name: (z, centred(other != 0)) for name, other in others.items()}
    for dim, name in enumerate(("sample", "token", "feature")):
        for gap in (1, 2, 3, 8):
            pairs[f"{name} + {gap}"] = z.narrow(dim, gap, z.shape[dim] - gap), z.narrow(dim, 0, z.shape[dim] - gap)
    square = z[:, :95, :128].reshape(16, 95, 64, 2)
    pairs["corners"] = square[:, 1:, :, 0] * square[:, 1:, :, 1], square[:, :-1, :, 0] * square[:, :-1, :, 1]
    for name, (one, other) in pairs.items():
        assert abs((one * other).mean().item()) * math.sqrt(one.numel()) < 5, name
    for dims in ((0, 1, 2), (0, 1), (0, 2), (1, 2)):
        means = z.mean(dims) * math.sqrt(math.prod(z.shape[dim] for dim in dims))
        assert means.abs().max() < 5
        if means.numel() > 90:  # as far apart as chance has it, no more and no less
            assert abs(means.var().item() - 1) < 5 * math.sqrt(2 / means.numel())


def test_gradients_pass_where_values_do() -> None:
    net = net_of(ParallelContext(grid()))
    x = torch.randn(4, 6, 7, dtype=torch.float64, requires_grad=True)
    y = net.drop(x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (y != 0).double() / 0.6, rtol=1e-15, atol=0)


def test_of_what_it_drops_and_of_what_not() -> None:
    context = ParallelContext(grid())
    net = net_of(context, 0.999999)
    assert net.drop(torch.ones(8, 8, 8)).count_nonzero() < 10
    assert net.drop(torch.ones(0, 8)).shape == (0, 8)
    assert net.drop(torch.ones(3)).shape == (3,)
    assert net.eval().drop(torch.ones(4, 4)).eq(1).all()


@pytest.mark.parametrize("mode", ["1d", "2d"])
def test_torchs_function_on_what_is_split_is_the_identity_or_refused(mode: str) -> None:
    def body(context: ParallelContext) -> None:
        h = colossus.build(lambda: layers.Linear(6, 12, split="column"), context)(torch.ones(2, 4, 6))
        for y in (F.dropout(h, 0.0), F.dropout(h, 0.5, training=False), F.dropout(h, 0.5, False)):
            assert torch.equal(plain(y), plain(h))
            assert placement_of(y) == placement_of(h)
        F.dropout(h, 0.1)

    with pytest.raises(RankError, match=r"draws the same numbers .* colossus.layers.Dropout\(p\) drops the same"):
        MODES[mode].run(body)


# -- attention ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_attention_drops_its_weights(causal: bool, kv_heads: int) -> None:
    """Against torch's own attention, given the mask that was drawn, under a mask that leaves one query nothing."""
    context = ParallelContext(grid())
    attention: Any = colossus.build(
        lambda: layers.Attention(12, 4, kv_heads, mask=CAUSAL if causal else FULL, dropout=0.3),
        context,
        dtype=torch.float64,
    ).train()
    kept = []

    def drop(weights: Tensor, placement: Any, draw: Any = attention.dropout.drop) -> Tensor:
        y = draw(weights, placement)
        kept.append((y != 0) | (weights == 0))
        return y

    attention.dropout.drop = drop
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    mask = torch.rand(2, 1, 5, 5) < 0.7
    mask[0, :, 2] = False
    y = attention(x, mask)
    query, key, value = (each.view(2, 5, -1, 3).transpose(1, 2) for each in attention.qkv(x))
    key, value = (each.repeat_interleave(4 // kv_heads, 1) for each in (key, value))
    seen = mask & torch.ones(5, 5, dtype=torch.bool).tril() if causal else mask
    seen = torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -math.inf)
    out, _ = torch.ops.aten._scaled_dot_product_attention_math(query, key, value, seen, 0.3, False, kept[0])
    torch.testing.assert_close(y, attention.out(out.transpose(1, 2).flatten(-2)), rtol=1e-12, atol=1e-12)
    assert not kept[0].all()
