"""Gated DeltaNet beside transformers' own: outputs and every gradient under tensor modes and the sequence axis."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from helpers.delta_net_twin import delta_net
from helpers.layer_cases import integers, numbers
from helpers.long import but
from helpers.modes import MODES
from helpers.ranks import grid, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.context.grid import ONE_RANK
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.models.llama_options import LlamaOptions
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS, HIDDEN = 12, 24, 24
X, DY = numbers(BATCH, TOKENS, HIDDEN), numbers(BATCH, TOKENS, HIDDEN, seed=1)
DOCUMENTS = (integers(6, BATCH, TOKENS, seed=3) == 0).long().cumsum(1)
SIZES: dict[str, int] = dict(key_dim=4, value_dim=6)
Case = tuple[int, int, dict[str, Any], bool]
#: heads, heads of keys, further options, with documents
CASES: dict[str, Case] = {
    "as many key heads": (12, 12, {}, False),
    "half as many, chunks of 5": (12, 6, dict(chunk=5), False),
    "documents, chunks of 4": (12, 6, dict(chunk=4), True),
    "documents, a kernel of 1": (12, 6, dict(chunk=7, kernel_size=1), True),
}


class Between(nn.Module):
    """The layer where activations are split as between blocks."""

    def __init__(self, heads: int, key_heads: int, **options: Any) -> None:
        super().__init__()
        self.inner = layers.GatedDeltaNet(HIDDEN, heads, key_heads, **SIZES, **options)

    def forward(self, x: Tensor, documents: Tensor | None) -> Tensor:
        return self.inner(layers.to_residual(x), documents=documents)


Found = tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Tensor], dict[str, Tensor]]


def results(context: ParallelContext, case: Case) -> Found:
    """This rank's samples and tokens, output and gradient of the input; weights and all gradients."""
    heads, key_heads, options, packed = case
    model = colossus.build(partial(Between, heads, key_heads, **options), context, dtype=torch.float64)
    parallel = model_parallel_of(context)
    axes = parallel.regions.whole.batch
    rows = torch.arange(BATCH).chunk(context.size(axes) if axes else 1)[context.index(axes)]
    tokens = torch.arange(TOKENS)
    if parallel.sequence is not None:
        tokens = parallel.sequence.local_shard(tokens[None]).flatten()

    def own(x: Tensor) -> Tensor:
        return x[rows][:, tokens]

    x = own(X).clone().requires_grad_()
    with context:
        y = layers.to_whole(model(x, own(DOCUMENTS) if packed else None))
    y.backward(own(DY))
    for parameter in model.parameters():
        if sums := gradient_sum_axes(parameter, context):
            torch.distributed.all_reduce(parameter.grad, group=context.group(sums).process_group)
    assert x.grad is not None
    return (
        rows,
        tokens,
        layers.local(y).detach(),
        x.grad,
        full_state_dict(model, context),
        full_state_dict(model, context, gradients=True),
    )


def body(context: ParallelContext) -> list[Found]:
    return [results(context, case) for case in CASES.values()]


def gap(mine: Tensor, other: Tensor) -> float:
    return ((mine - other).norm() / other.norm()).item()


def require(of_ranks: list[list[Found]]) -> None:
    for number, (name, (heads, key_heads, options, packed)) in enumerate(CASES.items()):
        leaves = {
            key.removeprefix("inner."): value.clone().requires_grad_() for key, value in of_ranks[0][number][4].items()
        }
        x = X.clone().requires_grad_()
        kernel = {key: value for key, value in options.items() if key == "kernel_size"}
        want = delta_net(leaves, x, DOCUMENTS if packed else None, heads=heads, key_heads=key_heads, **SIZES, **kernel)
        want.backward(DY)
        assert x.grad is not None
        for results in of_ranks:
            rows, tokens, y, dx, _, gradients = results[number]
            assert gap(y, want.detach()[rows][:, tokens]) < 1e-12, name
            assert gap(dx, x.grad[rows][:, tokens]) < 1e-11, f"{name}: gradient of the input"
            assert {key.removeprefix("inner.") for key in gradients} == leaves.keys()
            for key, gradient in gradients.items():
                wanted = leaves[key.removeprefix("inner.")].grad
                assert wanted is not None
                assert gap(gradient, wanted) < 1e-11, f"{name}: gradient of {key}"


