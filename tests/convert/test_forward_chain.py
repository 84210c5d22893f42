"""`make_chain`: models that are not changed under a pipeline, against themselves in one process, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers import chained
from helpers.long import but
from helpers.ranks import run_ranks
from helpers.training import assert_close_states, packed, relative, unpacked
from torch import Tensor, nn
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    GPT2LMHeadModel,
    GPTNeoXForCausalLM,
    LlamaForCausalLM,
    T5ForConditionalGeneration,
    ViTForImageClassification,
)

import colossus
from colossus.convert.forward_chain import make_chain
from colossus.data.batch import slice_batch
from colossus.layers.pipeline_block import pipeline_blocks, run_blocks
from colossus.state.model_state_dict import full_state_dict

transformers.logging.set_verbosity_error()

BATCH, TOKENS, VOCAB, LABELS, STEPS = 6, 11, 53, 5, 3
_NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
_SIZES: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=28)
_LM: dict[str, Any] = dict(**_SIZES, vocab_size=VOCAB, max_position_embeddings=16, use_cache=False)


class Middle(nn.Module):
    """Blocks in the middle, parameters of its own before and behind them, a tie over them all, running statistics."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(12, 12), nn.BatchNorm1d(TOKENS)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm(self.linear(x)).relu()

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shift = nn.Embedding(VOCAB, 12), nn.Parameter(torch.randn(12))
        self.first, self.last = nn.BatchNorm1d(TOKENS), nn.BatchNorm1d(TOKENS)
        self.body = nn.Sequential(*(self.Block() for _ in range(3)))
        self.scale, self.head = nn.Parameter(torch.randn(12)), nn.Linear(12, VOCAB)
        self.embed.weight = self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.last(self.body(self.first(self.embed(ids) + self.shift)) * self.scale))


