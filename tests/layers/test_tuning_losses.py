"""Losses of tuning from split logits: sums, counts and every gradient beside plain torch, written anew here."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import but
from helpers.modes import MODES
from helpers.ranks import run_ranks
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

import colossus
from colossus import layers
from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.layers.token_values import ChunkedLogits
from colossus.state.model_state_dict import full_state_dict

BATCH, TOKENS, HIDDEN, VOCAB = 24, 5, 24, 29


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


X, OTHER = numbers(BATCH, TOKENS, HIDDEN) * 3, numbers(BATCH, TOKENS, HIDDEN, seed=1) * 3
LABELS = torch.randint(0, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(2))
LABELS[::3, :2] = -100
LABELS[4:6] = -100  # a pair without labels
WEIGHTS, GAIN, OLD = numbers(BATCH, TOKENS, seed=3).abs(), numbers(BATCH, seed=4), -numbers(BATCH, TOKENS, seed=5).abs()
EXTRA = {"token_weights": WEIGHTS, "advantages": GAIN, "old_log_probs": OLD}


def log_probs(logits: Tensor) -> Tensor:
    """By the definition; 0 where there is no label."""
    return logits.log_softmax(-1).gather(-1, LABELS.clamp(min=0)[..., None])[..., 0] * (LABELS != -100)


def plain_distillation(own: Tensor, other: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    temperature, weight = options.get("temperature", 1.0), options.get("label_weight", 0.0)
    q, p = (own / temperature).log_softmax(-1), (other / temperature).log_softmax(-1)
    if (k := options.get("top_k")) is not None:
        mask = torch.full_like(other, float("-inf")).scatter(-1, other.topk(k).indices, 0.0)
        p = (other / temperature + mask).log_softmax(-1)
    if options.get("reverse"):
        p, q = q, p
    divergence = torch.where(p.exp() > 0, p.exp() * (p - q), 0.0).sum(-1)
    loss = (1 - weight) * temperature**2 * divergence - weight * log_probs(own)
    valid = (LABELS != -100) * WEIGHTS
    return (loss * valid).sum(), valid.sum()


def plain_dpo(own: Tensor, other: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    beta, smoothing = options.get("beta", 0.1), options.get("label_smoothing", 0.0)
    total, count = torch.zeros((), dtype=torch.float64), 0
    ratios = log_probs(own).sum(1) - log_probs(other).sum(1)
    for pair in range(BATCH // 2):
        if (LABELS[2 * pair : 2 * pair + 2] == -100).all():
            continue
        margin = ratios[2 * pair] - ratios[2 * pair + 1]
        if options.get("kind") == "ipo":
            total = total + (margin - 1 / (2 * beta)) ** 2
        else:
            chance = torch.sigmoid(beta * margin)
            total = total - (1 - smoothing) * chance.log() - smoothing * (1 - chance).log()
        count += 1
    return total, torch.tensor(count)


def plain_policy(own: Tensor, other: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    mine, theirs, valid = log_probs(own), log_probs(other), LABELS != -100
    old = OLD if options.get("old", True) else mine.detach()
    ratio = (mine - old).exp()
    high = options.get("clip_high", 0.2)
    gain = GAIN[:, None].expand(ratio.shape)
    loss = torch.where(
        gain > 0, -gain * ratio.clamp(max=1 + high), -gain * ratio.clamp(min=1 - 0.2)
    )  # the smaller of the two, by the sign of the advantage
    loss = loss + options.get("kl_weight", 0.0) * ((theirs - mine).exp() - (theirs - mine) - 1)
    return (loss * valid * WEIGHTS).sum(), (valid * WEIGHTS).sum()


def distillation(own: Any, other: Any, labels: Tensor, extra: dict[str, Tensor], **options: Any) -> Any:
    return layers.distillation_loss(own, other, labels, token_weights=extra["token_weights"], **options)


def dpo(own: Any, other: Any, labels: Tensor, extra: dict[str, Tensor], **options: Any) -> Any:
    return layers.dpo_loss(own, other, labels, **options)


def policy(own: Any, other: Any, labels: Tensor, extra: dict[str, Tensor], old: bool = True, **options: Any) -> Any:
    more = dict(old_log_probs=extra["old_log_probs"]) if old else {}
    more["token_weights"] = extra["token_weights"]
    return layers.policy_loss(own, labels, extra["advantages"], reference=other, **more, **options)


LOSSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "forward": (distillation, plain_distillation, {}),
    "forward, warm, labels": (distillation, plain_distillation, dict(temperature=2.0, label_weight=0.3)),
    "reverse": (distillation, plain_distillation, dict(reverse=True, temperature=1.7)),
    "top 4": (distillation, plain_distillation, dict(top_k=4, temperature=0.8)),
    "dpo": (dpo, plain_dpo, dict(beta=0.05)),
    "dpo, smoothed": (dpo, plain_dpo, dict(beta=0.05, label_smoothing=0.2)),
    "ipo": (dpo, plain_dpo, dict(kind="ipo", beta=0.3)),
    "policy": (policy, plain_policy, dict(kl_weight=0.05, clip_high=0.3)),
    "on-policy": (policy, plain_policy, dict(kl_weight=0.05, old=False)),
}


def of_rank(context: ParallelContext, chunk: int | None) -> dict[str, Any]:
    """Every loss, summed over ranks with other samples; the gradients of this rank's input and of the whole weight."""
    axes = model_parallel_of(context).regions.whole.batch
    group = context.group(axes)
    rows = slice(group.index * BATCH // group.size, (group.index + 1) * BATCH // group.size)
    make = partial(layers.LMHead, HIDDEN, VOCAB)
    head, teacher = (
        colossus.build(lambda: make(init=layers.init.Normal(scale)), context, dtype=torch.float64)
        for scale in (0.5, 0.3)
    )
    out: dict[str, Any] = {}
    for name, (loss, _, options) in LOSSES.items():
        x = X[rows].clone().requires_grad_()
        own: Any = head(x) if chunk is None else ChunkedLogits(x, head, chunk)
        with torch.no_grad():
            other: Any = teacher(OTHER[rows]) if chunk is None else ChunkedLogits(OTHER[rows], teacher, chunk)
        total, number = loss(own, other, LABELS[rows], {key: value[rows] for key, value in EXTRA.items()}, **options)
        head.zero_grad()
        total.backward()
        with torch._C.DisableTorchFunctionSubclass():
            for param in (head.weight,):
                if axes := gradient_sum_axes(param, context):
                    param.grad = collectives.all_reduce(param.grad.contiguous(), context.group(axes)).wait()
        sums = collectives.all_reduce(torch.stack((total.detach(), number.double())), group).wait()
        out[name] = rows, sums, x.grad, full_state_dict(head, context, gradients=True)["weight"]
    out["weights"] = tuple(full_state_dict(model, context)["weight"] for model in (head, teacher))
    return out


def require_equal(results: list[dict[str, Any]]) -> None:
    for result in results:
        weights = result.pop("weights")
        for name, (rows, sums, dx, dw) in result.items():
            weight, teacher = weights[0].clone().requires_grad_(), weights[1]
            x = X.clone().requires_grad_()
            total, count = LOSSES[name][1](F.linear(x, weight), F.linear(OTHER, teacher), **LOSSES[name][2])
            total.backward()
            want = torch.stack((total.detach(), count.double())), x.grad[rows], weight.grad
            for what, mine, other in zip(("sums", "input", "weight"), (sums, dx, dw), want, strict=True):
                torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-11, msg=f"{name}: {what}")


