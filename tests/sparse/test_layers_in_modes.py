"""Layers that look up rows with a sparse gradient, in every tensor mode, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared import Case, compare_all, integers, numbers, prepare
from helpers.long import but
from helpers.modes import BATCH, MODES, TOKENS, own
from helpers.ranks import grid
from helpers.sampled import sampled_loss
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of

#: divides over the ranks of all modes, and over none
DIMS = (24, 7)
ROWS = 11
MODE_NAMES = but([mode for mode in MODES if mode not in ("1d_sequence", "2d_2x3", "3d")], MODES)


class Between(nn.Module):
    """A table in front of a block."""

    def __init__(self, embedding: nn.Module, norm: nn.Module, place: Any) -> None:
        super().__init__()
        self.embedding, self.norm, self.place = embedding, norm, place

    def forward(self, ids: Tensor) -> Tensor:
        return self.norm(self.place(self.embedding(ids)))


class Bags(nn.Module):
    def __init__(self, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag

    def forward(self, ids: Tensor, weights: Tensor) -> Tensor:
        return self.bag(ids, per_sample_weights=weights)


def cases() -> Iterator[Case]:
    for dim in DIMS:
        for shape in ((BATCH,), (BATCH, TOKENS), (BATCH, 2, TOKENS)):
            yield Case(
                f"embedding of {dim}, ids {shape}",
                partial(layers.Embedding, ROWS, dim, 2, sparse=True),
                partial(nn.Embedding, ROWS, dim, 2),
                (integers(ROWS, *shape),),
            )
        for mode in ("sum", "mean", "max"):
            for sparse in (True, False):
                padding = 3 if sparse else None
                yield Case(
                    f"bag of {dim}, {mode}, sparse {sparse}",
                    partial(layers.EmbeddingBag, ROWS, dim, mode=mode, sparse=sparse, padding_idx=padding),
                    partial(nn.EmbeddingBag, ROWS, dim, mode=mode, padding_idx=padding),
                    (integers(5, BATCH, 2),),
                )
        for sparse in (True, False):
            yield Case(
                f"bag of {dim}, weights, sparse {sparse}",
                lambda d=dim, s=sparse: Bags(layers.EmbeddingBag(ROWS, d, mode="sum", sparse=s)),
                lambda d=dim: Bags(nn.EmbeddingBag(ROWS, d, mode="sum")),
                (integers(ROWS, BATCH, 4), numbers(BATCH, 4)),
            )
    yield Case(
        "in front of a block",
        lambda: Between(layers.Embedding(ROWS, 24, sparse=True), layers.LayerNorm(24), layers.to_residual),
        lambda: Between(nn.Embedding(ROWS, 24), nn.LayerNorm(24), lambda x: x),
        (integers(ROWS, BATCH, TOKENS),),
    )


CASES = list(cases())


@pytest.mark.rest("3d")
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_rows_are_looked_up_in_every_mode(mode: str) -> None:
    prepare(CASES, [torch.float64])

    def body(context: ParallelContext) -> list[str]:
        found = compare_all(context, CASES, [torch.float64])
        regions = model_parallel_of(context).regions
        layer: Any = colossus.build(
            lambda: layers.Embedding(ROWS, 24, sparse=True, return_layout=regions.residual), context
        )
        x = layer(own(context, integers(ROWS, BATCH, TOKENS)))
        if regions.residual != regions.whole and x.placement.activation != regions.residual:
            found.append(f"laid out as {x!r}")
        layers.to_whole(x).sum().backward()
        if not layer.weight.grad.is_sparse:
            found.append("a dense gradient")
        return found

    for rank, found in enumerate(MODES[mode].run(body)):
        assert not found, f"rank {rank}: " + "\n".join(found[:20])


# -- sampled softmax ------------------------------------------------------------------------------------------

HIDDEN, CLASSES, SAMPLES = 24, 53, 17


@pytest.mark.rest("2d_2x3")
@pytest.mark.parametrize("mode", MODE_NAMES)
def test_a_sampled_loss_in_every_mode(mode: str) -> None:
    """Sums, counts and all gradients; in evaluation the whole softmax, in blocks of rows."""
    x, labels = numbers(BATCH, TOKENS, HIDDEN), integers(CLASSES, BATCH, TOKENS)
    labels[1, 2:] = -100
    want: dict[str, Tensor] = {}
    alone = ParallelContext(grid())
    layer: Any = colossus.build(lambda: layers.SampledSoftmax(HIDDEN, CLASSES, SAMPLES), alone, dtype=torch.float64)
    state = full_state_dict(layer, alone)
    leaves = dict(x=x.clone(), weight=state["weight"].clone(), bias=state["bias"].clone())
    for each in leaves.values():
        each.requires_grad_()
    logits = leaves["x"] @ leaves["weight"].t() + leaves["bias"].squeeze(1)
    want["whole"] = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum").detach()
    want["sampled"] = sampled_loss(leaves["x"], labels, leaves["weight"], leaves["bias"], layer.sample())
    want["sampled"].backward()
    want |= {f"gradient of {name}": each.grad for name, each in leaves.items()}

    def body(context: ParallelContext) -> dict[str, Tensor]:
        layer: Any = colossus.build(
            lambda: layers.SampledSoftmax(HIDDEN, CLASSES, SAMPLES), context, dtype=torch.float64
        )
        mine, own_labels = own(context, x).clone().requires_grad_(), own(context, labels)
        found = {}
        batch = model_parallel_of(context).regions.whole.batch
        group = context.group(batch)
        for name in ("whole", "sampled"):
            place = layers.to_residual if name == "sampled" else lambda each: each
            loss, count = layer.train(name == "sampled")(place(mine), own_labels)
            sums = torch.stack([loss.detach(), count])
            if batch:
                torch.distributed.all_reduce(sums, group=group.process_group)
            found[name] = sums[0]
            assert int(sums[1]) == BATCH * TOKENS - 4
        loss.backward()
        found["gradient of x"] = mine.grad
        for parameter in layer.parameters():
            assert parameter.grad.is_sparse
            parameter.grad = parameter.grad.to_dense()
            if axes := gradient_sum_axes(parameter, context):
                torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
        grads = full_state_dict(layer, context, gradients=True)
        return {**found, **{f"gradient of {name}": each for name, each in grads.items()}, "own x": own(context, x)}

    for found in MODES[mode].run(body):
        first = int((x.flatten(1) == found.pop("own x")[0].flatten()).all(1).nonzero()[0])
        for name, value in found.items():
            expected = want[name]
            if name == "gradient of x":
                expected = expected[first : first + len(value)]
            torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-11, msg=lambda m, n=name: f"{n}: {m}")
