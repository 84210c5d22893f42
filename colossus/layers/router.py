"""Which experts a token goes to, with what weights, and the losses that keep experts equally busy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.construct.initial_values import torch_linear
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.tensor_parallel.dtypes import product_dtype

SCORES = ("softmax", "sigmoid")


class Router(Layer):
    """The ``top_k`` of ``num_experts`` experts of each token, by the scores of one product, in float32 at least.

    Auxiliary losses are terms of the step's loss, of as many tokens as are routed, but only their gradient is added
    (`_add_gradient`): the loss that a step reports is the model's own. They count in training mode only.

    Args:
        score: ``softmax`` over the experts, or ``sigmoid`` of each.
        norm_topk: the weights of a token's experts are divided by their sum.
        bias_update: above 0, a buffer ``bias`` [experts] is added to the scores for the choice alone, and moved by so
            much at the end of a step, up for experts with fewer tokens than the mean (2408.15664).
        aux_loss: coefficient of the load-balancing loss of Switch (2101.03961, section 2.2): experts x sum over them
            of (share of the choices) x (mean score), 1 when balanced. Both are of a microbatch, over all ranks that
            split it.
        z_loss: coefficient of the mean square of logsumexp(logits) (2202.08906, section 3.2).

    Shape:
        input [tokens, hidden_size], plain and whole; output weights and experts, both [tokens, top_k], the best first.
    """

    bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        score: str = "softmax",
        norm_topk: bool = True,
        bias_update: float = 0.0,
        aux_loss: float = 0.0,
        z_loss: float = 0.0,
        init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if score not in SCORES:
            raise located_error(f"Router: score = {score!r}; use {' or '.join(SCORES)}")
        if not 1 <= top_k <= num_experts:
            raise located_error(f"Router: top_k = {top_k} is not in 1..{num_experts}, the number of experts")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.score, self.norm_topk = score, norm_topk
        self.bias_update, self.aux_loss, self.z_loss = bias_update, aux_loss, z_loss
        shape = (num_experts, hidden_size)
        self.weight = self.make_parameter({"": shape}, Layout.whole(2), init or torch_linear(hidden_size), dtype=dtype)
        self.decide_gradients(self.weight, self.parallel.regions.whole)
        self.register_buffer("bias", torch.zeros(num_experts) if bias_update else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = _wide_product(x, self.weight)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        biased = scores.detach() if self.bias is None else scores.detach() + self.bias
        experts = biased.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.training and (self.aux_loss or self.z_loss):
            weights = _add_gradient(weights, self._losses(logits, scores, experts))
        return weights, experts

    def _losses(self, logits: Tensor, scores: Tensor, experts: Tensor) -> Tensor:
        """The auxiliary losses of this rank's tokens, summed over these: a scalar."""
        losses = logits.new_zeros(())
        if self.aux_loss:
            counts = count_choices(experts, self.num_experts)
            group = self.context.group(self.parallel.regions.whole.shard_axes)
            counts = collectives.all_reduce(counts, group, what="experts").wait()
            share = counts / counts.sum()
            probabilities = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
            losses = losses + self.aux_loss * self.num_experts * (share * probabilities.sum(0)).sum()
        if self.z_loss:
            losses = losses + self.z_loss * logits.logsumexp(-1).square().sum()
        return losses

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, top_k={self.top_k}, score={self.score!r}, norm_topk={self.norm_topk}"


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """How often each expert is chosen: [num_experts], int64; no host waits for it."""
    flat = experts.reshape(-1)
    return torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add_(0, flat, torch.ones_like(flat))


def _wide_product(x: Tensor, weight: nn.Parameter) -> Tensor:
    """``x @ weight.T`` in float32 at least, also under `torch.autocast`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with nullcontext() if product_dtype(x) is None else torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), weight.to(wide))


class _AddGradient(torch.autograd.Function):
    """x, as it is; in backward a loss gets the gradient of one token's loss, 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return grads[0], torch.ones_like(loss)


def _add_gradient(x: Tensor, loss: Tensor) -> Tensor:
    """x; whenever its gradient is computed, that of ``loss``, a sum over tokens, is added to what this depends on."""
    out: Tensor = _AddGradient.apply(x, loss)
    return out
