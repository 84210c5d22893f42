"""Adafactor: second moments as the product of the means of rows and of columns (1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from colossus.layout.layout import Box
from colossus.optim.logical_tensors import Holders, LogicalTensor, Sums
from colossus.optim.torch_classes import groups_of


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor of whole parameters under every plan.

    Means over rows and over columns are sums of what ranks hold: a step has two all-reduces for all parameters, the
    first of some rows + columns numbers for each matrix, the second of one number. The factors are whole on every rank;
    the second moment of what has one dim is kept in parts. Query, key, value and the matrices of experts are each taken
    by themselves.

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that hold them.
        lr, beta2_decay, eps, d, weight_decay: as of `torch.optim.Adafactor`.

    Attributes:
        tensor_state: what belongs to a logical tensor and not to a rank's part: the factors.
    """

    def __init__(
        self,
        params: Iterable[Any],
        holders: Holders,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
    ) -> None:
        given = dict(lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), d=d, weight_decay=weight_decay)
        super().__init__(groups_of(params), given)
        self._held = [(group, tensor) for group in self.param_groups for tensor in holders.tensors(group["params"])]
        self._sums = Sums([tensor for _, tensor in self._held], holders)
        self._holders = holders
        self.tensor_state: dict[str, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step of all parameters that have a gradient. Collective over the ranks that hold parts of them."""
        held = self._held
        weights = [tensor.local(tensor.parameter.detach()) for _, tensor in held]
        grads = [
            tensor.local(tensor.parameter if tensor.parameter.grad is None else tensor.parameter.grad)
            for _, tensor in held
        ]
        for param in {tensor.parameter for _, tensor in held if tensor.parameter.grad is not None}:
            state = self.state[param]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
        squares, means = self._first_sums(weights, grads)
        updates = [
            self._update(group, tensor, grad, *means_of)
            for (group, tensor), grad, means_of in zip(held, grads, means, strict=True)
        ]
        update_squares = self._sums.over_ranks(self._sums.squares(updates)).tolist()
        for (group, tensor), weight, update, square, of_update in zip(
            held, weights, updates, squares.tolist(), update_squares, strict=True
        ):
            if tensor.parameter.grad is None:
                continue
            step, lr = float(self.state[tensor.parameter]["step"]), group["lr"]
            alpha = max(group["eps"][1], math.sqrt(square / tensor.numel)) * min(lr, 1 / math.sqrt(step))
            if group["weight_decay"]:
                weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(update, alpha=-alpha / max(1.0, math.sqrt(of_update / tensor.numel) / group["d"]))

    def _first_sums(self, weights: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
        """Squares of whole weights, [tensors]; of the gradients of what has rows the means over rows and columns."""
        flat = [self._sums.squares(weights)]
        for number, ((_, tensor), grad) in enumerate(zip(self._held, grads, strict=True)):
            counts = self._sums.counts[number].to(grad.device)
            for dim in _dims(tensor):
                whole = grad.new_zeros(_factor_shape(tensor, dim))
                whole[_slices(tensor.own, dim)] = grad.square().sum(dim, keepdim=True) * counts
                flat.append(whole.flatten().to(flat[0]))
        squares, *sums = self._sums.over_ranks(torch.cat(flat)).split([len(part) for part in flat])
        factors = iter(sums)
        means = [
            [
                (next(factors) / tensor.shape[dim]).view(_factor_shape(tensor, dim)).to(tensor.parameter)
                for dim in _dims(tensor)
            ]
            for _, tensor in self._held
        ]
        return squares, means

    def _update(self, group: dict[str, Any], tensor: LogicalTensor, grad: Tensor, *means: Tensor) -> Tensor:
        """This rank's part of the gradient over the root of its estimated second moment."""
        param = tensor.parameter
        if param.grad is None:
            return grad.new_empty(0)
        state, weight = self.state[param], float(self.state[param]["step"]) ** group["beta2_decay"]
        eps = torch.finfo(param.dtype).eps if group["eps"][0] is None else group["eps"][0]
        if means:
            of_tensor = self.tensor_state.setdefault(tensor.name, {})
            for entry, mean in zip(("row_var", "col_var"), means, strict=True):
                of_tensor.setdefault(entry, torch.zeros_like(mean)).lerp_(mean, weight)
            rows, columns = of_tensor["row_var"], of_tensor["col_var"]
            scale = rows.mean(dim=-2, keepdim=True).clamp_(min=eps)
            of_scale = tuple(slice(start, stop) for start, stop in tensor.own[:-2])
            variance = rows[_slices(tensor.own, -1)] @ columns[_slices(tensor.own, -2)] / scale[of_scale]
        else:
            if "variance" not in state:
                state["variance"] = torch.zeros_like(param)
            variance = tensor.local(state["variance"]).lerp_(grad.square(), weight).clone()
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(grad)

    # -- checkpoints --------------------------------------------------------------------------------------

    def held_tensors(self) -> list[tuple[LogicalTensor, bool]]:
        """The tensors that have factors, and whether this rank is the one that saves them."""
        first = self._holders.group.index == 0
        return [(tensor, first) for _, tensor in self._held if len(tensor.shape) > 1]

    def load_tensor_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.tensor_state = state


def _dims(tensor: LogicalTensor) -> tuple[int, ...]:
    """Over which there are means: none of what has no rows."""
    return (-1, -2) if len(tensor.shape) > 1 else ()


def _factor_shape(tensor: LogicalTensor, dim: int) -> list[int]:
    """Of means over a dim: the full shape with that as 1."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return shape


def _slices(box: Box, dim: int) -> tuple[slice, ...]:
    spans = list(box)
    spans[dim] = (0, 1)
    return tuple(slice(start, stop) for start, stop in spans)
