"""Adafactor: second moments as the product of the means of rows and of columns (1804.04235)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from colossus.comm.host_transfer import send_to
from colossus.layout.layout import Box
from colossus.optim.logical_tensors import Holders, LogicalTensor, Sums
from colossus.optim.torch_classes import groups_of


class Adafactor(torch.optim.Optimizer):
    """torch.optim.Adafactor of whole parameters under every plan.

    Means over rows and over columns are sums over ranks. A step has two all-reduces for all parameters: the first of
    some rows + columns numbers for each matrix, the second of one number. The factors are whole on every rank; the
    second moment of a parameter with one dim is split as the parameter is. Query, key, value and the matrices of
    experts are factored one by one.

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that store them.
        lr, beta2_decay, eps, d, weight_decay: those of `torch.optim.Adafactor`.

    Attributes:
        tensor_state: state of each logical tensor that is not split: its factors.
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
        defaults = dict(lr=lr, beta2_decay=beta2_decay, eps=tuple(eps), d=d, weight_decay=weight_decay)
        super().__init__(groups_of(params), defaults)
        self._entries = [(group, tensor) for group in self.param_groups for tensor in holders.tensors(group["params"])]
        self._sums = Sums([tensor for _, tensor in self._entries], holders)
        self._holders = holders
        self.tensor_state: dict[str, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. Collective over the ranks that store parts of them."""
        entries = self._entries
        weights = [tensor.local(tensor.parameter.detach()) for _, tensor in entries]
        grads = [
            tensor.local(tensor.parameter if tensor.parameter.grad is None else tensor.parameter.grad)
            for _, tensor in entries
        ]
        for param in {tensor.parameter for _, tensor in entries if tensor.parameter.grad is not None}:
            state = self.state[param]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
        squares, means = self._first_sums(weights, grads)
        updates = [
            self._update(group, tensor, grad, *tensor_means)
            for (group, tensor), grad, tensor_means in zip(entries, grads, means, strict=True)
        ]
        update_squares = self._sums.over_ranks(self._sums.squares(updates))
        scales = self._scales(squares, update_squares)
        # numbers of a device are not read
        for (group, tensor), weight, update, scale in zip(
            entries, weights, updates, scales.tolist() if scales.device.type == "cpu" else scales, strict=True
        ):
            if tensor.parameter.grad is None:
                continue
            if group["weight_decay"]:
                weight.mul_(1 - group["lr"] * group["weight_decay"])
            if isinstance(scale, Tensor):
                weight.add_(update.mul_(scale.to(update.device)))
            else:
                weight.add_(update, alpha=scale)

    def _scales(self, squares: Tensor, update_squares: Tensor) -> Tensor:
        """Return the factor of each tensor's update, float64 [tensors], from squares of the weights and the updates."""
        rows = []
        for group, tensor in self._entries:
            step = float(self.state[tensor.parameter].get("step", 1.0))
            rows.append((tensor.numel, group["eps"][1], min(group["lr"], 1 / math.sqrt(step)), group["d"]))
        table = torch.tensor(rows, dtype=torch.float64).reshape(len(rows), 4)
        sizes, least, rates, d = send_to(squares.device, table).unbind(1)
        alphas = torch.maximum(least, (squares / sizes).sqrt()) * rates
        return -alphas / ((update_squares / sizes).sqrt() / d).clamp(min=1.0)

    def _first_sums(self, weights: list[Tensor], grads: list[Tensor]) -> tuple[Tensor, list[list[Tensor]]]:
        """Return squares of whole weights, [tensors], and the means of matrices' gradients over rows and columns."""
        flat = [self._sums.squares(weights)]
        for number, ((_, tensor), grad) in enumerate(zip(self._entries, grads, strict=True)):
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
            for _, tensor in self._entries
        ]
        return squares, means

    def _update(self, group: dict[str, Any], tensor: LogicalTensor, grad: Tensor, *means: Tensor) -> Tensor:
        """Return this rank's part of the gradient divided by the root of its estimated second moment."""
        param = tensor.parameter
        if param.grad is None:
            return grad.new_empty(0)
        state, weight = self.state[param], float(self.state[param]["step"]) ** group["beta2_decay"]
        eps = torch.finfo(param.dtype).eps if group["eps"][0] is None else group["eps"][0]
        if means:
            factors = self.tensor_state.setdefault(tensor.name, {})
            for entry, mean in zip(("row_var", "col_var"), means, strict=True):
                factors.setdefault(entry, torch.zeros_like(mean)).lerp_(mean, weight)
            rows, columns = factors["row_var"], factors["col_var"]
            scale = rows.mean(dim=-2, keepdim=True).clamp_(min=eps)
            scale_slices = tuple(slice(start, stop) for start, stop in tensor.own[:-2])
            variance = rows[_slices(tensor.own, -1)] @ columns[_slices(tensor.own, -2)] / scale[scale_slices]
        else:
            if "variance" not in state:
                state["variance"] = torch.zeros_like(param)
            variance = tensor.local(state["variance"]).lerp_(grad.square(), weight).clone()
        return variance.clamp_(min=eps * eps).rsqrt_().mul_(grad)

    # -- checkpoints --------------------------------------------------------------------------------------

    def state_tensors(self) -> list[tuple[LogicalTensor, bool]]:
        """Return the tensors that have factors, and whether this rank saves them."""
        first = self._holders.group.index == 0
        return [(tensor, first) for _, tensor in self._entries if len(tensor.shape) > 1]

    def load_tensor_state(self, state: dict[str, dict[str, Any]]) -> None:
        self.tensor_state = state


def _dims(tensor: LogicalTensor) -> tuple[int, ...]:
    """Return the dims over which a tensor has means: none if it has no rows."""
    return (-1, -2) if len(tensor.shape) > 1 else ()


def _factor_shape(tensor: LogicalTensor, dim: int) -> list[int]:
    """Return the shape of means over a dim: the full shape with 1 in that dim."""
    shape = list(tensor.shape)
    shape[dim] = 1
    return shape


def _slices(box: Box, dim: int) -> tuple[slice, ...]:
    spans = list(box)
    spans[dim] = (0, 1)
    return tuple(slice(start, stop) for start, stop in spans)
