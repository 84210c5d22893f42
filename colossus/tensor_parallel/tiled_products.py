"""Products of a linear in tiles of a fixed size, summed in a fixed tree: their bits do not depend on the tensor ranks.

A library chooses the order of a sum by the shape of its product. So each dim of features is cut into the same *leaves*
whatever the number of ranks that split it, each tile is a product of its own, in a copy that is contiguous and so
aligned, and the tiles of a sum over features are added by `colossus.comm.tree_sum`. A rank's leaves are a subtree,
whose sums the ranks add in the rest of the tree (`colossus.comm.collectives`). Sums over tokens are not cut: all ranks
of a model have the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.tree_sum import tree_sum
from colossus.config.reproducible import MAX_LEAVES
from colossus.context.precision import LOW
from colossus.error_place import located_error


def num_leaves(sizes: Sequence[int], ranks: int, what: str = "features") -> int:
    """Return the number of a rank's leaves of a dim of features that is split over ``ranks``.

    Args:
        sizes: features of each output, on all ranks together.
        what: the dim, for the error.

    Raises:
        ValueError: the leaves do not divide over the ranks.
    """
    leaves = math.gcd(MAX_LEAVES, *sizes)
    if leaves % ranks:
        raise located_error(
            f"train.reproducible = 'plan': {what} of size {' + '.join(map(str, sizes))} over {ranks} tensor ranks: the "
            f"size must be a multiple of the ranks, and these 2, 4 or {MAX_LEAVES}"
        )
    return leaves // ranks


@dataclass(frozen=True)
class _Cut:
    """A rank's part of a dim of features in leaves of one size.

    Attributes:
        leaves: their number.
        order: the features leaf by leaf, [features], where a leaf has a part of each of several outputs; else None.
        inverse: the inverse permutation.
    """

    leaves: int
    order: Tensor | None = None
    inverse: Tensor | None = None

    def tiles(self, x: Tensor, dim: int) -> list[Tensor]:
        """Return the leaves of a dim, each contiguous, in float32 where x is of low precision."""
        x = x.float() if x.dtype in LOW else x
        x = x if self.order is None else x.index_select(dim, self.order)
        return [tile.clone(memory_format=torch.contiguous_format) for tile in x.chunk(self.leaves, dim)]

    def join(self, tiles: Sequence[Tensor], dim: int) -> Tensor:
        """Return the features in their own order; the inverse of `tiles`."""
        x = torch.cat(list(tiles), dim)
        return x if self.inverse is None else x.index_select(dim, self.inverse)


@lru_cache(maxsize=1024)
def _cut(rows: tuple[int, ...], ranks: int, device: torch.device) -> _Cut:
    """Return the cut of a dim of which a rank has ``rows`` of each output."""
    leaves = num_leaves([count * ranks for count in rows], ranks)
    if len(rows) == 1 or leaves == 1:
        return _Cut(leaves)
    outputs = torch.arange(sum(rows)).split(list(rows))
    order = torch.cat(
        [part for leaf in zip(*(output.chunk(leaves) for output in outputs), strict=True) for part in leaf]
    )
    return _Cut(leaves, order.to(device), order.argsort().to(device))


@dataclass(frozen=True)
class TiledProducts:
    """The products of a linear on one rank, in tiles. Shapes are per rank; results are wide: float32, or float64.

    Attributes:
        out_ranks, in_ranks: ranks that split the dims of the weight [out, in].
        rows: rows of each output of a fused weight on this rank; else empty.
    """

    out_ranks: int = 1
    in_ranks: int = 1
    rows: tuple[int, ...] = ()

    def _cuts(self, weight: Tensor) -> tuple[_Cut, _Cut]:
        out, features = weight.shape
        return _cut(self.rows or (out,), self.out_ranks, weight.device), _cut((features,), self.in_ranks, weight.device)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        """Return x @ w.T: x [.., in], w [out, in] to [.., out]."""
        outputs, inputs = self._cuts(w)
        return _multiply(x, w, outputs, inputs)

    def dgrad(self, dy: Tensor, w: Tensor) -> Tensor:
        """Return dy @ w: dy [.., out], w [out, in] to [.., in]."""
        outputs, inputs = self._cuts(w)
        return _multiply(dy, w.t(), inputs, outputs)

    def wgrad(self, dy: Tensor, x: Tensor, w: Tensor) -> Tensor:
        """Return dy.T @ x, summed over all dims but the last: dy [.., out], x [.., in] to [out, in]."""
        outputs, inputs = self._cuts(w)
        dys, xs = outputs.tiles(_rows(dy), 1), inputs.tiles(_rows(x), 1)
        return outputs.join([inputs.join([tile.t() @ other for other in xs], 1) for tile in dys], 0)

    def bias_gradient(self, dy: Tensor, w: Tensor) -> Tensor:
        """Return dy [.., out] summed over all dims but the last: [out]."""
        outputs, _ = self._cuts(w)
        return outputs.join([tile.sum(0) for tile in outputs.tiles(_rows(dy), 1)], 0)


def _multiply(x: Tensor, w: Tensor, outputs: _Cut, inputs: _Cut) -> Tensor:
    """Return x [.., in] @ w [out, in].T, with a tile for each pair of leaves."""
    xs = inputs.tiles(_rows(x), 1)
    products = [
        tree_sum([F.linear(a, b) for a, b in zip(xs, inputs.tiles(rows, 1), strict=True)])
        for rows in outputs.tiles(w, 0)
    ]
    return outputs.join(products, 1).view(*x.shape[:-1], -1)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])