@pytest.mark.parametrize("chunk", [None, 50])
@pytest.mark.parametrize("name", but(set(MODES) - {"1d", "3d_2x1x2"}, MODES))
def test_losses_are_those_of_plain_torch(name: str, chunk: int | None) -> None:
    require_equal(MODES[name].run(of_rank, chunk))


def test_losses_of_one_process_are_those_of_plain_torch() -> None:
    for chunk in (None, 1):
        require_equal(run_ranks(1, of_rank, chunk))


def test_half_a_pair_is_refused() -> None:
    with pytest.raises(ValueError, match="whole pairs"):
        layers.dpo_loss(X[:3], X[:3], LABELS[:3] % HIDDEN)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="infinite"):
        layers.distillation_loss(X, OTHER, LABELS, reverse=True, top_k=3)
    with pytest.raises(ValueError, match="a vocabulary of 24, the other one of 5"):
        layers.distillation_loss(X, OTHER[..., :5], LABELS)
    chunked = ChunkedLogits(OTHER, None, 8)
    with pytest.raises(ValueError, match="give both the same loss_chunk"):
        layers.distillation_loss(X, chunked, LABELS)
    with pytest.raises(AttributeError, match="made in chunks, by the losses"):
        chunked.flatten(0, 1)
    with pytest.raises(ValueError, match="token_weights has shape"):
        layers.policy_loss(X, LABELS % HIDDEN, GAIN, token_weights=GAIN)
    for rewards, group in ((GAIN, 1), (GAIN, 5)):
        with pytest.raises(ValueError, match=f"in groups of {group}"):
            layers.group_advantages(rewards, group)


def test_advantages_of_a_group() -> None:
    rewards = torch.tensor([1.0, 2.0, 3.0, 5.0, 5.0, 5.0])
    torch.testing.assert_close(
        layers.group_advantages(rewards, 3, eps=0.0)[:3], (rewards[:3] - 2.0) / rewards[:3].std()
    )
    assert layers.group_advantages(rewards, 3)[3:].tolist() == [0.0, 0.0, 0.0]


def test_what_a_chunked_head_saves_can_be_moved_elsewhere() -> None:
    """Its input is saved as autograd saves, and nowhere else."""

    def body(rank: int) -> None:
        x = (X * 1.0).requires_grad_()
        inner = x * 2.0
        storage = StorageWeakRef(inner.untyped_storage())
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.clone(), lambda saved: saved):
            loss, _ = layers.cross_entropy(ChunkedLogits(inner, layers.LMHead(HIDDEN, VOCAB).double(), 50), LABELS)
        del inner
        assert storage.expired()
        loss.backward()
        assert x.grad is not None

    run_ranks(1, body, with_context=False)
