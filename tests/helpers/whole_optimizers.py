"""Optimizers of whole parameters as a config names them, and the same of plain torch or of a paper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]


class PlainLAMB(torch.optim.Optimizer):
    """Algorithm 2 of 1904.00962, with bias correction."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, weight_decay: float = 0.01) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is None:
                    continue
                state = self.state[w]
                t = state["t"] = state.get("t", 0) + 1
                m = state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * w.grad
                v = state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * w.grad**2
                update = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-6) + group["weight_decay"] * w
                norms = w.norm(), update.norm()
                w -= group["lr"] * (norms[0] / norms[1] if norms[0] > 0 and norms[1] > 0 else 1.0) * update


class PlainLARS(torch.optim.Optimizer):
    """Algorithm 1 of 1708.03888."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                wd, w_norm, g_norm = 0.01, w.norm(), w.grad.norm()
                local = 0.02 * w_norm / (g_norm + wd * w_norm) if w_norm > 0 and g_norm > 0 else 1.0
                state = self.state[w]
                state["v"] = 0.9 * state.get("v", 0.0) + group["lr"] * local * (w.grad + wd * w)
                w -= state["v"]


class Shampoo(torch.optim.Optimizer):
    """1802.09568 for matrices, SGD for the rest: state of other shapes than the parameter's, a count in the group."""

    def __init__(self, params: Iterable[Any], lr: float = 1e-3) -> None:
        super().__init__(params, dict(lr=lr, count=0))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for w in group["params"]:
                if w.grad is None or w.dim() != 2:
                    w -= group["lr"] * (0.0 if w.grad is None else w.grad)
                    continue
                state = self.state[w]
                if not state:
                    state["factors"] = [torch.eye(size, dtype=w.dtype) * 1e-3 for size in w.shape]
                left, right = state["factors"]
                left += w.grad @ w.grad.T
                right += w.grad.T @ w.grad
                w -= group["lr"] * group["count"] ** -0.5 * _root(left) @ w.grad @ _root(right)


def _root(matrix: Tensor) -> Tensor:
    """To the power of -1/4."""
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ (values**-0.25).diag() @ vectors.T


def muon_and_adamw(named: Named) -> list[torch.optim.Optimizer]:
    matrices = [p for name, p in named if p.dim() == 2 and name.startswith("blocks.")]
    others = [p for _, p in named if all(p is not each for each in matrices)]
    assert len(matrices) == 6
    muon = torch.optim.Muon(matrices, lr=2e-3, weight_decay=0.1)
    return [muon, torch.optim.AdamW(others, lr=1e-3, weight_decay=0.02)]


def params(named: Named) -> list[nn.Parameter]:
    return [param for _, param in named]


#: name -> the config's optimizer and the same of plain torch
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Named], list[torch.optim.Optimizer]]]] = {
    "LAMB": (
        dict(type="LAMB", lr=1e-2, weight_decay=0.05),
        lambda named: [PlainLAMB(params(named), lr=1e-2, weight_decay=0.05)],
    ),
    "LARS": (
        dict(type="LARS", lr=0.5, weight_decay=0.01, trust_coefficient=0.02),
        lambda named: [PlainLARS(params(named), lr=0.5)],
    ),
    "Adafactor": (
        dict(type="Adafactor", lr=1e-2, weight_decay=0.02),
        lambda named: [torch.optim.Adafactor(params(named), lr=1e-2, weight_decay=0.02)],
    ),
    "Muon": (dict(type="Muon", lr=2e-3, adamw=dict(lr=1e-3, weight_decay=0.02)), muon_and_adamw),
    "Shampoo": (dict(type=Shampoo, lr=0.02, whole=True), lambda named: [Shampoo(params(named), lr=0.02)]),
}
