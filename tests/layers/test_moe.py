"""Mixture of experts against a loop over tokens in plain torch: outputs and every gradient."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.modes import MODES, own
from helpers.ranks import run_ranks
from torch import Tensor

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.config.schema import Parallel
from colossus.construct.initial_values import Normal
from colossus.context.grid import ONE_RANK, build_grid
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers import moe, router
from colossus.layers.expert_rows import bytes_sent
from colossus.layers.grouped_matmul import grouped_product
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.layers.router import SUMS
from colossus.state.model_state_dict import full_state_dict

HIDDEN, FFN, EXPERTS, TOP_K = 24, 36, 6, 3
#: experts spread over ranks
SPREAD = {
    "data3": Parallel(data=3, expert=3),
    "data4_expert2": Parallel(data=4, expert=2),
    "data2_1d": Parallel(data=2, expert=2, tensor=dict(size=2)),
}

VARIANTS: dict[str, dict[str, Any]] = {
    "mixtral": {},
    "qwen": dict(router=dict(norm_topk=False)),
    "sigmoid, shared": dict(router=dict(score="sigmoid", bias_update=0.1), shared=12),
    "two of three groups": dict(
        router=dict(score="sigmoid", bias_update=0.0, groups=3, top_groups=2, scale=2.5), shared=12
    ),
    "one of two groups": dict(router=dict(groups=2, top_groups=1, norm_topk=False)),
    "losses": dict(aux_loss=0.3, z_loss=0.02),
    "sigmoid, losses": dict(router=dict(score="sigmoid"), aux_loss=0.3, z_loss=0.02),
    "uneven ffn": dict(ffn_size=35),
    "biases, clamped gate": dict(bias=True, limit=0.5, alpha=1.3),
    "biases, uneven ffn": dict(bias=True, ffn_size=35, aux_loss=0.3, z_loss=0.02),
}


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return down @ (F.silu(gate @ x) * (up @ x))


def expert_of(x: Tensor, state: Mapping[str, Tensor], number: int, options: Mapping[str, Any]) -> Tensor:
    """One expert of one token, as gpt-oss writes it where it has a limit."""
    gate, up, down = (state[f"experts.{name}"][number] for name in ("gate", "up", "down"))
    if not options.get("bias"):
        return swiglu(x, gate, up, down)
    gate_bias, up_bias, down_bias = (state[f"experts.{name}_bias"][number] for name in ("gate", "up", "down"))
    gate, up = gate @ x + gate_bias, up @ x + up_bias
    if "limit" not in options:
        return down @ (F.silu(gate) * up) + down_bias
    limit = options["limit"]
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    return down @ ((up + 1) * (gate * torch.sigmoid(gate * options["alpha"]))) + down_bias


def allowed(scores: list[float], score: str, groups: int = 1, top_groups: int = 1, **_: Any) -> list[int]:
    """Return the experts of a token's best groups."""
    size = EXPERTS // groups
    members = [range(first, first + size) for first in range(0, EXPERTS, size)]
    best = [sum(sorted(scores[e] for e in group)[-2 if score == "sigmoid" else -1 :]) for group in members]
    chosen = sorted(range(groups), key=best.__getitem__)[-top_groups:]
    return [expert for group in chosen for expert in members[group]]


