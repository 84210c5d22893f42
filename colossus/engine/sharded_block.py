"""The parameters of one block of a model, of which a rank stores some rows, gathered and scattered together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.collectives import Pending
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import StoredSpec, attach, spec_of
from colossus.layout.split_parameter import as_shards, mark_split

#: (module, name in it) under which a module holds a parameter
Place = tuple[nn.Module, str]


@dataclass(frozen=True)
class HeldParameter:
    """A parameter with all places where the modules of a model hold it."""

    param: nn.Parameter
    places: tuple[Place, ...]


class ShardedBlock:
    """Parameters that are gathered, and whose gradients are scattered, together.

    While the block is gathered its modules hold the parameters that compute uses, else the stored ones. The former are
    always the same objects, and their memory is there while they are gathered only, so that what autograd has saved of
    them is right again when backward has gathered them.

    Args:
        held: parameters with at least one dim, their values whole on each rank of the group.
        group: over which rows are cut.
        scope: as of `colossus.tensor_parallel.weight_store.WeightStore`: ``matmul`` frees what forward gathered at
            its end, ``microbatch`` after its backward, ``step`` at the end of the step.

    Attributes:
        in_backward: whether the backward of a forward has begun.
    """

    def __init__(
        self, held: Sequence[HeldParameter], group: AxisGroup, context: ParallelContext, scope: str = "matmul"
    ) -> None:
        self.params = [one.param for one in held]
        self._held, self._scope = held, scope
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for param in self.params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append(param)
        with as_shards():
            self._flats = [_FlatRows(params, group, context) for params in kinds.values()]
        self._stored = {id(param): stored for flat in self._flats for param, stored in flat.stored.items()}
        self._is_gathered, self.in_backward = True, False
        #: forwards whose backward has not run
        self._num_awaited = 0
        self.release()

    def stored(self, param: nn.Parameter) -> nn.Parameter:
        """The rank's rows of a parameter of this block."""
        return self._stored[id(param)]

    # -- gathering ----------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Make the parameters whole, where they are not."""
        if self._is_gathered:
            return
        with as_shards():
            pending = [flat.start_gather() for flat in self._flats]
            for flat, rows in zip(self._flats, pending, strict=True):
                flat.finish_gather(rows.wait())
        for one in self._held:
            _put(one.places, one.param)
        self._is_gathered = True

    def release(self) -> None:
        """Free the gathered parameters."""
        if not self._is_gathered:
            return
        with as_shards():
            for flat in self._flats:
                flat.release()
        for one in self._held:
            _put(one.places, self._stored[id(one.param)])
        self._is_gathered = False

    def after_forward(self) -> None:
        """A forward that a backward may follow is over."""
        if self.in_backward:  # activation checkpointing has recomputed it: its backward is next
            return
        if torch.is_grad_enabled():
            self._num_awaited += 1
        self._release_by_scope()

    def enter_backward(self) -> None:
        """The backward of one forward begins."""
        self.in_backward = True
        self.gather()

    def leave_backward(self) -> None:
        """The backward that has begun, if any, is over."""
        if not self.in_backward:
            return
        self.in_backward = False
        self._num_awaited -= 1
        self._release_by_scope()

    def _release_by_scope(self) -> None:
        if self._scope == "matmul" or (self._scope == "microbatch" and not self._num_awaited):
            self.release()

    # -- gradients ----------------------------------------------------------------------------------------

    def start_scatter(self) -> None:
        """Start to sum the gradients over the group; each rank gets those of its rows."""
        for flat in self._flats:
            flat.start_scatter()

    def finish_scatter(self) -> None:
        """Wait for the sums. A stored parameter that no rank of the group used has no gradient."""
        for flat in self._flats:
            flat.finish_scatter()

    def end_step(self) -> None:
        """All backwards of a step are over."""
        self.in_backward, self._num_awaited = False, 0
        self.release()

    def abandon(self) -> None:
        """Forget a step that failed, without a collective."""
        self.end_step()
        for flat in self._flats:
            flat.abandon()


@dataclass(frozen=True)
class _Piece:
    """One logical shard of a parameter: rows start to stop of it, chunk of which each rank stores.

    Attributes:
        offset, width: of these within a rank's flat row.
    """

    param: nn.Parameter
    start: int
    stop: int
    offset: int
    width: int


