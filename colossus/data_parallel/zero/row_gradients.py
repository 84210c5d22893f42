"""The gradients of parameters whose rows are stored over ranks: each rank gets the sums of its rows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from colossus.comm import uneven
from colossus.comm.pending import Pending
from colossus.data_parallel.zero.flat_rows import FlatRows
from colossus.layout.parameter import attach, spec_of
from colossus.tensor_parallel.gathered_weights import run_grad_hooks


class RowGradients:
    """The gradients of `FlatRows`, reduced in one collective.

    Attributes:
        flat: the rows.
        params: their parameters.
        summed: parameter -> the one whose ``grad`` is the sum over the group: the stored parameter, or, where that is
            on the host, a stand-in without memory on the device.
        are_freed: whether a whole gradient is freed as soon as its reduction has started.
    """

    def __init__(self, flat: FlatRows) -> None:
        self.flat, self.params = flat, flat.params
        self.summed = {param: self._stand_in(param) for param in self.params} if flat.offload else flat.stored
        #: the sums so far of this rank's rows, and whether any rank has used each parameter
        self._sums: Tensor | None = None
        self._is_used = [False] * len(self.params)
        #: whether this rank has used each parameter in the reduction under way
        self._present: list[bool] = []
        self._reduction: Pending | None = None
        self.are_freed = flat.stage > 1

    def _stand_in(self, param: nn.Parameter) -> nn.Parameter:
        stored = self.flat.stored[param]
        empty = torch.empty((), dtype=stored.dtype, device=self.flat.device).expand(stored.shape)
        return attach(nn.Parameter(empty, requires_grad=stored.requires_grad), spec_of(stored))

    def begin_step(self) -> None:
        """Drop the gradients of the step before, and freeze what a user has frozen since."""
        self._sums = None
        self._is_used = [False] * len(self.params)
        for param in self.params:
            stored = self.flat.stored[param]
            if param.requires_grad != stored.requires_grad:
                param.requires_grad = stored.requires_grad
            if stored._backward_hooks is not param._backward_hooks and stored._backward_hooks:
                # between steps modules have the stored parameters, on which users register hooks
                param._backward_hooks = stored._backward_hooks
            param.grad = self.summed[param].grad = stored.grad = None

    @torch.no_grad()
    def start(self) -> None:
        """Start to sum the whole gradients over the group; each rank adds the sums of its rows to those so far."""
        flat = self.flat
        self._present = [param.grad is not None for param in self.params]
        # the gradients are followed by one flag for each parameter, whose sum is the number of ranks that used it
        shape = flat.group.size, flat.layout.size + len(self.params)
        stacked = torch.empty(shape, dtype=flat.dtypes.reduced, device=flat.device)
        flat.group.program.note(flat.subject)
        self._reduction = uneven.reduce_scatter_filled(stacked, flat.group, self._fill, self._take)
        if self.are_freed:
            self.free()

    def _fill(self, stacked: Tensor) -> None:
        layout = self.flat.layout
        rows, flags = stacked.split([layout.size, len(self.params)], 1)
        values = [None if param.grad is None else param.grad.reshape(-1) for param in self.params]
        targets, empty = layout.parts(rows, values, 0)
        flags.fill_(1.0)
        empty += [flags[:, index] for index, is_present in enumerate(self._present) if not is_present]
        if targets:
            torch._foreach_copy_(targets, layout.wholes(values, 0, rows.shape[0]))
        if empty:
            torch._foreach_zero_(empty)

    @torch.no_grad()
    def _take(self, addends: list[Tensor]) -> None:
        size = self.flat.layout.size
        rows = [addend[:size] for addend in addends]
        if self._sums is None:
            self._sums = (rows[0] if len(rows) == 1 else torch.add(rows[0], rows[1])).to(self.flat.dtypes.gradient)
            rows = rows[2:]
        for addend in rows:
            self._sums.add_(addend)
        if all(self._present):
            self._is_used = [True] * len(self.params)
        else:
            flags = self.used_by_ranks([addend[size:] for addend in addends])
            self._is_used = [used or flag != 0 for used, flag in zip(self._is_used, flags, strict=True)]

    def used_by_ranks(self, flags: list[Tensor]) -> list[float]:
        """Return for each parameter the number of ranks that used it, the sum of the flags."""
        return torch.stack(flags).sum(0).tolist()

    def wait(self) -> None:
        """Wait for the sums that `start` has started, if any."""
        if self._reduction is not None:
            pending, self._reduction = self._reduction, None
            pending.wait()

    def free(self) -> None:
        """Free the whole gradients."""
        for param in self.params:
            param.grad = None

    def set_sums(self) -> None:
        """Set the ``grad`` of each parameter to its sum; one that no rank of the group used gets none."""
        begin = 0
        for param, used in zip(self.params, self._is_used, strict=True):
            summed = self.summed[param]
            end = begin + summed.numel()
            if used:
                assert self._sums is not None
                summed.grad = self._sums[begin:end].view(summed.shape).to(summed.dtype)
            begin = end
        self._sums = None

    def set_whole(self) -> None:
        """Set the ``grad`` of stored parameters to the whole gradients, on a rank that stores all rows."""
        assert self.flat.group.size == 1
        for param in self.params:
            stored = self.flat.stored[param]
            if param.grad is not None:
                stored.grad, param.grad = param.grad.view(stored.shape).to(stored.dtype), None
                run_grad_hooks(stored)

    def send_to_host(self) -> list[nn.Parameter]:
        """Start to copy the gradients of offloaded rows from their stand-ins to the host.

        Returns:
            The stored parameters that get one. Its values are there once the caller has waited for the device.
        """
        copied = []
        for param, summed in self.summed.items():
            stored = self.flat.stored[param]
            if stored is not summed and summed.grad is not None:
                stored.grad = torch.empty_like(stored, pin_memory=stored.device != summed.device)
                stored.grad.copy_(summed.grad, non_blocking=True)
                summed.grad = None
                copied.append(stored)
        return copied