class Masked(nn.Module):
    """A module gives the hidden states and a mask; blocks take it by name, and return more than they are asked for."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.shift = nn.Embedding(VOCAB, 12), nn.Parameter(torch.randn(12))

        def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
            x = self.embed(ids)
            x = x + self.shift
            return x, (ids > 9).to(self.shift.dtype)[..., None] / 3

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor, *, mask: Tensor) -> tuple[Tensor, Tensor]:
            weights = self.linear(x).tanh()
            return x + weights * mask, weights

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = self.Stem(), nn.Linear(12, VOCAB)
        self.body = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.stem(ids)
        for block in self.body:
            x = block(x, mask=mask)[0]
        return self.head(x * mask)


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = dict(n_embd=24, n_layer=3, n_head=4, n_positions=16, vocab_size=VOCAB, use_cache=False)
    rates: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return GPT2LMHeadModel(transformers.GPT2Config(**sizes, **rates, bos_token_id=1, eos_token_id=2))


def llama(**more: Any) -> nn.Module:
    return LlamaForCausalLM(transformers.LlamaConfig(**{**_LM, **more}, num_key_value_heads=2))


def bert() -> nn.Module:
    config = transformers.BertConfig(**_LM, **_NO_DROPOUT, num_labels=LABELS)
    return BertForSequenceClassification(config)


def masked_lm(**more: Any) -> nn.Module:
    return BertForMaskedLM(transformers.BertConfig(**_LM, **_NO_DROPOUT, **more))


def vit() -> nn.Module:
    config = transformers.ViTConfig(**_SIZES, **_NO_DROPOUT, image_size=[8, 12], patch_size=4, num_labels=LABELS)
    return ViTForImageClassification(config)


def neox() -> nn.Module:
    return GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_LM))


def t5(**more: Any) -> nn.Module:
    sizes: dict[str, Any] = dict(d_model=24, d_kv=6, d_ff=28, num_heads=4, vocab_size=VOCAB, use_cache=False)
    return T5ForConditionalGeneration(transformers.T5Config(**sizes, num_layers=2, **more))


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
    if "labels" not in batch:  # of two towers
        return outputs.logits_per_text.square().sum(), torch.tensor(len(outputs.logits_per_text))
    if isinstance(outputs, chained.Output):
        outputs = torch.stack([outputs.logits, *outputs.records])
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    labels = batch["labels"]
    if labels.dim() == 2 and logits.shape[:-1] != labels.shape:  # of points
        return logits.square().sum(), torch.tensor(len(labels))
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")
    return total, (labels != -100).sum()


def translations(step: int) -> dict[str, Any]:
    batch = with_mask(step)
    return batch | {"inputs": batch["inputs"] | {"decoder_input_ids": ids_of(step + 9)[:, :-1]}}


def points(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "inputs": torch.randn(BATCH, chained.WIDTH, generator=generator, dtype=torch.float64),
        "labels": ids_of(step),
    }


def clip() -> nn.Module:
    sizes: dict[str, Any] = dict(_SIZES, num_hidden_layers=2)
    text = dict(sizes, vocab_size=VOCAB, max_position_embeddings=16, eos_token_id=2, projection_dim=8)
    vision = dict(sizes, image_size=8, patch_size=4, projection_dim=8)
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def pairs(step: int) -> dict[str, Any]:
    return {"inputs": with_mask(step)["inputs"] | {"pixel_values": images(step)["inputs"]["pixel_values"][..., :8]}}


def albert() -> nn.Module:
    return transformers.AlbertForMaskedLM(transformers.AlbertConfig(**_LM, **_NO_DROPOUT, embedding_size=16))


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
    "masked": Case(Masked, tokens),
    "t5": Case(lambda: t5(dropout_rate=0.0), translations),
    "clip": Case(clip, pairs),
    "albert": Case(albert, with_mask),
    "cache": Case(lambda: llama(use_cache=True), tokens),
    "all hidden": Case(lambda: masked_lm(output_hidden_states=True), with_mask),
} | {
    kind.__name__.lower(): Case(kind, points)
    for kind in (
        chained.Skips, chained.Residual, chained.Conditioned, chained.Recurrent, chained.Transformed, chained.Repeated,
        chained.Recorded, chained.Attributes,
    )
}  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """Which models run under a plan, in some steps."""

    cases: tuple[str, ...]
    schedule: str = "1f1b"
    microbatches: int = 2
    data: int = 1
    zero: int = 0
    checkpoint: str = "none"

    def config(self) -> dict[str, Any]:
        return dict(
            parallel=dict(pipeline=2, data=self.data, zero=self.zero),
            schedule=dict(type=self.schedule, microbatches=self.microbatches),
            optimizer=dict(type="SGD", lr=0.05),
            train=dict(
                global_batch_size=BATCH, precision="fp64", seed=3, activation_checkpoint=dict(type=self.checkpoint)
            ),
            device="cpu",
        )


PLANS = {
    "1f1b, 2": Plan(("gpt2", "llama, eager", "bert", "vit", "masked")),
    "gpipe, more": Plan(("t5", "albert", "clip", *(kind for kind in CASES if CASES[kind].batch is points)), "gpipe"),
    "1f1b, 3": Plan(("bert", "middle"), microbatches=3),
    "interleaved": Plan(("llama, eager",), "interleaved"),
    "zb-h1": Plan(("gpt2",), "zb-h1", 3),
    "zero": Plan(("gpt2", "masked"), microbatches=1, data=2, zero=3, checkpoint="full"),
    "1f1b, all": Plan(tuple(CASES)),
    "interleaved, all": Plan(tuple(CASES), "interleaved", 3),
    "zb-v, all": Plan(tuple(CASES), "zb-v", 3),
    # a block that uses a parameter of the model, as all of "residual" do, is no module to be checkpointed; an LSTM
    # changes what selective checkpointing keeps; torch.func.grad knows no checkpointing; "repeated" writes to its input
    "selective, all": Plan(
        tuple(name for name in CASES if name not in ("residual", "recurrent", "transformed", "repeated")),
        microbatches=3,
        checkpoint="selective",
    ),
    "zero, all": Plan(tuple(name for name in CASES if name != "middle"), "zb-h1", 3, data=2, zero=2),
}
_LONG = [name for name in PLANS if name.endswith(", all")] + ["1f1b, 3", "zero", "gpipe, more"]


def floats(state: dict[str, Tensor]) -> Any:
    """Parameters and running statistics."""
    return packed({name: value.clone() for name, value in state.items() if value.is_floating_point()})


def train(plan: Plan, case: Case) -> tuple[Any, list[float], list[Any], Any]:
    engine = colossus.initialize(plan.config(), model=case.factory, loss_fn=loss_fn)
    index, part = engine.context.index("data"), BATCH // plan.data
    start = floats(full_state_dict(engine.model, engine.context))
    losses, gradients = [], []
    for step in range(STEPS):
        own = slice_batch(case.batch(step), index * part, (index + 1) * part)
        losses.append(engine.train_step(own).loss)
        gradients.append(packed(full_state_dict(engine.model, engine.context, gradients=True)))
    end = floats(full_state_dict(engine.model, engine.context))
    engine.close()
    return start, losses, gradients, end


def assert_is_itself(trained: tuple[Any, list[float], list[Any], Any], case: Case, microbatches: int) -> None:
    """Losses and every gradient of each step, against the model in plain torch."""
    start, losses, gradients, end = trained
    model = case.make().double()
    missing = model.load_state_dict(unpacked(*start), strict=False).missing_keys
    assert all("num_batches_tracked" in name for name in missing)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(STEPS):
        batch = case.batch(step)
        optimizer.zero_grad()
        total, count = 0.0, 0
        for part in range(microbatches):
            rows = slice(part * BATCH // microbatches, (part + 1) * BATCH // microbatches)
            inputs = batch["inputs"]
            out = model(**{k: x[rows] for k, x in inputs.items()}) if isinstance(inputs, dict) else model(inputs[rows])
            loss, number = loss_fn(out, {key: value[rows] for key, value in batch.items() if key == "labels"})
            loss.backward()
            total, count = total + loss.item(), count + int(number)
        assert relative(losses[step], total / count) < 1e-10
        for parameter in model.parameters():  # divided late: the norm of a Llama rounds its gradients to float32
            if parameter.grad is not None:
                parameter.grad /= count
        wanted = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}
        unpacked_gradients = unpacked(*gradients[step])
        assert_close_states(
            {name: unpacked_gradients[name] for name in wanted}, wanted, f"step {step}: gradient", atol=1e-10
        )
        optimizer.step()
    state = {name: value for name, value in model.state_dict().items() if value.is_floating_point()}
    assert_close_states(unpacked(*end), state, "end:", atol=1e-10)


@pytest.mark.parametrize("name", but(_LONG, PLANS))
@pytest.mark.rest("1f1b, 2", "interleaved")
def test_a_model_as_it_is_trains_under_a_pipeline_as_in_one_process(name: str) -> None:
    plan = PLANS[name]

    def body(rank: int) -> list[Any]:
        return [train(plan, CASES[name]) for name in plan.cases]

    first, *others = run_ranks(2 * plan.data, body, with_context=False)
    for number, of_case in enumerate(plan.cases):
        assert_is_itself(first[number], CASES[of_case], plan.microbatches * plan.data)
        for other in others:
            assert other[number][1] == first[number][1]


POINTS = torch.randn(4, chained.WIDTH)
REFUSED: dict[str, tuple[Callable[[], nn.Module], Any, str]] = {
    "kept": (
        chained.Kept,
        POINTS,
        r"before body\.1: a tensor that was computed inside body\.0 \(.*chained\.py:\d+\) is used again by "
        r".*chained\.py:\d+, but no module returned it unchanged",
    ),
    "forces": (chained.Forces, POINTS, r"fails where it is cut: RuntimeError: .* \(.*chained\.py:\d+: return torch\."),
    "counts": (chained.Counts, POINTS, r"it writes to the buffer seen \(.*chained\.py:\d+\), which each stage would"),
    "single": (chained.Single, POINTS, r"it has no modules that are called one after the other"),
    "fails": (
        chained.Fails,
        POINTS,
        r"its forward fails on the example .*RuntimeError: .*chained\.py:\d+: return x @",
    ),
    "attentions": (
        lambda: masked_lm(output_attentions=True, attn_implementation="eager"),
        ids_of(0),
        r"before bert\.encoder\.layer\.1: a tensor that was computed inside bert\.encoder\.layer\.0 .* the model's",
    ),
    "no example": (chained.Single, None, r"there is no example of its input \(example="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_forward_that_is_no_chain_is_refused_with_what_was_found(name: str) -> None:
    make, example, words = REFUSED[name]
    with torch.device("meta"):
        model = make()
    with pytest.raises(ValueError, match=words) as refused:
        make_chain(model, example)
    assert "train it without parallel.pipeline" in str(refused.value)
    assert not hasattr(model, "pipeline_blocks")


def test_blocks_that_are_named() -> None:
    for blocks in ("body", ["body.0", "body.1", "body.2", "body.3", "body.4", "body.5"], ["body.1", "body.2"]):
        model = chained.Residual()
        make_chain(model, POINTS, blocks)
        chain = pipeline_blocks(model)
        names = [f"body.{number}" for number in range(6)] if blocks == "body" else list(blocks)
        assert [block.name for block in chain] == [f"before {names[0]}", *names, f"after {names[-1]}"]
        assert torch.equal(run_blocks([block.call for block in chain], POINTS), model(POINTS))
    with pytest.raises(ValueError, match=r"blocks=\['body.1', 'body.0'\] are called as \['body.0', 'body.1'\]"):
        make_chain(chained.Residual(), POINTS, ["body.1", "body.0"])
    whole = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
    make_chain(whole, POINTS)  # is a chain as it is
    assert not hasattr(whole, "pipeline_blocks")
