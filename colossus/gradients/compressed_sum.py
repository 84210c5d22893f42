"""Sums of gradients that travel compressed, as bf16 or by PowerSGD, with error feedback on each rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.flat_buffer import split_as
from colossus.comm.host_transfer import send_to
from colossus.comm.pending import Pending, Staged, Stages
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.gradients.bucket_sum import padded
from colossus.layout.parameter import spec_of
from colossus.random import derive_seeds, hash_key

_ERROR, _WARM_START = "compression_error", "compression_start"


class ErrorFeedback:
    """The compression errors of this rank, which are added to the gradients of the next step (1901.09847, 1905.13727).

    An error is the part of a gradient that compression lost. Errors are stored divided by the loss scale. A skipped
    step changes none.

    Args:
        stored: returns the stored parameter of a parameter that compute sees; state is saved by the former.
        seed: the seed of random starts.

    Attributes:
        step: the number of the step that runs.
        errors: stored parameter -> error, of its shape, in float32 or wider.
        starts: stored parameter -> PowerSGD's Q of the step before, for those that have one.
    """

    def __init__(self, stored: Callable[[nn.Parameter], nn.Parameter], seed: int) -> None:
        self._stored, self._seed = stored, seed
        self.step = 0
        self.errors: dict[nn.Parameter, Tensor] = {}
        self.starts: dict[nn.Parameter, Tensor] = {}
        self._scale: Tensor | None = None
        #: for each bucket, its errors of the step before, and those of the step that runs
        self._errors_of_buckets: list[tuple[Tensor, Tensor]] = []
        self._new_starts: dict[nn.Parameter, Tensor] = {}

    def begin(self, step: int, loss_scale: Tensor | None = None) -> None:
        """Begin a step whose losses are multiplied by ``loss_scale``."""
        self.step, self._scale, self._errors_of_buckets, self._new_starts = step, loss_scale, [], {}

    @torch.no_grad()
    def end(self, found_inf: Tensor | None = None) -> None:
        """Store the step's errors, unless ``found_inf``: then the step is skipped."""
        for errors, new_errors in self._errors_of_buckets:
            new_errors = new_errors if self._scale is None else new_errors.div_(self._scale)
            errors.copy_(new_errors if found_inf is None else torch.where(found_inf, errors, new_errors))
        for param, start in self._new_starts.items():
            if found_inf is not None:
                start = torch.where(found_inf, self.starts.get(param, torch.zeros_like(start)), start)
            self.starts[param] = start
        self._errors_of_buckets, self._new_starts = [], {}

    def bucket(self, params: Sequence[nn.Parameter], dtype: torch.dtype) -> Tensor:
        """Make the flat errors of a bucket, [elements], in the order of its gradients; called once for each bucket."""
        dtype, size = torch.float32 if dtype in LOW else dtype, sum(param.numel() for param in params)
        flat = torch.zeros(size, dtype=dtype, device=params[0].device)
        for param, view in zip(params, split_as(flat, params), strict=True):
            key = self._stored(param)
            if key in self.errors:
                view.copy_(self.errors[key])
            self.errors[key] = view
        return flat

    def take(self, errors: Tensor) -> tuple[Tensor, Tensor]:
        """Return a bucket's errors, scaled to be added to its gradients, and zeros for those of the step that runs."""
        new_errors = torch.zeros_like(errors)
        self._errors_of_buckets.append((errors, new_errors))
        return errors if self._scale is None else errors * self._scale, new_errors

    def start_of(self, param: nn.Parameter, shape: tuple[int, int], like: Tensor) -> Tensor:
        """Return an orthonormal start, [cols, rank], from the Q of the step before, or random.

        It is the same on all ranks that exchange factors.
        """
        start = self.starts.get(self._stored(param))
        if start is None:
            start = self.random_start(spec_of(param).name, shape, like.dtype, like.device)
        return torch.linalg.qr(start.flatten()[: math.prod(shape)].view(shape))[0]

    def random_start(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return a normal start that is the same on all ranks and another one in each step."""
        (seed,) = derive_seeds(self._seed, (hash_key("powersgd", name), self.step))
        start = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        return send_to(device, start.to(dtype))

    def set_start(self, param: nn.Parameter, start: Tensor) -> None:
        """Set the start of the next step, unless this one is skipped."""
        self._new_starts[self._stored(param)] = start

    def state(self) -> dict[nn.Parameter, dict[str, Any]]:
        """Return by stored parameter tensors of its shape: its error, and its start, flattened and padded."""
        state: dict[nn.Parameter, dict[str, Any]] = {param: {_ERROR: error} for param, error in self.errors.items()}
        for param, start in self.starts.items():
            whole = torch.zeros(param.shape, dtype=start.dtype, device=start.device)
            whole.view(-1)[: start.numel()] = start.flatten()
            state.setdefault(param, {})[_WARM_START] = whole
        return state

    def load(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        """Load what `state` returned; errors and starts that it lacks are reset."""
        for error in self.errors.values():
            error.zero_()
        self.starts = {param: entries[_WARM_START] for param, entries in state.items() if _WARM_START in entries}
        for param, entries in state.items():
            if _ERROR in entries and param in self.errors:
                self.errors[param].copy_(entries[_ERROR])
            elif _ERROR in entries:
                self.errors[param] = entries[_ERROR]


class CompressedSum:
    """The base of lossy sums of a bucket, whose errors `ErrorFeedback` adds to the next step's gradients."""

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
    """A sum that travels as bfloat16 and adds in the dtype of the gradients.

    It sends half the bytes of an all-reduce in float32, a quarter of one in float64. Every rank sends each other rank
    the chunk that the other sums, and receives all sums. A rank adds to its next gradients what rounding took from its
    addends and from the sum that it made. All ranks compute the same numbers from the same bytes.

    Args:
        params: the parameters of the bucket.
        replica: the ranks inside a replica, which are summed over first, exactly.
        host: the data ranks of this host, each of which has a share of the bucket (`TwoLevelSum`).
        between: the ranks that exchange rounded chunks.
        feedback: the errors of this rank.
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
        errors, new_errors = self._take_errors(flat.dtype)
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
        # each rank sends its flags of used parameters to all others
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
        own_errors = new_errors[self._host.index * error.numel() :][: error.numel()]
        own_errors.copy_(error.flatten()[: own_errors.numel()])
        whole = yield collectives.all_gather(received.to(share.dtype).flatten(), self._host)
        return torch.cat((whole[: numbers.numel()], used))


class PowerSum(CompressedSum):
    """PowerSGD (1905.13727), which sums matrices M_i over n ranks as two factors: the sum is about P Q^T.

    P is an orthonormal basis of the sum of M_i Q', with the Q' of the step before, and Q is the sum of M_i^T P. A rank
    adds M_i - P Q^T / n to its next gradient. Parameters that are no matrices, or too small, travel as they are.

    Args:
        params: the parameters of the bucket.
        exact: the ranks of a replica and of a host, which are summed over first, exactly.
        between: the ranks that exchange factors.
        feedback: the errors of this rank.
        rank: the largest rank of the factors.
        start_step: the number of first steps that are not compressed.
        min_compression_rate: a matrix travels as factors if it has more than this many times their elements.
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
            own_rank = min(rows, cols, rank)
            if own_rank and (rows + cols) * own_rank * min_compression_rate < rows * cols:
                self._matrices[number] = rows, cols, own_rank

    def _stages(self, flat: Tensor) -> Stages:
        flat = yield collectives.all_reduce(flat, self._exact, owned=True)
        if self._feedback.step < self._start_step or not self._matrices:
            return (yield collectives.all_reduce(flat, self._between, owned=True))
        wide = flat.float() if flat.dtype in LOW else flat
        errors, new_errors = self._take_errors(wide.dtype)
        pieces = wide.split([*self._sizes, len(self._params)])  # the last is that of the flags
        rest = [piece for number, piece in enumerate(pieces) if number not in self._matrices]
        own = self._as_matrices(pieces)
        torch._foreach_add_(own, self._as_matrices(errors.split(self._sizes)))
        ps = [matrix @ start for matrix, start in zip(own, self._starts(wide), strict=True)]
        summed = yield collectives.all_reduce(torch.cat([*rest, *(p.flatten() for p in ps)]), self._between, owned=True)
        totals = split_as(summed, [*rest, *ps])
        torch._foreach_copy_(rest, totals[: len(rest)])
        ps = [torch.linalg.qr(p)[0] for p in totals[len(rest) :]]
        qs = [matrix.T @ p for matrix, p in zip(own, ps, strict=True)]
        summed = yield collectives.all_reduce(torch.cat([q.flatten() for q in qs]), self._between, owned=True)
        error_matrices, qs = self._as_matrices(new_errors.split(self._sizes)), split_as(summed, qs)
        for number, matrix, error, p, q in zip(self._matrices, own, error_matrices, ps, qs, strict=True):
            approximation = p @ q.T
            torch.sub(matrix, approximation / self._between.size, out=error)
            matrix.copy_(approximation)
            self._feedback.set_start(self._params[number], q)
        return flat.copy_(wide) if wide is not flat else flat

    def _as_matrices(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Return views [rows, cols] of the pieces of parameters that travel as factors."""
        return [pieces[number].view(rows, cols) for number, (rows, cols, _) in self._matrices.items()]

    def _starts(self, like: Tensor) -> Iterator[Tensor]:
        for number, (_, cols, rank) in self._matrices.items():
            yield self._feedback.start_of(self._params[number], (cols, rank), like)
