"""Parameters of which each rank stores some rows: their storage, and their all-gather."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from colossus.comm import uneven
from colossus.comm.host_transfer import beside_products
from colossus.comm.pending import Pending
from colossus.comm.step_regions import GATHERS, in_region
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.context.program import Subject
from colossus.data_parallel.zero.row_forms import Dtypes
from colossus.data_parallel.zero.row_layout import RowLayout
from colossus.error_place import located_error
from colossus.layout.parameter import StoredSpec, attach, spec_of
from colossus.layout.parameter_hooks import copy_attributes
from colossus.layout.split_parameter import FREED, hide_values, mark_split, show_values
from colossus.tensor_parallel.dtypes import set_gradient_dtype


class FlatRows:
    """Parameters of the same dtypes, whole in compute, of which each rank of a group stores some rows.

    They travel in one collective. The stored rows are views of the whole parameters where these keep their memory and
    need no cast, else views of one flat tensor.

    Args:
        params: the parameters, whole on each rank; all of them are trainable, or none.
        group: the ranks over which rows are cut.
        context: the ranks of the run.
        dtypes: the dtypes of the parameters.
        stage: the stage of ZeRO. Below 3 the whole parameters keep their memory between steps.
        offload: whether the rows are in the memory of the host.

    Attributes:
        stored: parameter -> the rank's rows of it.
        layout: the layout of the rows.
        subject: the names of the parameters, for errors of their collectives.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        group: AxisGroup,
        context: ParallelContext,
        dtypes: Dtypes,
        stage: int,
        offload: bool,
    ) -> None:
        self.params, self.group, self.dtypes, self.stage, self.offload = list(params), group, dtypes, stage, offload
        self.is_trainable = params[0].requires_grad
        self.device = params[0].device
        self.layout = RowLayout(self.params, group.size)
        self.subject = Subject([spec_of(param).name for param in self.params])
        self.stored: dict[nn.Parameter, nn.Parameter] = {}
        #: the parameters whose stored rows are views of them
        self._views: set[nn.Parameter] = set()
        self._rows = self._store()
        of_each = self._rows
        if len(of_each) != len(self.params):
            widths = [sum(piece.width for piece in self.layout.pieces_of(param)) for param in self.params]
            of_each = list(self._rows[0].split(widths))
        self._rows_of = dict(zip(self.params, of_each, strict=True))
        #: versions of the whole parameters, to which only a user's forward writes
        self._whole_versions = [param._version for param in self.params]
        for param, rows in self._rows_of.items():
            shape = (-1, *param.shape[1:]) if rows.numel() else (0, *param.shape[1:])
            stored = nn.Parameter(rows.view(shape), requires_grad=param.requires_grad)
            spec = StoredSpec(spec_of(param), group.axes, context.grid.sizes)
            self.stored[param] = mark_split(attach(stored, spec))
            copy_attributes(stored, param)
            if param._backward_hooks is not None:  # both share one dict, also for hooks that are added later
                stored._backward_hooks = param._backward_hooks
            if param.requires_grad and param.dtype != dtypes.gradient:
                set_gradient_dtype(param, dtypes.gradient)
        #: the flat parameters that a gather writes to, and its views of them, by the first of the ranks that sent the
        #: rows and their number
        self._targets: dict[tuple[int, int], tuple[list[Tensor | None], list[Tensor]]] = {}
        self._types = [type(param) for param in self.params]

    def _store(self) -> list[Tensor]:
        """Return the rank's flat rows in the order in which they travel: one tensor for all parameters, or one each."""
        if self.dtypes.allow_views(self.stage, offload=self.offload):
            return [self._store_in_place(param) for param in self.params]
        host = torch.device("cpu") if self.offload else self.device
        is_pinned = host != self.device
        flat = torch.zeros(self.layout.size, dtype=self.dtypes.stored, device=host, pin_memory=is_pinned)
        for param in self.params:
            self._copy_own_rows(param, flat)
            value = param.data
            if self.dtypes.computed != value.dtype or not _fills_its_storage(value):
                param.data = value.to(self.dtypes.computed, copy=True, memory_format=torch.contiguous_format)
        return [flat]

    def _store_in_place(self, param: nn.Parameter) -> Tensor:
        """Return the rank's rows as a view of the parameter, whose memory gets padding; with several shards, a copy."""
        value, pieces = param.data.to(self.dtypes.computed), self.layout.pieces_of(param)
        width = sum(piece.width for piece in pieces)
        if len(pieces) > 1:
            rows = value.new_zeros(width)
            self._copy_own_rows(param, rows, pieces[0].offset)
            if not value.is_contiguous():
                param.data = value.contiguous()
            return rows
        whole = value.new_zeros(self.group.size * width)
        whole[: value.numel()] = value.reshape(-1)
        param.data = whole[: value.numel()].view(param.shape)
        self._views.add(param)
        return whole[self.group.index * width :][:width]

    def _copy_own_rows(self, param: nn.Parameter, flat: Tensor, offset: int = 0) -> None:
        whole = param.data.reshape(-1)
        for piece in self.layout.pieces_of(param):
            rows = self.layout.rows_in(whole, piece, self.group.index)
            flat[piece.offset - offset :][: rows.numel()] = rows

    @in_region("gather of weights: start", GATHERS)
    def start_gather(self) -> Pending:
        """Start to gather the whole parameters, whose memory is allocated when the rows of all ranks are there."""
        self.group.program.note(self.subject)
        flat = torch.empty(self.layout.size, dtype=self.dtypes.computed, device=self.device)
        # products that the device is given from here on do not wait for a copy from the host
        with beside_products(self.device) if self._is_beside else nullcontext():
            return uneven.gather_filled(flat, self.group, self._fill, self._take)

    @property
    def _is_beside(self) -> bool:
        """Return whether rows are copied from the host to a device, which then sends them."""
        return self.offload and self.group.size > 1 and self.device.type != "cpu"

    def _fill(self, flat: Tensor) -> None:
        if len(self._rows) == 1:
            # rows on the host are page-locked, and change only after this copy: `accept_gradients` waits for the stream
            flat.copy_(self._rows[0], non_blocking=True)
        else:
            torch.cat(self._rows, out=flat)

    @torch.no_grad()
    def _take(self, stacked: list[Tensor]) -> None:
        if self.stage == 3:
            for param, kind in zip(self.params, self._types, strict=True):
                param.untyped_storage().resize_(param.numel() * param.element_size())
                show_values(param, kind)
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        first = 0
        for rows in stacked:
            if self._is_beside:
                rows.record_stream(torch.get_device_module(self.device).current_stream(self.device))
            is_own = first == self.group.index and rows.shape[0] == 1
            key = first, rows.shape[0]
            if key not in self._targets:
                flats = [None if is_own and param in self._views else param.data.view(-1) for param in self.params]
                self._targets[key] = flats, self.layout.wholes(flats, *key)
            flats, wholes = self._targets[key]
            targets += wholes
            sources += self.layout.parts(rows, flats, first)[0]
            first += rows.shape[0]
        if sources:
            torch._foreach_copy_(targets, sources)

    @torch.no_grad()
    def take_back_changes(self) -> None:
        """Write changes that a forward made to the whole parameters, alike on all ranks, to the stored rows."""
        versions, before = [param._version for param in self.params], self._whole_versions
        if versions == before:
            return
        self._whole_versions = versions
        changed = [param for param, new, old in zip(self.params, versions, before, strict=True) if new != old]
        if self.dtypes.computed != self.dtypes.stored:
            raise located_error(
                f"{spec_of(changed[0]).name} was written to in a forward. Under this plan it is a copy of a parameter "
                f"that is stored in {self.dtypes.stored}: write to it between steps, or set parallel.zero = 0"
            )
        for param in changed:
            if param not in self._views:
                self._copy_own_rows(param, self._rows_of[param], self.layout.pieces_of(param)[0].offset)

    def release(self) -> None:
        """Free the whole parameters."""
        for param in self.params:
            param.untyped_storage().resize_(0)
            hide_values(param, FREED)


def _fills_its_storage(value: Tensor) -> bool:
    """Return whether a tensor fills its memory, which can then be freed and allocated again."""
    storage = value.untyped_storage()
    return storage.nbytes() == value.nbytes and storage.resizable() and value.is_contiguous()
