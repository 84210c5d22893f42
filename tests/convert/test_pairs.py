"""`find_pairs`: which linears of models that are not changed become pairs, and that pairs train as in plain torch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from helpers.found_pairs import MODES, of_any_layer, pairs_of
from helpers.ranks import run_ranks
from helpers.training import assert_close_states, packed, relative, unpacked
from torch import Tensor, nn

import colossus
from colossus.convert.forward_parts import call_model
from colossus.convert.parallelize import conversion_of
from colossus.convert.swap import is_conv1d
from colossus.state.model_state_dict import full_state_dict

transformers.logging.set_verbosity_error()

BATCH, TOKENS, VOCAB = 4, 7, 53
_SIZES: dict[str, Any] = dict(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=28)
_LM: dict[str, Any] = dict(**_SIZES, vocab_size=VOCAB, max_position_embeddings=16, use_cache=False)
_NO_DROPOUT: dict[str, Any] = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
IDS = torch.randint(3, VOCAB, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
WORDS = {"input_ids": IDS[:2], "attention_mask": torch.tensor([[1] * TOKENS, [1] * 4 + [0] * 3])}
PADDED = (torch.arange(TOKENS) < torch.tensor([[7], [4], [5], [2]])).long()
IMAGES = {"pixel_values": torch.ones(2, 3, 8, 12)}


def llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LM, **{"num_key_value_heads": 2, **more}))


def qwen3() -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LM, num_key_value_heads=2, head_dim=6))


def mixtral() -> nn.Module:
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(**_LM, num_key_value_heads=4))


def gpt2() -> nn.Module:
    sizes: dict[str, Any] = dict(n_embd=24, n_layer=2, n_head=4, n_positions=16, vocab_size=VOCAB, use_cache=False)
    sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=2))


def bert(**more: Any) -> nn.Module:
    return transformers.BertForMaskedLM(transformers.BertConfig(**_LM, **more))


def neox() -> nn.Module:
    return transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**_LM))


def bloom() -> nn.Module:
    """Its alibi is [heads, 1, tokens], its GELU an autograd function."""
    sizes: dict[str, Any] = dict(hidden_size=24, n_layer=2, n_head=4, vocab_size=VOCAB, use_cache=False)
    return transformers.BloomForCausalLM(transformers.BloomConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0))


def vit() -> nn.Module:
    sizes: dict[str, Any] = dict(image_size=[8, 12], patch_size=4, num_labels=5)
    config = transformers.ViTConfig(**_SIZES, **_NO_DROPOUT, **sizes)
    return transformers.ViTForImageClassification(config)


def t5() -> nn.Module:
    sizes: dict[str, Any] = dict(d_model=24, d_kv=6, d_ff=28, num_heads=4, vocab_size=VOCAB, use_cache=False)
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_layers=2, dropout_rate=0.0))


class Gated(nn.Module):
    """A gate and dropout between a pair, a connection that skips it, and a norm that breaks up the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, 12)
        self.gate, self.up, self.down = nn.Linear(12, 20), nn.Linear(12, 20), nn.Linear(20, 12)
        self.wide, self.norm, self.narrow = nn.Linear(12, 20), nn.LayerNorm(20), nn.Linear(20, 12)
        self.between, self.scale = nn.Dropout(0.0), nn.Parameter(torch.ones(1))
        self.twice, self.head = nn.Linear(12, 12), nn.Linear(12, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(self.between(F.silu(self.gate(x)) * self.up(x) * self.scale))
        x = x + self.narrow(self.norm(self.wide(x)))
        return self.head(self.twice(self.twice(x).relu()))


def columns_and_rows(columns: str, rows: str) -> dict[str, str]:
    return dict.fromkeys(columns.split(), "column") | dict.fromkeys(rows.split(), "row")


_OF_LLAMA = columns_and_rows(
    "model.layers.self_attn.q_proj model.layers.self_attn.k_proj model.layers.self_attn.v_proj "
    "model.layers.mlp.gate_proj model.layers.mlp.up_proj",
    "model.layers.self_attn.o_proj model.layers.mlp.down_proj",
)
_OF_BERT = "bert.encoder.layer."
_FEED_FORWARD_OF_BERT = columns_and_rows(f"{_OF_BERT}intermediate.dense", f"{_OF_BERT}output.dense")
TABLES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str]]] = {
    "llama": (llama, IDS[:2], _OF_LLAMA),
    "llama, eager": (
        lambda: llama(attn_implementation="eager", num_key_value_heads=4),
        IDS[:2],
        _OF_LLAMA,
    ),
    "qwen3": (qwen3, IDS[:2], _OF_LLAMA),
    "mixtral": (mixtral, IDS[:2], {name: split for name, split in _OF_LLAMA.items() if "mlp" not in name}),
    "gpt2": (gpt2, IDS[:2], columns_and_rows("transformer.h.mlp.c_fc", "transformer.h.mlp.c_proj")),
    "bert": (
        lambda: bert(**_NO_DROPOUT),
        WORDS,
        _FEED_FORWARD_OF_BERT
        | columns_and_rows(
            f"{_OF_BERT}attention.self.query {_OF_BERT}attention.self.key {_OF_BERT}attention.self.value",
            f"{_OF_BERT}attention.output.dense",
        ),
    ),
    "bert, dropout of attention": (bert, WORDS, _FEED_FORWARD_OF_BERT),
    "neox": (
        neox,
        WORDS,
        columns_and_rows(
            "gpt_neox.layers.attention.query_key_value gpt_neox.layers.mlp.dense_h_to_4h",
            "gpt_neox.layers.attention.dense gpt_neox.layers.mlp.dense_4h_to_h",
        ),
    ),
    "vit": (
        vit,
        IMAGES,
        columns_and_rows(
            "vit.layers.attention.q_proj vit.layers.attention.k_proj vit.layers.attention.v_proj vit.layers.mlp.fc1",
            "vit.layers.attention.o_proj vit.layers.mlp.fc2",
        ),
    ),
    "t5": (
        t5,
        {**WORDS, "decoder_input_ids": IDS[:2], "decoder_attention_mask": WORDS["attention_mask"]},
        {
            f"{stack}.block.layer.{part}.{leaf}": "row" if leaf in ("o", "wo") else "column"
            for stack, part, leaves in (
                ("encoder", "SelfAttention", "qkvo"),
                ("decoder", "SelfAttention", "qkvo"),
                ("decoder", "EncDecAttention", "qkvo"),
                ("encoder", "DenseReluDense", ("wi", "wo")),
                ("decoder", "DenseReluDense", ("wi", "wo")),
            )
            for leaf in leaves
        },
    ),
    "gated": (Gated, IDS[:2], columns_and_rows("gate up", "down")),
}


