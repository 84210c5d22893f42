"""PowerSGD (1905.13727): matrices of gradients travel as two factors of low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.comm.staged import Staged, Stages
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.gradients.bucket_sum import TwoLevelSum
from colossus.gradients.compression import CompressionMemory, ErrorBuffer
from colossus.layout.parameter import spec_of


@dataclass(frozen=True)
class PowerSGD:
    """As torch's `PowerSGDState` has them.

    Attributes:
        rank: of the factors, at most.
        start_step: steps from the first on that are not compressed.
        warm_start: begin each step with the factor of the one before, else with a random one.
        min_compression_rate: a matrix travels as factors if they have fewer than one in so many of its elements.
    """

    rank: int
    start_step: int
    warm_start: bool
    min_compression_rate: float

    def rank_of(self, rows: int, cols: int) -> int | None:
        """Of the factors of a matrix; None where it travels whole."""
        rank = min(rows, cols, self.rank)
        return rank if rank and (rows + cols) * rank * self.min_compression_rate < rows * cols else None


@dataclass(frozen=True)
class _Matrix:
    """A parameter as a matrix, of whose rows each rank of a host has as many, the last ones fewer.

    Attributes:
        number: of the parameter in the bucket.
        height: rows of a rank.
        rank: of its factors.
    """

    number: int
    rows: int
    cols: int
    height: int
    rank: int

    @property
    def numel(self) -> int:
        """Of a rank."""
        return self.height * self.cols


class PowerSum:
    """M = sum of M_i as P Q^T: P = orthonormal basis of sum of M_i Q', Q = sum of M_i^T P, with Q' of the step before.

    What P Q^T / n leaves out of a rank's M_i is added to its next one. All else of a bucket travels as it is. Under two
    levels each rank of a host has rows of every matrix.

    Args:
        whole, inner, outer: see `LowSum`.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        whole: AxisGroup,
        inner: AxisGroup,
        outer: AxisGroup,
        options: PowerSGD,
        memory: CompressionMemory,
    ) -> None:
        self._params, self._whole, self._inner, self._outer = list(params), whole, inner, outer
        self._options, self._memory = options, memory
        self._error: ErrorBuffer | None = None
        self._exact = TwoLevelSum(inner, outer)
        self._matrices: list[_Matrix] = []
        for number, param in enumerate(params):
            rows = param.shape[0] if param.dim() else 0
            cols, height = param.numel() // max(1, rows), -(-rows // inner.size)
            rank = options.rank_of(height, cols)
            if rank is not None:
                self._matrices.append(_Matrix(number, rows, cols, height, rank))
        compressed = {matrix.number for matrix in self._matrices}
        self._rest = [number for number in range(len(params)) if number not in compressed]

    def start(self, flat: Tensor) -> Pending:
        return Staged(self._stages(flat))

    def _stages(self, flat: Tensor) -> Stages:
        flat = yield collectives.all_reduce(flat, self._whole, owned=True)
        if self._memory.step < self._options.start_step or not self._matrices:
            return (yield from self._exact.stages(flat))
        share = yield collectives.reduce_scatter(self._by_rank(flat), self._inner)
        wide = share.flatten().float() if share.dtype in LOW else share.flatten()
        own = list(self._own_rows(wide))
        rest = wide[sum(matrix.numel for matrix in self._matrices) :]
        errors = self._own_errors(wide.dtype)
        for rows, (owed, _) in zip(own, errors, strict=True):
            rows[: len(owed)] += owed
        starts = [self._start(matrix, wide) for matrix in self._matrices]
        left = [rows @ start for rows, start in zip(own, starts, strict=True)]
        summed = yield collectives.all_reduce(torch.cat([rest, *(p.flatten() for p in left)]), self._outer, owned=True)
        rest.copy_(summed[: rest.numel()])
        left = [torch.linalg.qr(p)[0] for p in _as(summed[rest.numel() :], [p.shape for p in left])]
        right = [rows.T @ p for rows, p in zip(own, left, strict=True)]
        summed = yield collectives.all_reduce(torch.cat([q.flatten() for q in right]), self._outer, owned=True)
        right = list(_as(summed, [q.shape for q in right]))
        for matrix, rows, (_, error), p, q in zip(self._matrices, own, errors, left, right, strict=True):
            approximated = p @ q.T
            rows -= approximated / self._outer.size
            # a gradient that is not finite, whose step is skipped, leaves nothing behind
            torch.nan_to_num(rows[: len(error)], nan=0.0, posinf=0.0, neginf=0.0, out=error)
            rows.copy_(approximated)
            if self._options.warm_start:
                self._keep(matrix, q.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0))
        whole = yield collectives.all_gather(wide.to(flat.dtype), self._inner)
        return self._in_place(whole.view(self._inner.size, -1), flat)

    # -- rows of each rank of a host ------------------------------------------------------------------------

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Of each parameter, and last the flags."""
        return list(flat.split([*(param.numel() for param in self._params), len(self._params)]))

    def _by_rank(self, flat: Tensor) -> Tensor:
        """[ranks of a host, what each sums]: rows of each matrix, then a part of all else."""
        pieces, num_inner = self._pieces(flat), self._inner.size
        of_ranks = [
            F.pad(pieces[matrix.number], (0, num_inner * matrix.numel - matrix.rows * matrix.cols)).view(num_inner, -1)
            for matrix in self._matrices
        ]
        rest = torch.cat([*(pieces[number] for number in self._rest), pieces[-1]])
        return torch.cat([*of_ranks, F.pad(rest, (0, -rest.numel() % num_inner)).view(num_inner, -1)], 1)

    def _own_rows(self, share: Tensor) -> Iterator[Tensor]:
        """[height, cols] of each matrix, views."""
        sizes = [matrix.numel for matrix in self._matrices]
        for piece, matrix in zip(share[: sum(sizes)].split(sizes), self._matrices, strict=True):
            yield piece.view(matrix.height, matrix.cols)

    def _in_place(self, by_rank: Tensor, flat: Tensor) -> Tensor:
        """The reverse of `_by_rank`, into ``flat``."""
        pieces, start = self._pieces(flat), 0
        for matrix in self._matrices:
            rows = by_rank[:, start : start + matrix.numel].reshape(-1)
            pieces[matrix.number].copy_(rows[: matrix.rows * matrix.cols])
            start += matrix.numel
        rest, start = by_rank[:, start:].reshape(-1), 0
        for number in (*self._rest, -1):
            pieces[number].copy_(rest[start : start + pieces[number].numel()])
            start += pieces[number].numel()
        return flat

    # -- from step to step ------------------------------------------------------------------------------------

    def _own_errors(self, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
        """[own rows, cols] of each matrix: what is owed, and where what is left over is put."""
        if self._error is None:
            self._error = ErrorBuffer(self._params, dtype, self._memory)
        at = self._inner.index
        sizes = [param.numel() for param in self._params]
        owed, left = self._memory.take(self._error).split(sizes), self._error.left.split(sizes)

        def own(pieces: Sequence[Tensor], matrix: _Matrix) -> Tensor:
            rows = pieces[matrix.number].view(matrix.rows, matrix.cols)
            return rows[at * matrix.height : (at + 1) * matrix.height]

        return [(own(owed, matrix), own(left, matrix)) for matrix in self._matrices]

    def _start(self, matrix: _Matrix, like: Tensor) -> Tensor:
        """Orthonormal [cols, rank], the same on all ranks that exchange factors."""
        param, shape = self._params[matrix.number], (matrix.cols, matrix.rank)
        kept = self._memory.starts.get(self._memory.stored(param)) if self._options.warm_start else None
        if kept is None:
            drawn = self._memory.random_start(spec_of(param).name, shape, like.dtype, like.device)
        else:
            drawn = kept.flatten()[: math.prod(shape)].view(shape)
        return torch.linalg.qr(drawn)[0]

    def _keep(self, matrix: _Matrix, q: Tensor) -> None:
        param = self._params[matrix.number]
        kept = torch.zeros(param.shape, dtype=q.dtype, device=q.device)
        kept.view(-1)[: q.numel()] = q.flatten()
        self._memory.keep_start(param, kept)


def _as(flat: Tensor, shapes: Sequence[torch.Size]) -> Iterator[Tensor]:
    for piece, shape in zip(flat.split([shape.numel() for shape in shapes]), shapes, strict=True):
        yield piece.view(shape)
