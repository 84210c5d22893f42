"""The choice of a token's experts and their weights, and the losses that keep experts equally busy."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Constant, torch_linear
from colossus.error_place import located_error
from colossus.layers.block_options import group_problem
from colossus.layers.layer import Layer
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.tensor_parallel.dtypes import product_dtype

SCORES = ("softmax", "sigmoid")
#: the sums in `Router.totals` behind the experts' choices; the entropy of each token's scores is in nats
SUMS = ("entropy", "dropped", "aux_loss", "z_loss", "tokens")


class Router(Layer):
    """The ``top_k`` of ``num_experts`` experts of each token, by the scores of one product, in float32 at least.

    Auxiliary losses are terms of the step's loss, summed over the routed tokens, but only their gradient is added
    (`_AddGradient`): the reported loss of a step is the model's own. They count only in training mode.

    Attributes:
        totals: float64 sums over the forwards of a step, for this rank's tokens: the number of choices of each expert
            [experts], then those of `SUMS`. None before the first; its reader resets it (the engine at the end of a
            step). A recomputation does not count.

    Args:
        score: ``softmax`` over the experts, or ``sigmoid`` of each.
        norm_topk: the weights of a token's experts are divided by their sum.
        scale: factor of these weights.
        groups, top_groups: experts form so many groups; a token's experts come from the best ``top_groups``, in the
            order of a group's best score, for ``sigmoid`` of the sum of its two best (2405.04434; 2412.19437).
        bias_update: a buffer ``bias`` [experts] is added to the scores, only for the choice. The end of a step moves it
            by so much, up for experts with fewer tokens than the mean (2408.15664). None: no bias.
        aux_loss: coefficient of the load-balancing loss of Switch (2101.03961, section 2.2): experts x sum over them of
            (share of the choices) x (mean score), 1 when balanced. Both are of a microbatch, over all ranks that split
            it.
        capacity: see `MoE`. The expert of a dropped choice is ``num_experts``.
        z_loss: coefficient of the mean square of logsumexp(logits) (2202.08906, section 3.2).
        logit_bias: the product has a learned bias, ``logit_bias`` [experts] (gpt-oss).

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
        scale: float = 1.0,
        groups: int | None = None,
        top_groups: int | None = None,
        bias_update: float | None = None,
        logit_bias: bool = False,
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
        if problem := group_problem(num_experts, top_k, groups, top_groups, score):
            raise located_error(f"Router: {problem}")
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.score, self.norm_topk, self.scale = score, norm_topk, scale
        self.groups, self.top_groups = groups, top_groups
        self.bias_update, self.aux_loss, self.z_loss, self.capacity = bias_update, aux_loss, z_loss, capacity
        shape = (num_experts, hidden_size)
        self.weight = self.make_parameter({"": shape}, Layout.whole(2), init or torch_linear(hidden_size), dtype=dtype)
        bias = {"": (num_experts,)}
        self.logit_bias = self.make_parameter(bias, Layout.whole(1), Constant(0.0), dtype=dtype) if logit_bias else None
        for parameter in (self.weight, self.logit_bias):
            self.decide_gradients(parameter, self.parallel.regions.whole)
        self.register_buffer("bias", torch.zeros(num_experts) if bias_update is not None else None)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = _wide_product(x, self.weight, self.logit_bias)
        scores = logits.softmax(-1) if self.score == "softmax" else logits.sigmoid()
        biased = scores.detach() if self.bias is None else scores.detach() + self.bias
        if self.groups is not None and self.top_groups is not None:
            biased = self._within_groups(biased, self.groups, self.top_groups)
        experts = biased.topk(self.top_k, -1).indices
        weights = scores.gather(-1, experts)
        if self.norm_topk:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scale != 1.0:
            weights = weights * self.scale
        choices = experts if self.capacity is None else self._within_capacity(experts)
        if self.training:
            counts = count_choices(experts, self.num_experts)
            probabilities = scores if self.score == "softmax" else scores / scores.sum(-1, keepdim=True)
            losses = self._losses(logits, probabilities, counts)
            if self.aux_loss or self.z_loss:
                weights = _AddGradient.apply(weights, losses.sum(), self.parallel.batch_info.loss_scale)
            if torch._C._current_graph_task_id() == -1:
                self._count(counts, choices, probabilities.detach(), losses.detach())
        return weights, choices

    def _within_groups(self, scores: Tensor, groups: int, top_groups: int) -> Tensor:
        """Return the scores [tokens, experts] with -inf for experts outside of a token's best groups."""
        by_group = scores.unflatten(-1, (groups, -1))
        best = by_group.topk(2, -1).values.sum(-1) if self.score == "sigmoid" else by_group.amax(-1)
        is_out = torch.ones_like(best, dtype=torch.bool).scatter(-1, best.topk(top_groups, -1).indices, False)
        return by_group.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)

    def _losses(self, logits: Tensor, probabilities: Tensor, counts: Tensor) -> Tensor:
        """Return the auxiliary losses of this rank's tokens, summed over them: that of balance, and that of logits."""
        balance = z = logits.new_zeros(())
        if self.aux_loss:
            group = self.context.group(self.parallel.regions.whole.shard_axes)
            chosen = kept("a router's choices", lambda: collectives.all_reduce(counts, group, what="choices").wait())
            share = chosen / chosen.sum()
            balance = self.aux_loss * self.num_experts * (share * probabilities.sum(0)).sum()
        if self.z_loss:
            z = self.z_loss * logits.logsumexp(-1).square().sum()
        return torch.stack((balance, z))

    def _within_capacity(self, experts: Tensor) -> Tensor:
        """Return the choices [tokens, top_k] with ``num_experts`` for those beyond their expert's capacity."""
        assert self.capacity is not None
        limit = int(self.capacity * experts.numel() / self.num_experts)
        chosen = F.one_hot(experts.reshape(-1), self.num_experts)
        number = (chosen.cumsum(0) * chosen).sum(-1).view_as(experts)
        return experts.masked_fill(number > limit, self.num_experts)

    @torch.no_grad()
    def _count(self, counts: Tensor, choices: Tensor, probabilities: Tensor, losses: Tensor) -> None:
        entropy = torch.special.entr(probabilities).sum()
        dropped = (choices == self.num_experts).sum()
        num_tokens = torch.full_like(entropy, len(choices), dtype=torch.float64)
        sums = [x.double() for x in (entropy, dropped, *losses, num_tokens)]
        totals = torch.cat((counts.double(), torch.stack(sums)))
        self.totals = totals if self.totals is None else self.totals + totals

    def extra_repr(self) -> str:
        return f"{self.num_experts} experts, top_k={self.top_k}, score={self.score!r}, norm_topk={self.norm_topk}"


def count_choices(experts: Tensor, num_experts: int) -> Tensor:
    """Return the number of choices of each expert: [num_experts], int64; the host does not wait for it.

    Args:
        experts: the choices; ``num_experts`` stands for no expert.
        num_experts: number of experts.
    """
    flat = experts.reshape(-1)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    return counts.scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]


def _wide_product(x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
    """Return ``x @ weight.T + bias`` in float32 at least, also under `torch.autocast`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with nullcontext() if product_dtype(x) is None else torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


class _AddGradient(torch.autograd.Function):
    """The identity of x; its backward also gives a loss, a sum over tokens, its gradient 1 (times ``scale``)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor | None) -> Tensor:
        ctx.seed = torch.ones_like(loss) if scale is None else scale.to(loss.dtype)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], ctx.seed, None
