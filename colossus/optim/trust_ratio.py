"""LAMB and LARS: the step of each logical parameter is scaled by the ratio of two norms over all of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm.host_transfer import send_to
from colossus.optim.logical_tensors import Holders, Sums
from colossus.optim.torch_classes import groups_of


class _TrustRatio(torch.optim.Optimizer):
    """Steps of logical parameters, each times a ratio of norms. One small all-reduce gives the ratios of all.

    State has the shape of the parameters, and is split as they are. A group of parameters may set ``adapt=False``: its
    ratio is 1 (biases and norms, in some recipes).
    """

    def __init__(self, params: Iterable[Any], holders: Holders, defaults: dict[str, Any]) -> None:
        super().__init__(groups_of(params), {"adapt": True, **defaults})
        members = [(group, tensor) for group in self.param_groups for tensor in holders.tensors(group["params"])]
        self._groups, self._tensors = [group for group, _ in members], [tensor for _, tensor in members]
        self._sums = Sums(self._tensors, holders)

    def _norms(self, *sequences: Sequence[Tensor]) -> list[Tensor]:
        """Return the norms of whole tensors, float64 [tensors], for each sequence of this rank's parts of them."""
        squares = torch.stack([self._sums.squares(parts) for parts in sequences])
        return list(self._sums.over_ranks(squares).sqrt())

    def _of_groups(self, option: str) -> Tensor:
        """Return an option of each logical tensor's group, float64 [tensors]."""
        values = torch.tensor([float(group[option]) for group in self._groups], dtype=torch.float64)
        return send_to(self._sums.counts.device, values)

    def _parts(self, by_parameter: dict[nn.Parameter, Tensor]) -> list[Tensor]:
        """Return this rank's part of each logical tensor from tensors by parameter; empty where there is none."""
        return [
            tensor.local(by_parameter[tensor.parameter])
            if tensor.parameter in by_parameter
            else tensor.parameter.new_empty(0)
            for tensor in self._tensors
        ]

    def _trained(self) -> Iterable[tuple[dict[str, Any], nn.Parameter]]:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    yield group, param


class LAMB(_TrustRatio):
    """LAMB (1904.00962, algorithm 2): Adam's step and weight decay, times |w| / |step| of each logical parameter.

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that store them.
        lr, betas, eps, weight_decay: those of torch.optim.AdamW, but weight decay is part of the step that is scaled.
        bias_correction: whether both moments are corrected.
    """

    def __init__(
        self,
        params: Iterable[Any],
        holders: Holders,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        bias_correction: bool = True,
    ) -> None:
        defaults = dict(lr=lr, betas=tuple(betas), eps=eps, weight_decay=weight_decay, bias_correction=bias_correction)
        super().__init__(params, holders, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. Collective over the ranks that store parts of them."""
        steps = {param: self._adam(group, param) for group, param in self._trained()}
        weights = self._parts({param: param.detach() for param in steps})
        updates = self._parts(steps)
        w, u = self._norms(weights, updates)
        ratios = torch.where((self._of_groups("adapt") > 0) & (w > 0) & (u > 0), w / u, 1.0)
        for group, weight, update, ratio in zip(self._groups, weights, updates, ratios, strict=True):
            weight.add_(update.mul_(ratio.to(update.device)), alpha=-group["lr"])

    def _adam(self, group: dict[str, Any], param: nn.Parameter) -> Tensor:
        state, grad, (beta1, beta2) = self.state[param], param.grad, group["betas"]
        assert grad is not None
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(grad), torch.zeros_like(grad)
        state["step"] += 1
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        count = float(state["step"]) if group["bias_correction"] else torch.inf
        denominator = (state["exp_avg_sq"] / (1 - beta2**count)).sqrt_().add_(group["eps"])
        step: Tensor = state["exp_avg"] / (1 - beta1**count) / denominator
        return step.add_(param, alpha=group["weight_decay"])


class LARS(_TrustRatio):
    """LARS (1708.03888, algorithm 1): SGD with momentum and a learning rate for each logical parameter.

    The rate is scaled by trust_coefficient times |w| / (|g| + weight_decay |w|).

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that store them.
        lr: learning rate; it is a factor of what is added to the momentum.
        momentum, weight_decay, nesterov: those of torch.optim.SGD.
        trust_coefficient: eta of the paper.
        eps: added to the divisor.
    """

    def __init__(
        self,
        params: Iterable[Any],
        holders: Holders,
        lr: float = 1.0,
        momentum: float = 0.9,
        weight_decay: float = 1e-4,
        trust_coefficient: float = 1e-3,
        eps: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        defaults = dict(lr=lr, momentum=momentum, weight_decay=weight_decay)
        defaults |= dict(trust_coefficient=trust_coefficient, eps=eps, nesterov=nesterov)
        super().__init__(params, holders, defaults)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. Collective over the ranks that store parts of them."""
        grads = {param: param.grad for _, param in self._trained() if param.grad is not None}
        weights, gradients = self._parts({param: param.detach() for param in grads}), self._parts(grads)
        w, g = self._norms(weights, gradients)
        eta, decay, eps = map(self._of_groups, ("trust_coefficient", "weight_decay", "eps"))
        ratios = torch.where((self._of_groups("adapt") > 0) & (w > 0) & (g > 0), eta * w / (g + decay * w + eps), 1.0)
        momenta = self._parts({param: self._momentum(param) for param in grads})
        for group, weight, gradient, momentum, ratio in zip(
            self._groups, weights, gradients, momenta, ratios, strict=True
        ):
            change = gradient.add(weight, alpha=group["weight_decay"]).mul_(ratio.to(weight.device) * group["lr"])
            momentum.mul_(group["momentum"]).add_(change)
            weight.sub_(change.add_(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum)

    def _momentum(self, param: nn.Parameter) -> Tensor:
        state = self.state[param]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(param)
        return state["momentum_buffer"]
