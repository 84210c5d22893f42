"""`make_chain`: models that are not changed under a pipeline, against themselves in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.ranks import run_ranks
from helpers.training import assert_close_states, packed, relative, unpacked
from torch import Tensor, nn

import colossus
from colossus.checkpoint.state_dict import full_state_dict
from colossus.convert.forward_chain import make_chain

transformers.logging.set_verbosity_error()

BATCH, TOKENS, VOCAB, LABELS, STEPS = 6, 11, 53, 5, 5
_NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_SIZES: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=28)
_LM: dict[str, Any] = dict(**_SIZES, vocab_size=VOCAB, max_position_embeddings=16, use_cache=False)


class Middle(nn.Module):
    """Blocks in the middle, parameters of its own before and behind them, and a mask from its input."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x)).relu()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(VOCAB, 12), nn.Parameter(torch.randn(12))
        self.body = nn.Sequential(*(self.Block() for _ in range(3)))
        self.scale, self.head = nn.Parameter(torch.randn(12)), nn.Linear(12, VOCAB)
        self.embed.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids) + self.shift) * self.scale)


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = dict(n_embd=24, n_layer=3, n_head=4, n_positions=16, vocab_size=VOCAB, use_cache=False)
    rates: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LM, num_key_value_heads=2, **more))


def bert() -> nn.Module:
    config = transformers.BertConfig(**_LM, **_NO_DROPOUT, num_labels=LABELS)
    return transformers.BertForSequenceClassification(config)


def masked_lm(**more: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_LM, **_NO_DROPOUT, **more))


def vit() -> nn.Module:
    config = transformers.ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=[8, 12], patch_size=4, num_labels=LABELS)
    return transformers.ViTForImageClassification(config)


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_LM))


def t5(**more: Any) -> nn.Module:
    sizes: dict[str, Any] = dict(d_model=24, d_kv=6, d_ff=28, num_heads=4, vocab_size=VOCAB, use_cache=False)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_layers=2, **more))


def ids_of(step: int) -> Tensor:
    return torch.randint(3, VOCAB, (BATCH, TOKENS + 1), generator=torch.Generator().manual_seed(step))


def tokens(step: int) -> dict[str, Any]:
    ids = ids_of(step)
    labels = ids[:, 1:].clone()
    for row in range(BATCH):
        labels[row, : (row * 5 + step) % TOKENS] = -100
    return {"inputs": ids[:, :-1].contiguous(), "labels": labels}


def with_mask(step: int) -> dict[str, Any]:
    batch = tokens(step)
    mask = torch.arange(TOKENS)[None] < torch.tensor([TOKENS, 4, 9, 7, 11, 2])[:, None]
    return {"inputs": {"input_ids": batch["inputs"], "attention_mask": mask.long()}, "labels": batch["labels"]}


def of_classes(step: int) -> dict[str, Any]:
    return {"inputs": with_mask(step)["inputs"], "labels": ids_of(step)[:, 0] % LABELS}


def images(step: int) -> dict[str, Any]:
    pixels = torch.randn(BATCH, 3, 8, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return {"inputs": {"pixel_values": pixels}, "labels": ids_of(step)[:, 0] % LABELS}


def loss_fn(outputs: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    labels = batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Any]]

    def factory(self) -> nn.Module:
        model = self.make()
        make_chain(model, self.batch(0)["inputs"])
        return model


CASES = {
    "gpt2": Case(gpt2, with_mask),
    "llama": Case(llama, tokens),
    "llama, eager": Case(lambda: llama(attn_implementation="eager"), with_mask),
    "bert": Case(bert, of_classes),
    "bert, masked": Case(masked_lm, with_mask),
    "vit": Case(vit, images),
    "neox": Case(neox, with_mask),
    "middle": Case(Middle, tokens),
}
#: schedule -> which models run under it
PLANS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "1f1b, 2": (dict(type="1f1b", microbatches=2), tuple(CASES)),
    "1f1b, 3": (dict(type="1f1b", microbatches=3), ("gpt2", "bert", "middle")),
    "interleaved": (dict(type="interleaved", microbatches=2), ("gpt2", "llama, eager")),
    "zb-h1": (dict(type="zb-h1", microbatches=3), ("gpt2", "neox", "vit")),
}


def train(config: dict[str, Any], case: Case) -> tuple[Any, list[float], list[Any]]:
    engine = colossus.initialize(config, model=case.factory, loss_fn=loss_fn)
    start = full_state_dict(engine.model, engine.context)
    start = {name: value.clone() for name, value in start.items() if value.is_floating_point()}
    losses, gradients = [], []
    for step in range(STEPS):
        losses.append(engine.train_step(case.batch(step)).loss)
        gradients.append(packed(full_state_dict(engine.model, engine.context, gradients=True)))
    engine.close()
    return packed(start), losses, gradients


def config_of(schedule: dict[str, Any], **parallel: Any) -> dict[str, Any]:
    return dict(
        parallel=dict(pipeline=2, **parallel),
        schedule=schedule,
        optimizer=dict(type="SGD", lr=0.05),
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3),
        device="cpu",
    )


def assert_is_itself(trained: tuple[Any, list[float], list[Any]], case: Case, microbatches: int) -> None:
    """Losses and every gradient of each step, against the model in plain torch."""
    start, losses, gradients = trained
    model = case.make().double()
    missing = model.load_state_dict(unpacked(*start), strict=False).missing_keys
    assert all("num_batches_tracked" in name for name in missing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        batch = case.batch(step)
        optimizer.zero_grad()
        total, count = 0.0, (batch["labels"] != -100).sum()
        for part in range(microbatches):
            rows = slice(part * BATCH // microbatches, (part + 1) * BATCH // microbatches)
            inputs = batch["inputs"]
            out = model(**{k: x[rows] for k, x in inputs.items()}) if isinstance(inputs, dict) else model(inputs[rows])
            loss, _ = loss_fn(out, {"labels": batch["labels"][rows]})
            loss.backward()
            total += loss.item()
        assert relative(losses[step], total / count.item()) < 1e-10
        for parameter in model.parameters():  # divided late: the norm of a Llama rounds its gradients to float32
            if parameter.grad is not None:
                parameter.grad /= count
        wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        found = unpacked(*gradients[step])
        assert_close_states({name: found[name] for name in wanted}, wanted, f"step {step}: gradient", atol=1e-10)
        optimizer.step()


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_as_it_is_trains_under_a_pipeline_as_in_one_process(plan: str) -> None:
    schedule, names = PLANS[plan]

    def body(rank: int) -> list[Any]:
        return [train(config_of(schedule), CASES[name]) for name in names]

    results = run_ranks(2, body, with_context=False)
    for name, *of_ranks in zip(names, *results, strict=True):
        for trained in of_ranks:
            assert_is_itself(trained, CASES[name], schedule["microbatches"])
