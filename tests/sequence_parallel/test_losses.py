"""Loss functions whose tokens are split: they are those of one process, and what moves tokens is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.parts import part_of_tokens as tokens
from helpers.ranks import grid, run_ranks
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import BatchInfo, model_parallel_of
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import with_sequence
from colossus.state.model_state_dict import full_state_dict

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


def shifted(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    logits, labels = outputs[:, :-1], batch["labels"][:, 1:]
    total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total + layers.cross_entropy(logits, labels)[0], (labels != -100).sum()


def shifted_mean(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    logits, labels = outputs[..., :-1, :].contiguous(), batch["labels"][..., 1:].contiguous()
    count = (labels != -100).sum()
    return F.cross_entropy(logits.view(-1, logits.size(-1)), labels.view(-1)) * count, count


def last_token(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    return F.cross_entropy(outputs[:, -1], batch["inputs"][:, 0], reduction="sum"), len(outputs)


def of_each_sample(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    valid = batch["labels"] != -100
    of_tokens = F.cross_entropy(outputs.mT, batch["labels"], reduction="none")
    means = of_tokens.sum(1) / valid.sum(1) + outputs.mean(1).square().sum(-1) + outputs.norm(dim=(1, 2))
    return means.sum(), outputs.shape[0]


def means(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    mean = F.mse_loss(outputs, batch["targets"]) + outputs.logsumexp((1, 2)).mean()
    mean = mean + F.kl_div(outputs.log_softmax(-1), batch["targets"].softmax(-1), reduction="batchmean")
    weights = torch.linspace(1, 2, CLASSES, dtype=outputs.dtype)
    both = F.cross_entropy(outputs.mT, batch["labels"], weight=weights, label_smoothing=0.1), mean
    return sum(both) * BATCH, BATCH


def with_a_penalty(net: Net, outputs: Tensor, batch: Batch) -> tuple[Tensor, Any]:
    total, count = layers.cross_entropy(outputs, batch["labels"])
    return total + 0.01 * outputs.square().sum() + batch["weights"].sum() + outputs.mean() * count, count


USUAL = (
    *(usual, masked, of_columns, by_hand, chosen_tokens, squares, ours, of_a_head),
    *(shifted, shifted_mean, last_token, of_each_sample, means, with_a_penalty),
)
#: of padding, too
_OF_ALL = (squares, shifted_mean, last_token, of_each_sample, means, with_a_penalty)


def _numbers(rank: int, parallel: dict[str, Any], num_tokens: int) -> Any:
    """Loss, gradients and metric of each loss function, from the same weights."""
    config = dict(
        parallel=parallel,
        optimizer=dict(type="SGD", lr=1e-300),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=7),
        device="cpu",
    )
    engine = colossus.initialize(config, model=Net)
    results = {}
    count = engine.context.size("data")
    batch = {
        key: (x[:, :num_tokens] if x.dim() > 1 else x).chunk(count)[engine.context.index("data")]
        for key, x in batch_of().items()
    }
    for loss in USUAL:
        if num_tokens < TOKENS and loss in _OF_ALL:
            continue
        engine.model.loss_of = loss
        evaluated, result = engine.eval_step(batch), engine.train_step(batch)
        gradients = full_state_dict(engine.model, engine.context, gradients=True)
        results[loss.__name__] = (result.loss, evaluated.loss, evaluated.metrics["accuracy"], gradients)
    engine.close()
    return results


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
    """Beside data ranks: those of data ranks alone, since a mean is over a rank's own samples."""
    world, parallel, num_tokens = PLANS[name]
    data = parallel.get("data", 1)
    alone = run_ranks(data, _numbers, dict(data=data), num_tokens, with_context=False)[0]
    for results in run_ranks(world, _numbers, parallel, num_tokens, with_context=False):
        for loss, wanted in ((loss, alone[loss]) for loss in results):
            torch.testing.assert_close(
                results[loss], wanted, rtol=1e-10, atol=1e-12, msg=lambda m, loss=loss: f"{loss}: {m}"
            )


REFUSED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "a shift by roll": (lambda o, y: o - o.roll(1, 1), "roll works along dim 1"),
    "argmax along tokens": (lambda o, y: o.argmax(1), "argmax reduces the split dim"),
    "a cat of tokens": (lambda o, y: torch.cat((o, o), 1), "concatenates along dim 1"),
    "every other token": (lambda o, y: torch.cumsum(o, 1)[:, ::2], "cumsum works along dim 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_moves_tokens_is_refused(name: str) -> None:
    loss, words = REFUSED[name]
    with pytest.raises(ValueError, match=words) as caught:
        loss(tokens(3, 8, CLASSES), tokens(3, 8).ne(0).long())
    assert "test_losses.py:" in str(caught.value)


def test_padding_that_would_count_is_refused() -> None:
    def body(context: ParallelContext) -> dict[str, str]:
        messages = {}
        parallel = model_parallel_of(context)
        x = with_sequence(torch.ones(2, 4, 3), Place(1), parallel)
        with parallel.batch(BatchInfo(num_tokens=6)):
            for name, function in {
                "mean": lambda: x.mean(1),
                "last": lambda: x[:, -1],
                "product": lambda: x @ x.mT,
                "attention": lambda: F.scaled_dot_product_attention(x, x, x),
            }.items():
                with pytest.raises(ValueError, match=r"parallel\.sequence\.pad has filled up the 6 of this batch to 8"):
                    function()
                messages[name] = "refused"
        return messages

    for messages in run_ranks(2, body, plan=grid(sequence=2)):
        assert len(messages) == 4
