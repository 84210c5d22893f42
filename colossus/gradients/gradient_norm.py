"""The global gradient norm, each element of each logical parameter counted once."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

from colossus.comm.host_transfer import send_to
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import LOW
from colossus.gradients.square_digits import NUM_DIGITS, square_digits
from colossus.layout.parameter import spec_of


def values_of(gradient: Tensor) -> Tensor:
    """Return the stored values of a gradient, sharing its memory.

    Args:
        gradient: a dense tensor, or coalesced COO as tables have it.
    """
    return gradient._values() if gradient.is_sparse else gradient


class GradientNorm:
    """This rank's addends of the squared global gradient norm.

    All copies of a shard have the same gradient once gradients are summed. So the squares are summed over the axes that
    shard parameters, and no others. Where several ranks along these axes store a shard, the first counts it. The others
    multiply their square by 0, so that the sum is not finite if a gradient of any rank is not.

    Args:
        params: the parameters of this rank.
        context: the ranks.
        counted_elsewhere: ids of tied parameters that another pipeline rank counts.

    Attributes:
        axes: the axes that shard some parameter; the sum goes over them.
        params: the trainable parameters.
        norms: [params] of the last call of `local_squares`, also of those that other ranks count.
    """

    def __init__(
        self, params: Iterable[nn.Parameter], context: ParallelContext, counted_elsewhere: Container[int] = ()
    ) -> None:
        trainable = [param for param in params if param.requires_grad]
        sizes, coordinates = context.grid.sizes, context.coordinates
        specs = [spec_of(param) for param in trainable]
        shard = {axis for spec in specs for axis in spec.layout.shard_axes if sizes[axis] > 1}
        if sizes["pipeline"] > 1:  # stages hold other parameters, but all must sum over the same axes
            shard |= {axis for axis in context.grid.axes(("pipeline", "tensor")) if sizes[axis] > 1}
        self.axes = tuple(axis for axis in context.grid.names if axis in shard)
        self.params = trainable
        inside = tuple(axis for axis in self.axes if axis != "pipeline")  # stages hold different parameters
        counted = [
            id(param) not in counted_elsewhere and spec.layout.owns(coordinates, inside)
            for param, spec in zip(trainable, specs, strict=True)
        ]
        #: [params], 1 for a parameter that this rank counts, else 0; None where it counts all
        self._weights = None if all(counted) else torch.tensor(counted, dtype=torch.float64, device=context.device)
        self._some_are_offloaded = any(param.device.type != context.device.type for param in trainable)
        self._no_gradient = torch.zeros((), device=context.device)
        self.norms: Tensor | None = None

    def local_squares(self, device: torch.device) -> Tensor:
        """Return the squared gradient norm of each parameter that this rank counts, else 0: float64 [params].

        An entry is not finite where its gradient is not, counted or not.
        """
        grads = [self._no_gradient if param.grad is None else param.grad for param in self.params]
        if not grads:
            return torch.zeros(0, dtype=torch.float64, device=device)
        is_low = any(grad.dtype in LOW for grad in grads)  # norms in these dtypes would be rounded, or overflow
        dense = [self._no_gradient if grad.is_sparse else grad for grad in grads]
        norms = list(torch._foreach_norm(dense, 2, torch.float32) if is_low else torch._foreach_norm(dense))
        for number, grad in enumerate(grads):
            if grad.is_sparse:
                norms[number] = _norm_of_rows(values_of(grad))
        if self._some_are_offloaded:  # norms on the host are copied to the device together, without a wait
            elsewhere = [norm for norm in norms if norm.device != device]
            arrived = iter(send_to(device, torch.stack(elsewhere)).unbind())
            norms = [norm if norm.device == device else next(arrived) for norm in norms]
        self.norms = torch.stack(norms)
        squares = self.norms.double().square()
        return squares if self._weights is None else squares * self._weights

    def local_digits(self, device: torch.device) -> Tensor:
        """Return the sum of the squares that this rank counts in digits: see `square_digits`, float64 [7]."""
        total = torch.zeros(NUM_DIGITS, dtype=torch.float64, device=device)
        for number, param in enumerate(self.params):
            if param.grad is not None:
                digits = square_digits(param.grad)
                total = total + (digits if self._weights is None else digits * self._weights[number])
        return total


def _norm_of_rows(rows: Tensor) -> Tensor:
    """Return the norm of rows [n, dim]; the sum over rows, whose order depends on the plan, is in float64."""
    return torch.linalg.vector_norm(torch.linalg.vector_norm(rows, dim=1), dtype=torch.float64)