#: whose attention is given a mask of each sample
MASKED = ("llama, eager", "bert", "neox", "t5")


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, marks=() if mode == "1d" or name == "llama, eager" else pytest.mark.long)
        for name in TABLES
        for mode in MODES
    ],
)
def test_tables(name: str, mode: str) -> None:
    make, example, wanted = TABLES[name]
    if mode == "3d" and name in MASKED:  # a mask is of samples that other ranks have inside of a pair
        wanted = {path: role for path, role in wanted.items() if not re.search("attn|attention|Attention", path)}
    assert of_any_layer(pairs_of(make, mode, example).splits) == wanted


def test_columns_that_share_their_input() -> None:
    attention, feed_forward = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
    assert pairs_of(llama, "2d", IDS[:2]).shared == tuple(
        tuple(f"model.layers.{layer}.{part}.{leaf}" for leaf in leaves)
        for layer in range(2)
        for part, leaves in (("self_attn", attention), ("mlp", feed_forward))
    )


def test_pairs_hold_with_and_without_a_mask() -> None:
    both = IDS[:2], WORDS
    assert of_any_layer(pairs_of(llama, "1d", *both).splits) == _OF_LLAMA
    assert of_any_layer(pairs_of(lambda: llama(num_key_value_heads=4), "1d", *both).splits) == _OF_LLAMA
    assert of_any_layer(
        pairs_of(vit, "1d", IMAGES, {**IMAGES, "attention_mask": PADDED}).splits
    )  # which it cannot take


def in_a_row(*sizes: int) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(*(module for a, b in pairwise(sizes) for module in (nn.Linear(a, b), nn.GELU())))

    return make


def test_linears_in_a_row_are_pairs_from_the_left() -> None:
    pairs = pairs_of(in_a_row(6, 8, 10, 12, 14, 16), "1d", torch.ones(2, 6))
    assert pairs.splits == {"0": "column", "2": "row", "4": "column", "6": "row"}
    assert pairs.reasons == {"8": "its features reach the model's output"}
    odd = pairs_of(in_a_row(6, 7, 8, 9, 10), "1d", torch.ones(2, 6))
    assert odd.splits == {"2": "column", "4": "row"} or odd.splits == {}
    assert odd.reasons["0"] == "out_features = 7 does not divide over the 2 ranks of tensor; 6 or 8 does"