def plain_moe(x: Tensor, state: Mapping[str, Tensor], **options: Any) -> tuple[Tensor, Tensor]:
    """Output [tokens, hidden] and the sum of the auxiliary losses, for x [tokens, hidden], token by token."""
    router = {"score": "softmax", "norm_topk": True, **options.get("router", {})}
    outputs, losses = [], []
    logits = x @ state["router.weight"].t() + state.get("router.logit_bias", torch.zeros(EXPERTS))
    scores = logits.softmax(-1) if router["score"] == "softmax" else logits.sigmoid()
    biased = (scores + state.get("router.bias", torch.zeros(EXPERTS))).tolist()
    chosen = [sorted(allowed(row, **router), key=row.__getitem__, reverse=True)[:TOP_K] for row in biased]
    for token, row, experts in zip(x, scores, chosen, strict=True):
        weights = row[experts] / row[experts].sum() if router["norm_topk"] else row[experts]
        weights = weights * router.get("scale", 1.0)
        y = sum(
            weight * expert_of(token, state, expert, options) for weight, expert in zip(weights, experts, strict=True)
        )
        if "shared" in options:
            y = y + swiglu(token, *(state[f"shared.{name}.weight"] for name in ("up.gate", "up.value", "down")))
        outputs.append(y)
    share = torch.tensor([sum(e in experts for experts in chosen) for e in range(EXPERTS)]) / (TOP_K * len(x))
    probabilities = scores / scores.sum(-1, keepdim=True)
    losses = [
        options.get("aux_loss", 0.0) * EXPERTS * (share * p).sum() + options.get("z_loss", 0.0) * line.logsumexp(0) ** 2
        for p, line in zip(probabilities, logits, strict=True)
    ]
    return torch.stack(outputs), sum(losses)


def make_moe(sizes: Mapping[str, Any]) -> layers.MoE:
    """A layer whose biases are not zero."""
    with patch.object(moe, "Constant", lambda _: Normal(0.3)), patch.object(router, "Constant", lambda _: Normal(0.3)):
        return layers.MoE(HIDDEN, **sizes)


def results(context: ParallelContext, options: Mapping[str, Any], x: Tensor, dy: Tensor) -> tuple[Any, ...]:
    """Of a rank of a layer between blocks: its samples, output, gradient of the input; weights, and all gradients."""
    sizes = {"ffn_size": FFN, "num_experts": EXPERTS, "top_k": TOP_K, **options}
    model = colossus.build(partial(make_moe, sizes), context, dtype=torch.float64)
    if model.router.bias is not None:
        model.router.bias.copy_(numbers(EXPERTS, seed=2))
    tokens = own(context, x).clone().requires_grad_()
    y = layers.to_whole(model(layers.to_residual(tokens, model_parallel_of(context))))
    y.backward(own(context, dy))
    for parameter in model.parameters():
        if axes := gradient_sum_axes(parameter, context):
            torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
    state, gradients = full_state_dict(model, context), full_state_dict(model, context, gradients=True)
    return own(context, torch.arange(len(x))), y.detach(), tokens.grad, state, gradients


@pytest.mark.parametrize("mode", ["one", "1d", "1d_sequence", "2d", "2d_2x3", "2.5d_depth2", "3d_1x2x3", *SPREAD])
@pytest.mark.rest("2d", "2.5d_depth2", "2d_2x3", "1d_sequence", "data3", "data2_1d", "one", "3d_1x2x3")
def test_every_mode_is_a_loop_over_tokens(mode: str) -> None:
    x, dy = numbers(12, 6, HIDDEN), numbers(12, 6, HIDDEN, seed=1)

    def body(context: ParallelContext) -> list[tuple[Any, ...]]:
        return [results(context, options, x, dy) for options in VARIANTS.values()]

    if mode in SPREAD:
        plan = build_grid(SPREAD[mode])
        results_of_ranks = run_ranks(plan.world_size, body, plan=plan)
    else:
        results_of_ranks = [body(ParallelContext(ONE_RANK))] if mode == "one" else MODES[mode].run(body)
    for name, *of_ranks in zip(VARIANTS, *results_of_ranks, strict=True):
        leaves = {key: value.clone().requires_grad_() for key, value in of_ranks[0][3].items()}
        leaf = x.clone().requires_grad_()
        want, loss = plain_moe(leaf.flatten(0, 1), leaves, **VARIANTS[name])
        ((want.view_as(x) * dy).sum() + loss).backward()
        assert leaf.grad is not None
        for rows, y, dx, _, gradients in of_ranks:
            pairs = {"output": (y, want.detach().view_as(x)[rows]), "input": (dx, leaf.grad[rows])}
            pairs |= {key: (gradient, leaves[key].grad) for key, gradient in gradients.items()}
            assert gradients.keys() == leaves.keys() - {"router.bias"}
            for what, (mine, other) in pairs.items():
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10, msg=f"{name}: {what}")


