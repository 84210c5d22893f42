"""Deferred weight gradients of plain linears, for split backwards; sharded linears defer theirs in their matmul."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.comm.autograd import first_order, save_for_backward, saved_tensors
from colossus.comm.conjugate import not_a_view
from colossus.sharded_tensor.placement import placement_of
from colossus.sharded_tensor.tensor import ShardedTensor, plain, wrap
from colossus.tensor_parallel.dtypes import gradient_dtype, product_dtype, to_product_dtype
from colossus.tensor_parallel.gathered_weights import GatheredWeights
from colossus.tensor_parallel.matmul import bias_gradient, product, wgrad_product

#: types of input that do not override functions of torch
PLAIN: tuple[type, ...] = (Tensor,)


class DeferredWgrad(TorchFunctionMode):
    """A mode that defers the weight gradient (wgrad) of ``F.linear`` where a `WgradDeferral` is active.

    That concerns `torch.nn.Linear` as well as our layers without tensor parallelism. A weight that is computed (by a
    parametrization, say) and is no parameter gets its gradient in the ordinary backward.
    """

    def __init__(self, weights: GatheredWeights) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            return self._linear(*args, **kwargs)
        return func(*args, **kwargs)

    def _linear(self, input: Any, weight: Any, bias: Any = None) -> Tensor:
        if not _can_defer(input, weight):
            return F.linear(input, weight, bias)
        return wrap(_Linear.apply(to_product_dtype(plain(input)), weight, bias, self._weights), placement_of(input))


def _can_defer(x: Any, weight: Any) -> bool:
    """Return whether a linear has whole features and a trainable matrix, outside torch.func."""
    if isinstance(x, ShardedTensor):
        place = x.placement.place("sequence")
        if not x.placement.is_whole or place is None or place.dim == plain(x).dim() - 1:
            return False
    elif type(x) not in PLAIN:
        return False
    if not isinstance(weight, nn.Parameter) or not weight.requires_grad or weight.dim() != 2:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


class _Linear(torch.autograd.Function):
    """``y = x weight^T + bias`` with a separate weight gradient.

    Shapes, all of this rank: ``x`` [..., in], ``weight`` [out, in], ``bias`` [out], ``y`` and ``dy`` [..., out].
    Backward: ``dx = dy weight`` (dgrad) and the bias's gradient, the sum of ``dy`` over samples, at once; ``dweight =
    dy^T x`` (wgrad), also summed over samples, at once or deferred.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: GatheredWeights) -> Tensor:
        save_for_backward(ctx, x, weight)
        ctx.weights, ctx.parameter = weights, weight  # under checkpointing the saved weight is another tensor
        if product_dtype(x) is not None:  # autocast would keep a cast without a gradient
            weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
        return not_a_view(product(x, weight, bias))

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = saved_tensors(ctx)
        needs_x, _, needs_b, _ = ctx.needs_input_grad
        dx = product(dy, weight.to(dy.dtype).t()) if needs_x else None
        db = bias_gradient(dy) if needs_b else None
        parameter = ctx.parameter
        if ctx.weights.deferral.takes(parameter):
            weights = ctx.weights
            weights.deferral.defer(lambda: weights.deferral.accumulate(parameter, _weight_gradient(dy, x, parameter)))
            return dx, None, db, None
        return dx, _weight_gradient(dy, x, parameter), db, None


def _weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return wgrad_product(dy, x).to(gradient_dtype(weight))