class _FlatRows:
    """Parameters of one dtype, the stored rows of each rank in one flat tensor."""

    def __init__(self, params: Sequence[nn.Parameter], group: AxisGroup, context: ParallelContext) -> None:
        self._params, self._group = params, group
        self._trainable = params[0].requires_grad
        self._pieces: list[_Piece] = []
        self.stored: dict[nn.Parameter, nn.Parameter] = {}
        spans: dict[nn.Parameter, tuple[int, int]] = {}
        size = 0
        for param in params:
            storage = param.untyped_storage()
            if storage.nbytes() != param.nbytes or not storage.resizable():  # it is freed and taken back whole
                param.data = param.detach().clone()
            begin, row = size, math.prod(param.shape[1:])
            for shard in spec_of(param).shards:
                start, stop = shard.rows
                width = -(-(stop - start) // group.size) * row
                self._pieces.append(_Piece(param, start, stop, size, width))
                size += width
            spans[param] = begin, size
        self._flat = torch.zeros(size, dtype=params[0].dtype, device=params[0].device)
        for piece in self._pieces:
            rows = self._rank_major(piece, piece.param.detach())
            self._flat[piece.offset : piece.offset + piece.width] = rows[group.index]
        for param, (begin, end) in spans.items():
            shape = (-1, *param.shape[1:]) if end > begin else (0, *param.shape[1:])
            stored = nn.Parameter(self._flat[begin:end].view(shape), requires_grad=param.requires_grad)
            self.stored[param] = mark_split(attach(stored, StoredSpec(spec_of(param), group.axes, context.grid.sizes)))
        self._present: list[bool] = []
        self._pending: Pending | None = None
        #: of a step that failed: waited for before the next, when the ranks have agreed to go on
        self._abandoned: Pending | None = None

    def _rank_major(self, piece: _Piece, rows: Tensor) -> Tensor:
        """Rows of a whole parameter or gradient as [rank, width], zeros behind the last."""
        part = rows[piece.start : piece.stop].reshape(-1)
        out = part.new_zeros(self._group.size * piece.width)
        out[: part.numel()] = part
        return out.view(self._group.size, piece.width)

    def start_gather(self) -> Pending:
        return collectives.all_gather(self._flat, self._group)

    def finish_gather(self, rows: Tensor) -> None:
        """Fill the parameters from the rows of all ranks, [rank x size]."""
        by_rank = rows.view(self._group.size, -1)
        for param in self._params:
            param.untyped_storage().resize_(param.numel() * param.element_size())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(tuple(self._params)):
            for piece in self._pieces:
                part = piece.param[piece.start : piece.stop]
                values = by_rank[:, piece.offset : piece.offset + piece.width].reshape(-1)
                part.copy_(values[: part.numel()].view(part.shape))

    def release(self) -> None:
        for param in self._params:
            param.untyped_storage().resize_(0)

    def start_scatter(self) -> None:
        if not self._trainable:
            return
        if self._abandoned is not None:
            self._abandoned.wait()
            self._abandoned = None
        for param in self._params:
            axes = spec_of(param).gradient_axes
            assert axes is None or set(self._group.axes) <= set(axes), "each rank has a part of the sum"
        size, ranks = len(self._flat), self._group.size
        rows = self._flat.new_zeros(ranks, size + len(self._params))
        self._present = [param.grad is not None for param in self._params]
        for piece in self._pieces:
            if piece.param.grad is not None:
                span = slice(piece.offset, piece.offset + piece.width)
                rows[:, span] = self._rank_major(piece, piece.param.grad)
        # behind the gradients one flag for each parameter: how many ranks used it
        rows[:, size:] = torch.tensor(self._present, dtype=rows.dtype, device=rows.device)
        for param in self._params:
            param.grad = None
        self._pending = collectives.reduce_scatter(rows, self._group)

    def finish_scatter(self) -> None:
        if self._pending is None:
            return
        total, self._pending = self._pending.wait().view(-1), None
        used = [True] * len(self._params) if all(self._present) else total[len(self._flat) :].tolist()
        begin = 0
        for param, flag in zip(self._params, used, strict=True):
            stored = self.stored[param]
            stored.grad = total[begin : begin + stored.numel()].view(stored.shape) if flag else None
            begin += stored.numel()

    def abandon(self) -> None:
        for param in self._params:
            param.grad = None
        self._abandoned, self._pending = self._pending, None


def _put(places: Sequence[Place], param: nn.Parameter) -> None:
    for module, leaf in places:
        module._parameters[leaf] = param
