"""Loss functions whose tokens are split: sums over all are those of one process, what moves tokens is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.parts import part_of_tokens as tokens
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.sharded_tensor.regions import for_loss

BATCH, TOKENS, WIDTH, CLASSES = 4, 16, 8, 11
Batch = dict[str, Tensor]
Loss = Callable[["Net", Tensor, Batch], tuple[Tensor, Any]]


class Net(nn.Module):
    """``kept`` is a head that a loss function calls; it takes what the model returns."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.attention = layers.Attention(WIDTH, 2)
        self.head, self.kept = nn.Linear(WIDTH, CLASSES), layers.Linear(CLASSES, CLASSES)
        self.loss_of: Loss = usual
        self.eval_metrics = {"accuracy": lambda outputs, batch: correct(outputs, batch)}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        return self.head(x + self.attention(x))

    def loss(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
        return self.loss_of(self, outputs, batch)


def batch_of() -> Batch:
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(0, CLASSES, (BATCH, TOKENS), generator=generator)
    labels = ids.roll(-1, 1).masked_fill(torch.rand(BATCH, TOKENS, generator=generator) < 0.3, -100)
    targets = torch.randn(BATCH, TOKENS, CLASSES, generator=generator, dtype=torch.float64)
    weights = torch.rand(BATCH, 1, generator=generator, dtype=torch.float64)
    return {"inputs": ids, "labels": labels, "targets": targets, "weights": weights, "lengths": labels.ne(-100).sum(1)}


def correct(outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    valid = batch["labels"] != -100
    return ((outputs.argmax(-1) == batch["labels"]) & valid).sum(), valid.sum()


def usual(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    labels = batch["labels"]
    return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def masked(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    mask = (batch["labels"] != -100).to(outputs.dtype)
    losses = F.cross_entropy(outputs.view(-1, CLASSES), batch["labels"].reshape(-1).clamp(min=0), reduction="none")
    return (losses * mask.view(-1)).sum(), mask.sum().item()


def of_columns(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    losses = F.cross_entropy(outputs.transpose(1, 2), batch["labels"], reduction="none", label_smoothing=0.1)
    return (losses * batch["weights"]).sum(dim=(0, 1)), (batch["labels"] != -100).count_nonzero()


def by_hand(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    labels, mask = batch["labels"].clamp(min=0), batch["labels"] != -100
    chosen = outputs.float().log_softmax(-1).double().gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return -chosen.masked_fill(~mask, 0.0).sum(), mask.float().sum()


def chosen_tokens(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    mask = batch["labels"] != -100
    return F.nll_loss(outputs.log_softmax(-1)[mask], batch["labels"][mask], reduction="sum"), mask.sum()


def squares(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    return F.mse_loss(outputs, batch["targets"], reduction="sum"), batch["labels"].numel()


def other_elements(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    total = F.smooth_l1_loss(outputs, batch["targets"], reduction="sum")
    total = total + F.binary_cross_entropy_with_logits(outputs, batch["targets"].sigmoid(), reduction="none").sum()
    return total + F.kl_div(outputs.log_softmax(-1), batch["targets"].softmax(-1), reduction="sum"), BATCH


def ours(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    return layers.cross_entropy(outputs, batch["labels"], z_loss=0.1)


def of_a_head(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    def part(x: Tensor) -> Tensor:
        return F.cross_entropy(net.kept(x).flatten(0, 1), batch["labels"].flatten(), reduction="sum")

    return checkpoint(part, outputs, use_reentrant=False), (batch["labels"] != -100).sum()  # type: ignore[no-any-return]


USUAL = (usual, masked, of_columns, by_hand, chosen_tokens, squares, ours, of_a_head)


def _numbers(rank: int, parallel: dict[str, Any], num_tokens: int) -> Any:
    """Loss, gradients and metric of each loss function, from the same weights."""
    config = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=1e-300),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=7),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Net)
    found = {}
    count = engine.context.size("data")
    batch = {
        key: (x[:, :num_tokens] if x.dim() > 1 else x).chunk(count)[engine.context.index("data")]
        for key, x in batch_of().items()
    }
    for loss in USUAL:
        if num_tokens < TOKENS and loss is squares:
            continue  # of padded tokens, too
        engine.model.loss_of = loss
        evaluated, result = engine.eval_step(batch), engine.train_step(batch)
        gradients = full_state_dict(engine.model, engine.context, gradients=True)
        found[loss.__name__] = (result.loss, evaluated.loss, evaluated.metrics["accuracy"], gradients)
    engine.close()
    return found


PLANS = {
    "ring": (2, dict(sequence=dict(size=2, mode="ring")), TOKENS),
    "padded": (2, dict(sequence=dict(size=2, mode="ring", pad=True)), TOKENS - 3),
    "ulysses": (2, dict(sequence=dict(size=2, mode="ulysses")), TOKENS),
    "hybrid": (4, dict(sequence=dict(size=4, mode="hybrid", ulysses=2)), TOKENS),
    "1d": (4, dict(sequence=2, tensor=2), TOKENS),
    "zero 3": (4, dict(sequence=2, data=2, zero=3), TOKENS),
}


@pytest.mark.parametrize("name", ["padded", *long("ring", "ulysses", "hybrid", "1d", "zero 3")])
def test_sums_over_all_tokens_are_those_of_one_process(name: str) -> None:
    world, parallel, num_tokens = PLANS[name]
    alone = run_ranks(1, _numbers, {}, num_tokens, with_context=False)[0]
    for found in run_ranks(world, _numbers, parallel, num_tokens, with_context=False):
        for loss, wanted in alone.items():
            torch.testing.assert_close(
                found[loss], wanted, rtol=1e-10, atol=1e-12, msg=lambda m, loss=loss: f"{loss}: {m}"
            )


def test_other_losses_of_elements_are_addends() -> None:
    x, y = (for_loss(tokens(3, 8, CLASSES)) for _ in range(2))
    part, _ = other_elements(None, x, {"targets": y})  # type: ignore[arg-type]
    wanted, _ = other_elements(None, layers.local(x), {"targets": layers.local(y)})  # type: ignore[arg-type]
    assert type(part) is Tensor
    torch.testing.assert_close(part, wanted)


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a shift": (lambda o, y: F.cross_entropy(o[:, :-1].flatten(0, 1), y[:, 1:].flatten()), "selects from dim 1"),
    "a shift by roll": (lambda o, y: o - o.roll(1, 1), "roll works along dim 1"),
    "the last token": (lambda o, y: o[:, -1].sum(), "selects from dim 1"),
    "a loss for each sample": (lambda o, y: o.square().sum((1, 2)).log().sum(), "sum reduces dim 1"),
    "a mean for each sample": (lambda o, y: o.mean(1).square().sum(), "mean reduces dim 1"),
    "a mean": (lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()), "reduces all dims .*'mean'"),
    "a mean of squares": (lambda o, y: F.mse_loss(o, o), "reduces all dims at once .*'mean'"),
    "a mean of all": (lambda o, y: o.mean(), "mean reduces all dims at once"),
    "kl by batch": (lambda o, y: F.kl_div(o, o, reduction="batchmean"), "reduces all dims at once .*'batchmean'"),
    "argmax along tokens": (lambda o, y: o.argmax(1), "argmax reduces dim 1"),
    "whole labels": (lambda o, y: F.cross_entropy(o.flatten(0, 1), torch.zeros(24).long()), "not split as its input"),
    "labels of other tokens": (lambda o, y: F.cross_entropy(o.flatten(0, 1), y.t().flatten()), "not split as its inp"),
    "a norm": (lambda o, y: o.norm(), "norm reduces all dims"),
    "a cat of tokens": (lambda o, y: torch.cat((o, o), 1), "concatenates along dim 1"),
    "if there are any": (lambda o, y: bool((y != -100).any()), "any reduces all dims"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_or_mixes_tokens_is_refused(name: str) -> None:
    loss, words = REFUSED[name]
    outputs, labels = for_loss(tokens(3, 8, CLASSES)), for_loss(tokens(3, 8).ne(0).long())
    with pytest.raises(ValueError, match=words) as caught:
        loss(outputs, labels)
    told = str(caught.value)
    assert "parallel.sequence gives a loss function the tokens of one rank" in told
    assert "test_losses.py:" in told


def test_a_forward_is_refused_such_sums() -> None:
    for function in (Tensor.sum, lambda x: F.mse_loss(x, x, reduction="sum")):
        with pytest.raises(ValueError, match="all dims at once"):
            function(tokens(3, 8, CLASSES))