def test_what_is_over_capacity_is_left_out() -> None:
    x, limit = numbers(20, HIDDEN), 9
    model = layers.MoE(HIDDEN, FFN, EXPERTS, TOP_K, capacity=limit * EXPERTS / (20 * TOP_K), dtype=torch.float64)
    tokens = x.clone().requires_grad_()
    y = model(tokens)
    y.sum().backward()
    assert model.router.totals is not None
    dropped = model.router.totals[EXPERTS:][SUMS.index("dropped")]
    model.router.capacity = None
    weights, experts = model.router(x)
    used = dict.fromkeys(range(EXPERTS), 0)
    for token in range(20):
        want = torch.zeros(HIDDEN, dtype=torch.float64)
        for weight, expert in zip(weights[token], experts[token].tolist(), strict=True):
            used[expert] += 1
            if used[expert] <= limit:
                stacked = (model.experts.gate, model.experts.up, model.experts.down)
                want = want + weight * swiglu(x[token], *(stack[expert] for stack in stacked))
        torch.testing.assert_close(y[token], want, rtol=1e-12, atol=1e-12)
    assert dropped == sum(max(0, count - limit) for count in used.values()) > 0
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_losses_are_scaled_as_the_loss_is() -> None:
    x, gradients = numbers(6, HIDDEN), []
    context = ParallelContext(ONE_RANK)
    make = partial(layers.MoE, HIDDEN, FFN, EXPERTS, TOP_K, aux_loss=0.3, z_loss=0.02)
    model = colossus.build(make, context, dtype=torch.float64)
    for factor in (1.0, 8.0):
        with model_parallel_of(context).batch(BatchInfo(loss_scale=torch.tensor(factor))):
            (model(x).sum() * factor).backward()
        gradients.append(model.router.weight.grad / factor)
        model.zero_grad()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-12, atol=1e-12)


def test_one_kernel_is_the_loop() -> None:
    """Of bfloat16, which CPUs have, too."""
    results, counts = [], torch.tensor([3, 0, 9, 4])
    for sizes in (counts, counts.tolist()):
        x, weights = (numbers(*shape).bfloat16().requires_grad_() for shape in ((16, 24), (4, 40, 24)))
        y = grouped_product(x, weights, sizes)
        y.backward(numbers(16, 40, seed=1).bfloat16())
        results.append((y.detach(), x.grad, weights.grad))
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_of_tokens_are_those_of_the_formula(ranks: int) -> None:
    num_experts, tokens = 8, 30
    plan = build_grid(Parallel(data=ranks, expert=ranks))

    def body(context: ParallelContext) -> tuple[list[int], float, float]:
        model = colossus.build(lambda: layers.MoE(HIDDEN, FFN, num_experts, TOP_K), context, dtype=torch.float64)
        x = numbers(tokens, HIDDEN, seed=context.rank).requires_grad_()
        with accounting.count() as moved:
            model(x).sum().backward()
        counts = model.router.totals[:num_experts].int().tolist()
        return counts, *(moved.bytes(operation=name) for name in ("all_gather lengths", "all_to_all tokens"))

    results = run_ranks(ranks, body, plan=plan)
    to = [[sum(part) for part in torch.tensor(counts).chunk(ranks)] for counts, _, _ in results]
    for rank, (_, lengths, rows) in enumerate(results):
        own, others = sum(to[rank]) - to[rank][rank], sum(row[rank] for row in to) - to[rank][rank]
        assert (lengths, rows) == bytes_sent(int(own), int(others), ranks, num_experts, HIDDEN * 8)
        assert rows > 0


def test_wrong_options_are_told() -> None:
    with pytest.raises(ValueError, match=r"top_k = 7 is not in 1..6"):
        layers.MoE(HIDDEN, FFN, EXPERTS, 7)
    with pytest.raises(ValueError, match=r"score = 'relu'; use softmax or sigmoid"):
        layers.MoE(HIDDEN, FFN, EXPERTS, 2, router=dict(score="relu"))
