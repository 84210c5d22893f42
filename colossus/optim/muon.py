"""Muon: momentum of each matrix, made orthogonal by a Newton-Schulz iteration (Jordan 2024, Moonlight 2502.16982)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from colossus.comm.shared_memory import piece_bytes
from colossus.layout.parameter import spec_of
from colossus.optim.logical_tensors import Holders
from colossus.optim.owner_exchange import Exchange, in_buckets
from colossus.optim.torch_classes import groups_of, without_dynamo

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def orthogonalise(x: Tensor, coefficients: Sequence[float], steps: int, eps: float) -> Tensor:
    """Return nearly U V^T of ``x`` = U S V^T, by torch.optim.Muon's iteration: its singular values are in [0.7, 1.2].

    Args:
        x: [rows, columns]; the result is computed in its dtype.
        coefficients: (a, b, c) of x <- a x + (b x x^T + c (x x^T)^2) x.
        steps: number of iterations.
        eps: lower bound of the norm that ``x`` is divided by.
    """
    a, b, c = coefficients
    is_tall = x.shape[0] > x.shape[1]
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def flops(shape: Sequence[int], steps: int) -> float:
    """Return the FLOPs of `orthogonalise`: each step computes x x^T, its square, and the product with x."""
    short, long = sorted(shape)
    return steps * (4.0 * short * short * long + 2.0 * short**3)


def lr_ratio(shape: Sequence[int], adjust_lr_fn: str | None) -> float:
    """Return the factor of the learning rate for a matrix [out, in], as torch.optim.Muon defines it."""
    rows, columns = shape
    if adjust_lr_fn == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns))


class Muon(torch.optim.Optimizer):
    """Muon of whole matrices under every plan; AdamW for all other parameters.

    Momentum is split as the parameters are. The momentum of a matrix, in ``dtype``, is sent to the owner of the matrix,
    one of the ranks that store parts of it (`choose_owners` by `flops`). The owner makes it orthogonal and sends the
    parts back. All ranks together send at most (1 + copies) elements for each of the matrix (`Exchange.bytes_sent`).
    One bucket is sent while another is computed.

    Matrices are the logical parameters of two dims (query, key and value are three) and each expert's, but for those of
    embeddings and output layers. A group of parameters may set ``muon=True`` or ``False``.

    Args:
        params: stored parameters, or groups of them.
        holders: the ranks that store them.
        lr, weight_decay, momentum, nesterov, ns_coefficients, ns_steps, eps, adjust_lr_fn: those of `torch.optim.Muon`.
        dtype: dtype in which matrices are sent and made orthogonal: ``bf16``, as in torch, ``fp32``, ``fp64``.
        adamw: options of AdamW for all other parameters: ``lr`` (by default that above), ``betas``, ``eps``,
            ``weight_decay``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        holders: Holders,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.775, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        dtype: str = "bf16",
        adamw: dict[str, Any] | None = None,
    ) -> None:
        own: dict[str, Any] = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, eps=eps, ns_steps=ns_steps,
            ns_coefficients=tuple(ns_coefficients), adjust_lr_fn=adjust_lr_fn,
        )  # fmt: skip
        matrices, others = [], []
        for group in groups_of(params):
            options = {key: value for key, value in group.items() if key not in ("params", "muon")}
            is_matrix = [_is_for_muon(param, group.get("muon"), holders) for param in group["params"]]
            members = list(zip(group["params"], is_matrix, strict=True))
            matrices.append({**own, **options, "muon": True, "params": [param for param, is_one in members if is_one]})
            others.append({**options, "muon": False, "params": [param for param, is_one in members if not is_one]})
        #: optimizer of all other parameters; its groups and its state are this optimizer's
        self.others = without_dynamo(torch.optim.AdamW)(others, **{"lr": lr, "fused": True, **(adamw or {})})
        super().__init__([*matrices, *self.others.param_groups], {})
        self.param_groups = [*matrices, *self.others.param_groups]
        self.others.state = self.state
        members_of_muon = [(group, tensor) for group in matrices for tensor in holders.tensors(group["params"])]
        costs = [flops(tensor.shape, group["ns_steps"]) for group, tensor in members_of_muon]
        self._dtype, self._device = DTYPES[dtype], holders.context.device
        #: each exchange, with the parameter groups of its tensors
        self._exchanges = [
            (exchange, [members_of_muon[k][0] for k in numbers])
            for numbers, exchange in in_buckets(
                [tensor for _, tensor in members_of_muon], costs, holders, piece_bytes() // self._dtype.itemsize
            )
        ]

    @property
    def exchanges(self) -> list[Exchange]:
        """The exchanges of matrices with their owners, in the order of a step."""
        return [exchange for exchange, _ in self._exchanges]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step all parameters that have a gradient. Collective over the ranks that store them."""
        self._move_momenta()
        coming = [self._start(*first) for first in self._exchanges[:1]]
        returning: list[Callable[[], None]] = []
        for number, (exchange, groups) in enumerate(self._exchanges):
            whole = coming.pop()()
            if number + 1 < len(self._exchanges):  # sent while this one is computed
                coming.append(self._start(*self._exchanges[number + 1]))
            options = [groups[k] for k in exchange.owned]
            updates = [
                orthogonalise(x, group["ns_coefficients"], group["ns_steps"], group["eps"])
                for x, group in zip(whole, options, strict=True)
            ]
            if returning:
                returning.pop()()
            back = exchange.to_holders(updates, torch.empty(0, dtype=self._dtype, device=self._device))
            returning.append(partial(self._apply, exchange, groups, back))
        for finish in returning:
            finish()
        self.others.step()

    def _move_momenta(self) -> None:
        for group in self.param_groups:
            for param in group["params"] if group["muon"] else ():
                if param.grad is None:
                    continue
                state = self.state[param]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(param.grad)
                state["momentum_buffer"].lerp_(param.grad, 1 - group["momentum"])

    def _start(self, exchange: Exchange, groups: Sequence[dict[str, Any]]) -> Callable[[], list[Tensor]]:
        """Start to send momentum to the owners, one bucket at a time, so that no second copy of all matrices is needed.

        A matrix without a gradient is sent as 0, since all ranks know the lengths beforehand.
        """
        parts = []
        for tensor, group in zip(exchange.tensors, groups, strict=True):
            grad = tensor.parameter.grad
            if grad is None:
                part = torch.zeros_like(tensor.local(tensor.parameter), dtype=self._dtype)
            else:
                part = tensor.local(self.state[tensor.parameter]["momentum_buffer"])
                part = tensor.local(grad).lerp(part, group["momentum"]) if group["nesterov"] else part
            parts.append(part.to(self._device, self._dtype))
        return exchange.to_owners(parts)

    def _apply(self, exchange: Exchange, groups: Sequence[dict[str, Any]], back: Callable[[], list[Tensor]]) -> None:
        for tensor, group, update in zip(exchange.tensors, groups, back(), strict=True):
            if tensor.parameter.grad is None:
                continue
            part, lr = tensor.local(tensor.parameter), group["lr"]
            part.mul_(1 - lr * group["weight_decay"])
            part.add_(update.to(part.device), alpha=-lr * lr_ratio(tensor.shape, group["adjust_lr_fn"]))


def _is_for_muon(param: nn.Parameter, wanted: bool | None, holders: Holders) -> bool:
    if wanted is False or (wanted is None and id(param) in holders.tables):
        return False
    spec = spec_of(param)
    is_matrix = len(spec.shards[0].shape) == 2 + spec.is_stack
    if wanted and not is_matrix:
        raise ValueError(
            f"muon=True in a group with {spec.name}, of shape {spec.shards[0].shape}: Muon needs matrices, of two dims"
        )
    return is_matrix
