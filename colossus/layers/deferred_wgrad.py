"""Weight gradients of plain linears, made apart from those of their inputs, as those of our split layers are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.tensor_parallel.matmul import bias_gradient
from colossus.tensor_parallel.panels import flat
from colossus.tensor_parallel.weight_store import WeightStore


class DeferredWgrad(TorchFunctionMode):
    """Inside, ``F.linear`` with a parameter as its weight leaves the weight's gradient for later where that is wanted.

    It catches `torch.nn.Linear` as well as our layers without tensor parallelism. Weights that are computed (by a
    parametrization, say) have their gradients in the usual place.
    """

    def __init__(self, weights: WeightStore) -> None:
        super().__init__()
        self._weights = weights

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and torch.is_grad_enabled():
            x, weight, bias = _arguments(*args, **kwargs)
            if _is_late(x, weight):
                return _Linear.apply(x, weight, bias, self._weights)
        return func(*args, **kwargs)


def _is_late(x: Any, weight: Any) -> bool:
    """Whether this is a product of a plain activation with a trained matrix, outside of torch.func."""
    if type(x) is not Tensor or not isinstance(weight, nn.Parameter) or not weight.requires_grad or weight.dim() != 2:
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def _arguments(input: Any, weight: Any, bias: Any = None) -> tuple[Any, Any, Any]:
    return input, weight, bias


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weights: WeightStore) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.weights, ctx.parameter = weights, weight  # what is saved is a copy where activations are checkpointed
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needs_x, _, needs_b, _ = ctx.needs_input_grad
        dx = dy @ weight if needs_x else None
        db = bias_gradient(dy) if needs_b else None
        parameter = ctx.parameter
        if ctx.weights.can_defer_wgrad(parameter):
            weights = ctx.weights
            weights.defer_wgrad(lambda: weights.accumulate_grad(parameter, flat(dy).t() @ flat(x)))
            return dx, None, db, None
        return dx, flat(dy).t() @ flat(x), db, None
