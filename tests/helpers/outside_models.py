"""Models that nobody here wrote, as their packages ship them, at tiny sizes: rows of the table of user models."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from helpers.user_models.cases import BATCH, Batch, PlainKit, UserModel, draw, integers
from helpers.user_models.table import Run, twins
from helpers.user_models.unchanged import unchanged
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from colossus.convert.swap import is_conv1d

STEPS = 5
#: 8 divides what a mode may split; 4 divides the heads
WIDTH, HEADS, INNER, VOCAB, TOKENS, CLASSES = 24, 4, 40, 56, 7, 8
IMAGE, PATCH = (16, 8), 4


class Widened(TorchFunctionMode):
    """What is float64 stays so: these models compute norms, softmaxes and routers in float32 whatever their dtype is,
    and its rounding would hide differences below 1e-8."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], Tensor) and args[0].dtype == torch.float64:
            if func is Tensor.float:
                return args[0]
            if func in (Tensor.to, Tensor.type):
                args = tuple(torch.float64 if each is torch.float32 else each for each in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


OUTSIDE: dict[str, UserModel] = {}


def outside(
    name: str, batch: Callable[[int], Batch], *, refused: Mapping[str, str] | None = None, example: Tensor | None = None
) -> Callable[[Callable[[], nn.Module]], Callable[[], nn.Module]]:
    """Register a function that builds an unmodified model.

    Args:
        example: for `colossus.parallelize`; of transformers' models it knows what they are called with.
    """

    def register(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        OUTSIDE[name] = unchanged(
            name, build, batch, _loss, example=example, refused=refused, steps=STEPS, around=Widened
        )
        return build

    return register


def oracle_of(name: str) -> Run:
    """Plain torch, from the values that the unswapped model gets in one process; linears are [out, in], as ours."""
    with torch.device("meta"):  # imports in the parent, once, what the ranks need
        linears = [of for of, module in OUTSIDE[name].make(PlainKit).named_modules() if is_conv1d(module)]
    run = twins([replace(OUTSIDE[name], make=lambda _: OUTSIDE[name].make(PlainKit))])[name]
    for state in (run.start, run.end, *run.gradients):
        for of in linears:
            state[f"{of}.weight"] = state[f"{of}.weight"].T
    return run


# -- batches and losses -----------------------------------------------------------------------------------------


def _tokens(step: int) -> Batch:
    """Labels of which every sample has another number that count."""
    labels = integers(step + 1, VOCAB, BATCH, TOKENS)
    for row in range(BATCH):
        labels[row, : (row * 5 + step) % TOKENS] = -100
    return {"inputs": integers(step, VOCAB, BATCH, TOKENS), "labels": labels}


def _translations(step: int) -> Batch:
    batch = _tokens(step)
    target = integers(step + 2, VOCAB, BATCH, TOKENS)
    return batch | {"inputs": {"input_ids": batch["inputs"], "decoder_input_ids": target}}


def _images(step: int) -> Batch:
    return {"inputs": draw(step, BATCH, 3, *IMAGE), "labels": integers(step, CLASSES, BATCH)}


def _loss(outputs: Any, batch: Batch) -> tuple[Tensor, int]:
    logits, labels = outputs if isinstance(outputs, Tensor) else outputs.logits, batch["labels"]
    total = F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum")
    return total, int((labels != -100).sum())


# -- transformers -----------------------------------------------------------------------------------------------

_SIZES: dict[str, Any] = dict(
    hidden_size=WIDTH, intermediate_size=INNER, num_hidden_layers=2, num_attention_heads=HEADS, vocab_size=VOCAB,
    max_position_embeddings=TOKENS, use_cache=False,
)  # fmt: skip
#: two queries to a key, and heads that are not the width over their number
_GROUPED: dict[str, Any] = _SIZES | dict(num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=6)
_EXPERTS: dict[str, Any] = _GROUPED | dict(num_experts_per_tok=2, experts_implementation="eager")


def _transformers(model: str, config: str, **options: Any) -> nn.Module:
    import transformers

    made: nn.Module = getattr(transformers, model)(getattr(transformers, config)(**options))
    return made


@outside("GPT-2", _tokens)
def gpt2() -> nn.Module:
    return _transformers(
        "GPT2LMHeadModel", "GPT2Config", n_embd=WIDTH, n_layer=2, n_head=HEADS, n_positions=TOKENS, vocab_size=VOCAB,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip


@outside("BERT", _tokens)
def bert() -> nn.Module:
    options = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _transformers("BertForMaskedLM", "BertConfig", **_SIZES, **options)


@outside("Llama", _tokens)
def llama() -> nn.Module:
    return _transformers("LlamaForCausalLM", "LlamaConfig", **_GROUPED)


@outside("Qwen3", _tokens)
def qwen3() -> nn.Module:
    return _transformers("Qwen3ForCausalLM", "Qwen3Config", **_GROUPED, tie_word_embeddings=True)


@outside("Mixtral", _tokens)
def mixtral() -> nn.Module:
    return _transformers("MixtralForCausalLM", "MixtralConfig", **_EXPERTS, num_local_experts=4)


@outside("Qwen3-MoE", _tokens)
def qwen3_moe() -> nn.Module:
    experts = dict(num_experts=4, moe_intermediate_size=16, norm_topk_prob=True)
    return _transformers("Qwen3MoeForCausalLM", "Qwen3MoeConfig", **_EXPERTS, **experts)


@outside("GPT-NeoX", _tokens)
def gpt_neox() -> nn.Module:
    rope = dict(rope_type="default", rope_theta=10000.0, partial_rotary_factor=0.75)
    sizes = _SIZES | dict(hidden_size=32)
    return _transformers("GPTNeoXForCausalLM", "GPTNeoXConfig", **sizes, rope_parameters=rope)


@outside("T5", _translations, refused={"pipeline": "decoder.block.0 takes encoder_hidden_states"})
def t5() -> nn.Module:
    return _transformers(
        "T5ForConditionalGeneration", "T5Config", d_model=WIDTH, d_kv=6, d_ff=INNER, num_layers=2, num_heads=HEADS,
        vocab_size=VOCAB, dropout_rate=0.0, use_cache=False, relative_attention_num_buckets=8,
        feed_forward_proj="gated-gelu", decoder_start_token_id=0,
    )  # fmt: skip


@outside("ViT", _images)
def vit() -> nn.Module:
    options = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=CLASSES)
    sizes = {name: _SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    return _transformers(
        "ViTForImageClassification", "ViTConfig", num_attention_heads=HEADS, image_size=list(IMAGE), patch_size=PATCH,
        **sizes, **options,
    )  # fmt: skip


# -- timm, x-transformers ---------------------------------------------------------------------------------------


@outside("timm ViT", _images, example=torch.zeros(2, 3, *IMAGE))
def timm_vit() -> nn.Module:
    made: nn.Module = _timm().VisionTransformer(
        img_size=IMAGE, patch_size=PATCH, num_classes=CLASSES, embed_dim=WIDTH, depth=2, num_heads=HEADS, mlp_ratio=2
    )
    return made


@outside("timm MLP-Mixer", _images, example=torch.zeros(2, 3, *IMAGE))
def timm_mixer() -> nn.Module:
    made: nn.Module = _timm().MlpMixer(
        img_size=IMAGE, patch_size=PATCH, num_classes=CLASSES, embed_dim=WIDTH, num_blocks=2, mlp_ratio=(1.0, 2.0)
    )
    return made


def _timm() -> ModuleType:
    """timm imports torchvision for its data sets, and torch for CPUs has none on every index: here a stand-in, which
    is gone again before transformers asks whether there is one."""
    names = (
        "", ".transforms", ".transforms.functional", ".transforms.v2", ".ops", ".ops.misc", ".datasets", ".models",
        ".models.feature_extraction",
    )  # fmt: skip
    stand_ins = [] if "timm.models" in sys.modules else [f"torchvision{name}" for name in names]
    for name in stand_ins:
        sys.modules[name] = MagicMock(__spec__=None, __path__=[])
    import timm.models

    for name in stand_ins:
        del sys.modules[name]
    return timm.models


@outside(
    "x-transformers decoder",
    _tokens,
    refused={"pipeline": "no ModuleList or Sequential"},
    example=torch.zeros(2, TOKENS, dtype=torch.long),
)
def x_decoder() -> nn.Module:
    import x_transformers

    layers = x_transformers.Decoder(dim=WIDTH, depth=2, heads=HEADS, attn_dim_head=6, rotary_pos_emb=False)
    made: nn.Module = x_transformers.TransformerWrapper(num_tokens=VOCAB, max_seq_len=TOKENS, attn_layers=layers)
    return made