@pytest.mark.parametrize("mode", ["one", *but({*MODES} - {"1d_sequence", "3d_2x1x2"}, MODES)])
def test_every_mode_is_transformers(mode: str) -> None:
    require([body(ParallelContext(ONE_RANK))] if mode == "one" else MODES[mode].run(body))


#: ranks, sequence mode, further options of the layers
SEQUENCES: dict[str, tuple[dict[str, int], str, dict[str, Any]]] = {
    "ring 2": (dict(sequence=2), "ring", {}),
    "ring 4": (dict(sequence=4), "ring", {}),
    "ring 2 of 4 chunks": (dict(sequence=2), "ring", dict(sequence_chunks=4)),
    "ulysses 3": (dict(sequence=3), "ulysses", {}),
    "ring 2 x 1d 2": (dict(sequence=2, tensor=2), "ring", {}),
    "data 2 x ring 2": (dict(data=2, sequence=2), "ring", {}),
}


@pytest.mark.parametrize("plan", but({*SEQUENCES} - {"ulysses 3", "ring 2 x 1d 2"}, SEQUENCES))
def test_states_are_passed_along_the_sequence(plan: str) -> None:
    sizes, mode, options = SEQUENCES[plan]
    ranks = grid(**sizes)
    require(run_ranks(ranks.world_size, body, plan=ranks, sequence_mode=mode, **options))


def test_bytes_of_states_and_of_the_convolution() -> None:
    """Each rank sends its maps, and the last tokens of its runs, to all others; backward the same."""
    heads, key_heads, options, _ = CASES["half as many, chunks of 5"]

    def sent(context: ParallelContext) -> float:
        with accounting.count() as moved:
            results(context, (heads, key_heads, options, False))
        return moved.bytes(operation="all_gather") + moved.bytes(operation="reduce_scatter")

    runs, key_dim, value_dim = 2, SIZES["key_dim"], SIZES["value_dim"]
    maps = runs * BATCH * heads * key_dim * (key_dim + value_dim)
    tails = runs * BATCH * 3 * (2 * key_heads * key_dim + heads * value_dim)
    for count in run_ranks(4, sent, plan=grid(sequence=4)):
        assert count == 2 * 3 * (maps + tails) * 8


def test_what_it_does_not_do_is_told() -> None:
    context = ParallelContext(ONE_RANK)
    layer = colossus.build(partial(layers.GatedDeltaNet, HIDDEN, 4, 2), context)
    x = torch.zeros(1, 4, HIDDEN)
    with pytest.raises(ValueError, match=r"a mask over keys, but its state has no keys: give packed"):
        layer(x, mask=torch.ones(4, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match=r"attention_pattern = \('linear',\) with linear = None: linear layers need"):
        LlamaOptions(attention_pattern=("linear",))
    with pytest.raises(ValueError, match=r"num_key_heads = 3 does not divide num_heads = 4"), context:
        layers.GatedDeltaNet(HIDDEN, 4, 3)

    def narrow(context: ParallelContext) -> None:
        with context, pytest.raises(ValueError, match=r"num_key_heads = 3 is not a multiple|num_key_heads = 3 .*2"):
            layers.GatedDeltaNet(HIDDEN, 6, 3)

    run_ranks(2, narrow)

    def short(context: ParallelContext) -> None:
        layer = colossus.build(partial(layers.GatedDeltaNet, HIDDEN, 4, kernel_size=8), context)
        with pytest.raises(ValueError, match=r"cuts 24 tokens into runs of 6, fewer than the 7 tokens before it"):
            layer(torch.zeros(1, 12, HIDDEN))

    run_ranks(2, short, plan=grid(sequence=2))
