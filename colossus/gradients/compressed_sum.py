"""Sums of gradients that travel compressed, bf16 or PowerSGD, and the errors that each rank keeps for the next step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.pending import Pending, Staged, Stages
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.gradients.bucket_sum import padded
from colossus.gradients.host_transfer import send_to
from colossus.layout.parameter import spec_of
from colossus.random import derive_seeds, hash_key

_ERROR, _WARM_START = "compression_error", "compression_start"


class ErrorFeedback:
    """What compression leaves out of a gradient is added to the next step's (1901.09847, 1905.13727); kept divided by
    the scale of the loss. A step that is skipped changes nothing.

    Args:
        stored: as what a parameter that compute sees is stored, by which its state is known.
        seed: of random starts.

    Attributes:
        step: number of the step that runs.
        errors: of each stored parameter, in its shape; float32 or wider.
        starts: of some, PowerSGD's Q of the step before.
    """

    def __init__(self, stored: Callable[[nn.Parameter], nn.Parameter], seed: int) -> None:
        self._stored, self._seed = stored, seed
        self.step = 0
        self.errors: dict[nn.Parameter, Tensor] = {}
        self.starts: dict[nn.Parameter, Tensor] = {}
        self._scale: Tensor | None = None
        #: errors of buckets, and what the step that runs leaves out
        self._left: list[tuple[Tensor, Tensor]] = []
        self._new_starts: dict[nn.Parameter, Tensor] = {}

    def begin(self, step: int, loss_scale: Tensor | None = None) -> None:
        """A step begins, whose losses are multiplied by ``loss_scale``."""
        self.step, self._scale, self._left, self._new_starts = step, loss_scale, [], {}

    @torch.no_grad()
    def end(self, found_inf: Tensor | None = None) -> None:
        """The step's sums were applied, or it is skipped where ``found_inf``."""
        for errors, left in self._left:
            left = left if self._scale is None else left.div_(self._scale)
            errors.copy_(left if found_inf is None else torch.where(found_inf, errors, left))
        for param, start in self._new_starts.items():
            if found_inf is not None:
                start = torch.where(found_inf, self.starts.get(param, torch.zeros_like(start)), start)
            self.starts[param] = start
        self._left, self._new_starts = [], {}

    def bucket(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> Tensor:
        """The errors of a bucket's parameters, side by side as their gradients are; made once. [elements]"""
        sizes, dtype = [param.numel() for param in params], torch.float32 if dtype in LOW else dtype
        flat = torch.zeros(sum(sizes), dtype=dtype, device=params[0].device)
        for param, piece in zip(params, flat.split(sizes), strict=True):
            key, view = self._stored(param), piece.view(param.shape)
            if key in self.errors:
                view.copy_(self.errors[key])
            self.errors[key] = view
        return flat

    def take(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """What the step that runs adds to a bucket's sums, and zeros, to be overwritten by what it leaves out."""
        left = torch.zeros_like(errors)
        self._left.append((errors, left))
        return errors if self._scale is None else errors * self._scale, left

    def start_of(self, param: nn.Parameter, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Orthonormal [cols, rank], the same on all ranks that exchange factors: of the step before, or random."""
        kept = self.starts.get(self._stored(param))
        if kept is None:
            kept = self.random_start(spec_of(param).name, shape, like.dtype, like.device)
        return torch.linalg.qr(kept.flatten()[: math.prod(shape)].view(shape))[0]

    def random_start(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """The same on all ranks, another in each step."""
        (seed,) = derive_seeds(self._seed, (hash_key("powersgd", name), self.step))
        drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return send_to(device, drawn.to(dtype))

    def keep_start(self, param: nn.Parameter, start: Tensor) -> None:
        self._new_starts[self._stored(param)] = start

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """By stored parameter, tensors of its shape: of Q the first numbers."""
        found: dict[nn.Parameter, dict[str, Any]] = {param: {_ERROR: error} for param, error in self.errors.items()}
        for param, start in self.starts.items():
            whole = torch.zeros(param.shape, dtype=start.dtype, device=start.device)
            whole.view(-1)[: start.numel()] = start.flatten()
            found.setdefault(param, {})[_WARM_START] = whole
        return found

    def load(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Take back what `state` gave; what it does not have begins anew."""
        for error in self.errors.values():
            error.zero_()
        self.starts = {param: held[_WARM_START] for param, held in state.items() if _WARM_START in held}
        for param, held in state.items():
            if _ERROR in held and param in self.errors:
                self.errors[param].copy_(held[_ERROR])
            elif _ERROR in held:
                self.errors[param] = held[_ERROR]


class CompressedSum:
    """A bucket's sum that leaves something out, which `ErrorFeedback` keeps for the next step."""

    def __init__(self, params: Sequence[nn.Parameter], feedback: ErrorFeedback) -> None:
        self._params, self._feedback = list(params), feedback
        self._errors: Tensor | None = None

    def start(self, flat: Tensor) -> Pending:
        return Staged(self._stages(flat))

    def _stages(self, flat: Tensor) -> Stages:
        raise NotImplementedError

    def _take_errors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if self._errors is None:
            self._errors = self._feedback.bucket(self._params, dtype)
        return self._feedback.take(self._errors)


class Bf16Sum(CompressedSum):
    """Half the bytes of an all-reduce, or a quarter in float64: bfloat16 on the way, summed as they are.

    Every rank sends each other the chunk that this one is to sum, and gets sums back. What rounding takes away, of an
    addend or of a sum, its rank adds to its next addend. All ranks make the same numbers of the same bytes.

    Args:
        replica: summed over before, exactly: the axes inside of a replica.
        host: the data ranks of this host, over which each has a share of the bucket (`TwoLevelSum`).
        between: the ranks that exchange rounded chunks.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        replica: AxisGroup,
        host: AxisGroup,
        between: AxisGroup,
        feedback: ErrorFeedback,
    ) -> None:
        super().__init__(params, feedback)
        self._replica, self._host, self._between = replica, host, between

    def _stages(self, flat: Tensor) -> Stages:
        errors, left = self._take_errors(flat.dtype)
        num_flags, low = len(self._params), torch.bfloat16
        flat = yield collectives.all_reduce(flat, self._replica, owned=True)
        numbers, flags = flat[:-num_flags], flat[-num_flags:]
        num_ranks, num_shares = self._between.size, self._host.size
        size = -(-numbers.numel() // (num_shares * num_ranks))  # of a chunk
        flags = yield collectives.all_reduce(flags, self._host)
        share = yield collectives.reduce_scatter(padded(numbers, num_shares * num_ranks), self._host)
        errors = padded(errors.to(share.dtype), num_shares * num_ranks)
        share = share.view(num_ranks, size) + errors.view(num_shares, num_ranks, size)[self._host.index]
        sent = share.to(low)
        error = share - sent.to(share.dtype)
        # a rank that has used a parameter tells all others so
        used = flags.clamp(max=1).to(low).expand(num_ranks, num_flags)
        received = yield collectives.all_to_all(torch.cat((sent, used), 1), self._between, 0, 0)
        used = received[:, -num_flags:].to(flags.dtype).sum(0)
        addends = received[:, :-num_flags].to(share.dtype)
        me = self._between.index
        addends[me] = share[me]
        total = addends[0]
        for addend in addends[1:]:
            total += addend
        sent = total[None].to(low)
        error[me] = total - sent[0].to(share.dtype)
        received = yield collectives.all_gather(sent, self._between)
        kept = left[self._host.index * error.numel() :][: error.numel()]
        kept.copy_(error.flatten()[: kept.numel()])
        whole = yield collectives.all_gather(received.to(share.dtype).flatten(), self._host)
        return torch.cat((whole[: numbers.numel()], used))


class PowerSum(CompressedSum):
    """PowerSGD (1905.13727): M = sum of M_i as P Q^T, with P = orthonormal basis of sum of M_i Q', Q = sum of M_i^T P,
    and Q' of the step before.

    What P Q^T / n leaves out of a rank's M_i is added to its next one. All else of a bucket travels as it is.

    Args:
        exact: the ranks that are summed over exactly before: of a replica, and of a host.
        between: the ranks that exchange factors.
        rank: of the factors, at most.
        start_step: steps from the first on that are not compressed.
        min_compression_rate: a matrix travels as factors if they have fewer than one in so many of its elements.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        exact: AxisGroup,
        between: AxisGroup,
        feedback: ErrorFeedback,
        *,
        rank: int,
        start_step: int,
        min_compression_rate: float,
    ) -> None:
        super().__init__(params, feedback)
        self._exact, self._between, self._start_step = exact, between, start_step
        self._sizes = [param.numel() for param in params]
        #: number of a parameter in the bucket -> (rows, cols, rank) where it travels as factors
        self._matrices: dict[int, tuple[int, int, int]] = {}
        for number, param in enumerate(params):
            rows = param.shape[0] if param.dim() else 0
            cols = param.numel() // max(1, rows)
            most = min(rows, cols, rank)
            if most and (rows + cols) * most * min_compression_rate < rows * cols:
                self._matrices[number] = rows, cols, most

    def _stages(self, flat: Tensor) -> Stages:
        flat = yield collectives.all_reduce(flat, self._exact, owned=True)
        if self._feedback.step < self._start_step or not self._matrices:
            return (yield collectives.all_reduce(flat, self._between, owned=True))
        wide = flat.float() if flat.dtype in LOW else flat
        errors, kept = self._take_errors(wide.dtype)
        pieces = wide.split([*self._sizes, len(self._params)])  # last the flags
        rest = [piece for number, piece in enumerate(pieces) if number not in self._matrices]
        own = self._as_matrices(pieces)
        torch._foreach_add_(own, self._as_matrices(errors.split(self._sizes)))
        left = [matrix @ start for matrix, start in zip(own, self._starts(wide), strict=True)]
        summed = yield collectives.all_reduce(
            torch.cat([*rest, *(p.flatten() for p in left)]), self._between, owned=True
        )
        totals = list(_split_as(summed, [*rest, *left]))
        torch._foreach_copy_(rest, totals[: len(rest)])
        left = [torch.linalg.qr(p)[0] for p in totals[len(rest) :]]
        right = [matrix.T @ p for matrix, p in zip(own, left, strict=True)]
        summed = yield collectives.all_reduce(torch.cat([q.flatten() for q in right]), self._between, owned=True)
        kept_matrices, right = self._as_matrices(kept.split(self._sizes)), list(_split_as(summed, right))
        for number, matrix, error, p, q in zip(self._matrices, own, kept_matrices, left, right, strict=True):
            approximated = p @ q.T
            torch.sub(matrix, approximated / self._between.size, out=error)
            matrix.copy_(approximated)
            self._feedback.keep_start(self._params[number], q)
        return flat.copy_(wide) if wide is not flat else flat

    def _as_matrices(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Views [rows, cols] of the parameters that travel as factors."""
        return [pieces[number].view(rows, cols) for number, (rows, cols, _) in self._matrices.items()]

    def _starts(self, like: Tensor) -> Iterator[Tensor]:
        for number, (_, cols, rank) in self._matrices.items():
            yield self._feedback.start_of(self._params[number], (cols, rank), like)


def _split_as(flat: Tensor, like: Sequence[Tensor]) -> Iterator[Tensor]:
    for piece, one in zip(flat.split([one.numel() for one in like]), like, strict=True):
        yield piece.view(one.shape)
