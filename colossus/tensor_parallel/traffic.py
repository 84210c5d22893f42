"""The traffic of a matmul by formula: the calls of one rank and the elements that it sends. No torch.

The moves of every mode follow from its sharding, so one formula serves all modes. A test compares it with the count
when the layers run. Elements are the nominal count of `colossus.comm.accounting`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from colossus.comm.accounting import Traffic, move_traffic
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import Move, moves
from colossus.tensor_parallel.mode import AxisSizes, MatmulSharding

#: move -> exponent e: over n ranks, the move multiplies the elements that a rank has by n ** e
_GROWTH = {"gather": 1, "pad": 1, "reduce_scatter": -1, "slice": -1}


@dataclass(frozen=True)
class RouteTraffic:
    """The traffic of one operand: its moves in forward, and those of its gradient in backward."""

    forward: Traffic
    backward: Traffic


def sized_moves(source: Layout, target: Layout, elements: int, sizes: AxisSizes) -> Iterator[tuple[Move, float, float]]:
    """Yield the moves of a tensor with ``elements`` elements in all, each with a rank's elements before and after."""
    local = elements / math.prod(source.num_shards(sizes))
    for move in moves(source, target):
        after = local * float(math.prod(sizes[axis] for axis in move.axes)) ** _GROWTH.get(move.forward, 0)
        yield move, local, after
        local = after


def route_traffic(source: Layout, target: Layout, elements: int, sizes: AxisSizes) -> RouteTraffic:
    """Return the traffic of the moves from ``source`` to ``target`` of a tensor with ``elements`` elements in all."""
    forward = backward = Traffic()
    for move, before, after in sized_moves(source, target, elements, sizes):
        ranks = math.prod(sizes[axis] for axis in move.axes)
        forward += move_traffic(move.forward, ranks, before)
        backward += move_traffic(move.backward, ranks, after)
    return RouteTraffic(forward, backward)


@dataclass(frozen=True)
class MatmulTraffic:
    """The traffic of one linear for one batch, by operand."""

    x: RouteTraffic
    w: RouteTraffic
    y: RouteTraffic

    def forward(self) -> Traffic:
        return self.x.forward + self.w.forward + self.y.forward

    def backward(self, *, keep: bool = False, weights: str = "matmul") -> Traffic:
        """Return the traffic of the gradients of x and w.

        Args:
            keep: whether backward uses the x that forward gathered; else it gathers x again.
            weights: scope of the weight (see `GatheredWeights`); ``step`` counts one microbatch of a step.
        """
        again = (Traffic() if keep else self.x.forward) + (self.w.forward if weights == "matmul" else Traffic())
        return self.y.backward + self.x.backward + self.w.backward + again

    def step(self, microbatches: int, *, keep: bool = False, weights: str = "matmul") -> Traffic:
        """Return the traffic of a step. With scope ``step`` the weight moves once in each direction."""
        microbatch = self.forward() + self.backward(keep=keep, weights=weights)
        if weights != "step":
            return microbatch * microbatches
        once = self.w.forward + self.w.backward
        activations = Traffic(microbatch.calls - once.calls, microbatch.elements - once.elements)
        return activations * microbatches + once


def matmul_traffic(
    sharding: MatmulSharding,
    source: Activation,
    target: Activation,
    shape: Sequence[int],
    out_features: int,
    sizes: AxisSizes,
) -> MatmulTraffic:
    """Return the traffic of one linear for x of global ``shape`` [.., in_features] per data replica.

    Args:
        sharding: sharding of the weight.
        source, target: layouts of x before the linear and of y behind it.
        shape: global shape of x, before any axis but data splits it.
        out_features: features of y, the sum of all outputs of a fused linear.
        sizes: ranks along each axis.
    """
    ndim, rows = len(shape), math.prod(shape[:-1])
    return MatmulTraffic(
        x=route_traffic(source.at(ndim), sharding.x.at(ndim), rows * shape[-1], sizes),
        w=route_traffic(sharding.weight, sharding.gathered_weight, shape[-1] * out_features, sizes),
        y=route_traffic(sharding.y.at(ndim), target.at(ndim), rows * out_features, sizes),
    )