class Reads(nn.Module):
    """Called by itself, and read; beside a linear whose weight another has, and one that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.read, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.tied, self.other, self.idle = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.tied.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.tied(x + self.down(self.read(x)))) + self.read.weight.sum()


def test_reasons() -> None:
    reasons = pairs_of(Reads, "1d", torch.ones(2, 3, 4)).reasons
    assert reasons == {
        "read": "code outside the module uses its weight, where a rank needs all of it",
        "down": reasons["down"],
        "tied": "shares a parameter with other",
        "other": "shares a parameter with tied",
        "idle": "the forward does not call it",
    }
    reasons = of_any_layer(pairs_of(gpt2, "3d", IDS[:2]).reasons)
    assert re.match(
        r"split works along dim 2, which is split \(in transformer.h.0.attn \(GPT2Attention\), at .*modeling_gpt2.py",
        reasons["transformer.h.attn.c_attn"],
    )
    assert reasons["lm_head"] == "shares a parameter with transformer.wte"
    whole = pairs_of(lambda: llama(num_key_value_heads=1), "1d", IDS[:2])
    assert "self_attn" not in str(whole.splits)
    assert "selects from dim 3, which is split" in str(whole.reasons["model.layers.0.self_attn.k_proj"])


class NeedsMemory(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("no such operation on meta")


def test_a_forward_that_does_not_run_on_meta_is_refused() -> None:
    with pytest.raises(ValueError, match=r"does not run on the meta device, so no pairs are found: no such operation"):
        pairs_of(lambda: nn.Sequential(nn.Linear(4, 4), NeedsMemory()), "1d", torch.ones(2, 4))


# --- the pairs train as in plain torch


TRAINED: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "llama": (llama, IDS),
    "llama, padded": (llama, {"input_ids": IDS, "attention_mask": PADDED}),
    "bloom": (bloom, {"input_ids": IDS, "attention_mask": PADDED}),
    "qwen3": (qwen3, IDS),
    "llama, eager": (lambda: llama(attn_implementation="eager", num_key_value_heads=4), IDS),
    "neox": (neox, IDS),
    "bert": (
        lambda: bert(**_NO_DROPOUT),
        {"input_ids": IDS, "attention_mask": PADDED},
    ),
    "gpt2": (gpt2, IDS),
    "t5": (t5, {"input_ids": IDS, "decoder_input_ids": IDS.flip(0)}),
    "gated": (Gated, IDS),
}


def sum_and_count(outputs: Any, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    logits = outputs if isinstance(outputs, Tensor) else outputs.logits
    total = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten(), reduction="sum")
    return total, torch.tensor(batch["labels"].numel())


def batch_of(inputs: Any) -> dict[str, Any]:
    return {"inputs": inputs, "labels": IDS.flip(1)}


def train(rank: int, tensor: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    config = dict(
        parallel=dict(tensor=tensor), optimizer=dict(type="SGD", lr=0.1), device="cpu",
        train=dict(global_batch_size=BATCH, precision="fp64", seed=3),
    )  # fmt: skip
    results = {}
    for name in names:
        make, inputs = TRAINED[name]
        factory = colossus.parallelize(make, example=inputs if name == "gated" else None)
        engine = colossus.initialize(config, model=factory, loss_fn=sum_and_count)
        conversion = conversion_of(engine.model)
        assert conversion is not None
        became = {swap.became for swap in conversion.swaps.values()}
        start = packed({key: value.clone() for key, value in full_state_dict(engine.model, engine.context).items()})
        losses = [engine.train_step(batch_of(inputs)).loss for _ in range(2)]
        gradients = packed(full_state_dict(engine.model, engine.context, gradients=True))
        engine.close()
        results[name] = start, losses, gradients, became
    return results


def as_in(model: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of transformers' Conv1D are [in, out]."""
    transposed = {f"{name}.weight" for name, module in model.named_modules() if is_conv1d(module)}
    return {name: value.T if name in transposed else value for name, value in state.items()}


PLANS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "1d": (2, dict(mode="1d", size=2), ("llama, padded", "bloom")),
    "2d": (4, dict(mode="2d", size=4), ("bert", "gated")),
    "3d_2x1x2": (4, dict(mode="3d", shape=(2, 1, 2), size=4), ("bert", "qwen3")),
    **{
        f"{mode}, all": (math.prod(shape), dict(mode=mode, size=math.prod(shape)), tuple(TRAINED))
        for mode, shape in MODES.items()
    },
}
_LONG = (*(f"{mode}, all" for mode in MODES), "3d_2x1x2")


@pytest.mark.parametrize("plan", [pytest.param(key, marks=[pytest.mark.long] * (key in _LONG)) for key in PLANS])
@pytest.mark.rest("2d")
def test_pairs_train_as_in_plain_torch(plan: str) -> None:
    world, tensor, names = PLANS[plan]
    results = run_ranks(world, train, tensor, names, with_context=False)
    for name in names:
        make, inputs = TRAINED[name]
        for start, losses, gradients, became in (result[name] for result in results):
            assert became >= {"Linear(column)", "Linear(row)"}
            model = make().double()
            model.load_state_dict(as_in(model, unpacked(*start)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(2):
                optimizer.zero_grad()
                total, count = sum_and_count(call_model(model, inputs), batch_of(inputs))
                assert relative(losses[step], (total / count).item()) < 1e-10
                total.backward()
                for parameter in model.parameters():
                    if parameter.grad is not None:
                        parameter.grad /= count
                if step == 0:
                    optimizer.step()
            expected = {key: torch.zeros_like(p) if p.grad is None else p.grad for key, p in model.named_parameters()}
            mine = {key: value for key, value in as_in(model, unpacked(*gradients)).items() if key in expected}
            assert_close_states(mine, expected, f"{name}: gradient", atol=1e-10)
