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
#: behind the choices of each expert in `Router.totals`; entropies are in nats, of the scores of each token
SUMS = ("entropy", "dropped", "aux_loss", "z_loss", "tokens")


class Router(Layer):
    """The ``top_k`` of ``num_experts`` experts of each token, by the scores of one product, in float32 at least.

    Auxiliary losses are terms of the step's loss, of as many tokens as are routed, but only their gradient is added
    (`_AddGradient`): the loss that a step reports is the model's own. They count in training mode only.

    Attributes:
        totals: float64 sums over the forwards of a step, of this rank's tokens: how often each expert was chosen
            [experts], then those of `SUMS`. None before the first; who reads them sets it back (the engine at the end
            of a step). A recomputation does not count.

    Args:
        score: ``softmax`` over the experts, or ``sigmoid`` of each.
        norm_topk: the weights of a token's experts are divided by their sum.
        bias_update: above 0, a buffer ``bias`` [experts] is added to the scores for the choice alone, and moved by so
            much at the end of a step, up for experts with fewer tokens than the mean (2408.15664).
        aux_loss: coefficient of the load-balancing loss of Switch (2101.03961, section 2.2): experts x sum over them
            of (share of the choices) x (mean score), 1 when balanced. Both are of a microbatch, over all ranks that
            split it.
        capacity: see `MoE`. Of a choice that is dropped the expert is ``num_experts``.
        z_loss: coefficient of the mean square of logsumexp(logits) (2202.08906, section 3.2).

    Shape:
        input [tokens, hidden_size], plain and whole; output weights and experts, both [tokens, top_k], the best first.
    """

    bias: Tensor | None
    totals: Tensor | None = None

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
        capacity: float | None = None,
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
        self.bias_update, self.aux_loss, self.z_loss, self.capacity = bias_update, aux_loss, z_loss, capacity
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
        kept = experts if self.capacity is None else self._within_capacity(experts)
        if self.training:
            counts = count_choices(experts, self.num_experts)
            probabilities = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
            losses = self._losses(logits, probabilities, counts)
            if self.aux_loss or self.z_loss:
                weights = _AddGradient.apply(weights, losses.sum(), self.parallel.batch_info.loss_scale)
            if torch._C._current_graph_task_id() == -1:
                self._count(counts, kept, probabilities.detach(), losses.detach())
        return weights, kept

    def _losses(self, logits: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """The auxiliary losses of this rank's tokens, summed over these: of balance, and of logits."""
        balance = z = logits.new_zeros(())
        if self.aux_loss:
            group = self.context.group(self.parallel.regions.whole.shard_axes)
            chosen = collectives.all_reduce(counts, group, what="choices").wait()
            share = chosen / chosen.sum()
            balance = self.aux_loss * self.num_experts * (share * probabilities.sum(0)).sum()
        if self.z_loss:
            z = self.z_loss * logits.logsumexp(-1).square().sum()
        return torch.stack((balance, z))

    def _within_capacity(self, experts: Tensor) -> Tensor:
        """The choices [tokens, top_k] without those behind the first of an expert that its capacity has room for."""
        assert self.capacity is not None
        limit = int(self.capacity * experts.numel() / self.num_experts)
        chosen = F.one_hot(experts.reshape(-1), self.num_experts)
        number = (chosen.cumsum(0) * chosen).sum(-1).view_as(experts)
        return experts.masked_fill(number > limit, self.num_experts)

    @torch.no_grad()
    def _count(self, counts: Tensor, kept: Tensor, probabilities: Tensor, losses: Tensor) -> None:
        entropy = torch.special.entr(probabilities).sum()
        dropped = (kept == self.num_experts).sum()
        num_tokens = torch.full_like(entropy, len(kept), dtype=torch.float64)
        sums = [x.double() for x in (entropy, dropped, *losses, num_tokens)]
        totals = torch.cat((counts.double(), torch.stack(sums)))
        self.totals = totals if self.totals is None else self.totals + totals

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
    """x, as it is; whenever its gradient is computed, a loss that is a sum over tokens gets that of a token's loss, 1
    (times ``scale``).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.seed = torch.ones_like(loss) if scale is None else scale.to(loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.seed, None
