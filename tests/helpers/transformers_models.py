"""Small random models of transformers, in float64: the oracle of `colossus.hf`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from helpers.training import batch_of
from helpers.twins import llama3_rates, yarn_rates
from torch import Tensor, nn
from transformers.models.deepseek_v2 import modeling_deepseek_v2
from transformers.models.gemma2 import modeling_gemma2

from colossus.hf.hf_folder import read_folder
from colossus.layers.block_options import RotaryScaling

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

BATCH, TOKENS, VOCAB = 8, 12, 53
#: meets all three of its cases with the pairs of a head of 8
SCALING = dict(
    rope_type="llama3", rope_theta=500.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
    original_max_position_embeddings=64,
)  # fmt: skip
#: transformers gives a padding token's row of the table no gradient as an input, and by default Gemma has one
_GEMMA: dict[str, Any] = dict(num_hidden_layers=3, num_key_value_heads=2, head_dim=8, pad_token_id=None)
_GPT2: dict[str, Any] = dict(
    n_embd=24, n_layer=2, n_head=4, n_positions=TOKENS, vocab_size=VOCAB, resid_pdrop=0.0, embd_pdrop=0.0,
    attn_pdrop=0.0, layer_norm_epsilon=1e-3, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_LLAMA: dict[str, Any] = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCAB, max_position_embeddings=TOKENS,
    intermediate_size=28, rms_norm_eps=1e-3,
)  # fmt: skip
_VIT: dict[str, Any] = dict(
    hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=28, image_size=[8, 12], patch_size=4,
    num_labels=5, layer_norm_eps=1e-3,
)  # fmt: skip
_YARN = dict(
    rope_type="yarn", rope_theta=100.0, factor=4.0, original_max_position_embeddings=64, mscale=0.8, mscale_all_dim=0.5,
    beta_fast=8.0, beta_slow=1.0,
)  # fmt: skip
_LATENT: dict[str, Any] = dict(
    **_LLAMA, num_key_value_heads=4, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5,
    n_routed_experts=6, num_experts_per_tok=3, moe_intermediate_size=12, routed_scaling_factor=2.5, n_group=3,
    topk_group=2, first_k_dense_replace=1, experts_implementation="eager",
)  # fmt: skip
CONFIGS: dict[str, transformers.PreTrainedConfig] = {
    "gpt2": transformers.GPT2Config(**_GPT2),
    "gpt2 untied, exact gelu": transformers.GPT2Config(
        **_GPT2, n_inner=28, activation_function="gelu", tie_word_embeddings=False
    ),
    "llama 2": transformers.LlamaConfig(**_LLAMA),
    "llama 3": transformers.LlamaConfig(
        **_LLAMA,
        head_dim=8,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        rope_parameters=SCALING,
        attention_bias=True,
        mlp_bias=True,
        eos_token_id=[2, 5],
    ),
    "qwen3": transformers.Qwen3Config(**_LLAMA, head_dim=8, num_key_value_heads=2),
    "mistral": transformers.MistralConfig(**_LLAMA, num_key_value_heads=2, sliding_window=3),
    "mixtral": transformers.MixtralConfig(
        **_LLAMA, num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=3, experts_implementation="eager"
    ),
    "qwen3 moe": transformers.Qwen3MoeConfig(
        **_LLAMA,
        head_dim=8,
        num_key_value_heads=2,
        moe_intermediate_size=10,
        num_experts=4,
        num_experts_per_tok=2,
        decoder_sparse_step=2,
        experts_implementation="eager",
    ),
    "deepseek v2": transformers.DeepseekV2Config(
        **_LATENT, q_lora_rank=None, n_shared_experts=2, topk_method="group_limited_greedy"
    ),
    "deepseek v3": transformers.DeepseekV3Config(**_LATENT, q_lora_rank=20, rope_parameters=_YARN),
    "gemma2": transformers.Gemma2Config(
        **_LLAMA | _GEMMA,
        sliding_window=4,
        query_pre_attn_scalar=11,
        attn_logit_softcapping=0.7,
        final_logit_softcapping=0.9,
        attn_implementation="eager",
    ),
    "gemma3": transformers.Gemma3TextConfig(
        **_LLAMA | _GEMMA,
        sliding_window=3,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=20,
        rope_parameters=dict(
            full_attention=dict(rope_type="linear", factor=4.0, rope_theta=500.0),
            sliding_attention=dict(rope_type="default", rope_theta=70.0),
        ),
    ),
    "gpt-oss": transformers.GptOssConfig(
        **_LLAMA,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=3,
        swiglu_limit=0.3,
        rope_parameters=dict(
            rope_type="yarn",
            rope_theta=100.0,
            factor=4.0,
            original_max_position_embeddings=64,
            beta_fast=8.0,
            beta_slow=1.0,
            truncate=False,
        ),
        experts_implementation="eager",
    ),
    "vit": transformers.ViTConfig(**_VIT),
}


def make_model(kind: str, dtype: torch.dtype = torch.float64) -> Any:
    """A random one, whose every parameter matters: norms are not 1, biases not 0."""
    config = CONFIGS[kind]
    is_decoder = config.model_type != "vit"
    auto = transformers.AutoModelForCausalLM if is_decoder else transformers.AutoModelForImageClassification
    model = auto.from_config(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(len(kind))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2
            parameter.copy_(drawn + 1 if "norm" in name or ".ln_" in name else drawn)
        for module in model.modules():
            if hasattr(module, "e_score_correction_bias"):  # in float32 whatever the dtype of the model
                bias = module.e_score_correction_bias
                module.e_score_correction_bias = torch.randn(bias.shape, generator=generator) * 0.2
    return model


def in_float64(model: Any) -> Any:
    """transformers computes some things of Llama and its kin in float32 whatever its dtype; here they have that of the
    model: angles, cosines and sines of the rotary positions, what RMS norms divide by, and weights of experts."""
    if hasattr(model, "model"):
        model.model.rotary_emb = _Rotary64(model.config, getattr(model.model.rotary_emb, "attention_scaling", 1.0))
        for module in model.modules():
            if type(module).__name__.startswith("Gemma") and "Norm" in type(module).__name__:
                module.forward = partial(_zero_centered_norm, module)
            elif type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(_rms_norm, module)
            elif type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(_route, module)
            elif type(module).__name__.endswith("TopkRouter"):  # of DeepSeek: its own code, with another torch.float32
                code = type(module).forward
                module.forward = partial(_with_torch64(code), module)
        embedding = model.model.embed_tokens
        if hasattr(embedding, "embed_scale"):
            embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale, dtype=torch.float64)
        code = modeling_gemma2.eager_attention_forward
        modeling_gemma2.eager_attention_forward = _with_torch64(code)
        modeling_deepseek_v2.apply_rotary_emb = _turn
    return model


def _with_torch64(function: Any) -> Any:
    """The function with another ``torch.float32``."""
    return FunctionType(
        function.__code__, {**function.__globals__, "torch": _TORCH64, "nn": nn}, None, function.__defaults__
    )


_TORCH64 = SimpleNamespace(**{**vars(torch), "float32": torch.float64})


def _turn(query: Tensor, key: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
    """Rotate features 2i and 2i + 1, as DeepSeek-V2 does in float32."""
    pairs = (torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) for x in (query, key))
    query, key = (torch.view_as_real(x * angles.unsqueeze(1)).flatten(3) for x in pairs)
    return query, key


def _rms_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], module.weight, module.variance_epsilon)


def _zero_centered_norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], None, module.eps) * (1 + module.weight)


def _route(module: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = F.linear(x.reshape(-1, x.shape[-1]), module.weight, getattr(module, "bias", None))
    weights, experts = logits.softmax(-1).topk(module.top_k, -1)
    if getattr(module, "norm_topk_prob", True):  # Mixtral has no choice
        weights = weights / weights.sum(-1, keepdim=True)
    return logits, weights, experts


class _Rotary64(nn.Module):
    def __init__(self, config: Any, amplitude: float = 1.0) -> None:
        super().__init__()
        rope = dict(config.rope_parameters)
        self.kinds = nn.ModuleDict()
        if "full_attention" in rope:  # one for each kind of layer
            for name, own in rope.items():
                self.kinds[name] = _Rotary64(
                    SimpleNamespace(**{**vars(config), "model_type": "", "rope_parameters": own})
                )
            return
        dim = config.head_dim or config.hidden_size // config.num_attention_heads
        base, kind = rope.pop("rope_theta"), rope["rope_type"]
        rates = base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        self.rates, self.amplitude = rates, amplitude
        if kind in ("llama3", "linear"):
            self.rates = llama3_rates(rates, RotaryScaling(**rope))
        elif kind == "yarn":
            self.rates, _ = yarn_rates(base, dim, RotaryScaling(**rope))
        self.is_complex, self.is_half = config.model_type == "deepseek_v2", config.model_type == "gpt_oss"

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if layer_type is not None:
            angles: tuple[Tensor, Tensor] = self.kinds[layer_type](x, position_ids)
            return angles
        if self.is_complex:
            angles = position_ids[..., None].double() * self.rates
            return torch.polar(torch.full_like(angles, self.amplitude), angles)
        rates = self.rates if self.is_half else torch.cat((self.rates, self.rates))
        angles = position_ids[..., None].double() * rates
        return angles.cos() * self.amplitude, angles.sin() * self.amplitude


def batch_for(kind: str, step: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """``inputs`` and ``labels``, as an engine of the model takes them."""
    if kind != "vit":
        return batch_of(step, dict(vocab_size=VOCAB, seq_len=TOKENS), BATCH)
    generator = torch.Generator().manual_seed(step)
    images = torch.randn(BATCH, 3, 8, 12, generator=generator, dtype=torch.float64).to(dtype)
    return {"inputs": images, "labels": torch.randint(0, 5, (BATCH,), generator=generator)}


@dataclass(frozen=True)
class Step:
    """What transformers computes of a batch: logits, the mean loss over valid labels, gradients by our names."""

    logits: Tensor
    loss: float
    gradients: dict[str, Tensor]


def step_of(model: Any, batch: dict[str, Tensor], folder: Path) -> Step:
    model.zero_grad()
    logits = model(batch["inputs"]).logits
    loss = F.cross_entropy(logits.flatten(0, -2), batch["labels"].flatten())
    loss.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    return Step(logits.detach(), loss.item(), by_our_names(gradients, folder))


#: what transformers 5 calls the modules of a ViT, and how it writes them
_OLD_NAMES = (
    ("vit.layers.", "vit.encoder.layer."),
    ("attention.q_proj", "attention.attention.query"),
    ("attention.k_proj", "attention.attention.key"),
    ("attention.v_proj", "attention.attention.value"),
    ("attention.o_proj", "attention.output.dense"),
    ("mlp.fc1", "intermediate.dense"),
    ("mlp.fc2", "output.dense"),
)


def by_our_names(theirs: dict[str, Tensor], folder: Path) -> dict[str, Tensor]:
    """Tensors of theirs as our parameters. That they are the right ones, logits show."""
    found = {}
    for new, old in _OLD_NAMES:
        theirs = {name.replace(new, old) if name.startswith("vit.") else name: each for name, each in theirs.items()}
    if folder.name != "gpt-oss":
        theirs = _of_single_experts(theirs, is_mixtral=folder.name == "mixtral")
    for tensor, _ in read_folder(folder).placed:
        if tensor.name.endswith("e_score_correction_bias") and tensor.name not in theirs:
            continue  # a buffer has no gradient
        array = theirs[tensor.name].reshape(tensor.rows)
        for part, first in tensor.located():
            value = tensor.of_part(array, part)
            if tensor.index is None:
                found[part.name] = value[first : first + part.shape[0]].clone()
            else:
                found.setdefault(part.name, torch.empty(part.shape, dtype=value.dtype))[tensor.index] = value
    return found


def _of_single_experts(theirs: dict[str, Tensor], is_mixtral: bool) -> dict[str, Tensor]:
    """What transformers 5 has stacked, as it writes it; tensors that it has written stay as they are."""
    gate, up, down = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, value in theirs.items():
        name = name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name
        path, _, leaf = name.rpartition(".")
        if leaf not in ("gate_up_proj", "down_proj"):
            found[name] = value
            continue
        for number, expert in enumerate(value):
            parts = zip((gate, up), expert.chunk(2), strict=True) if leaf == "gate_up_proj" else [(down, expert)]
            found |= {f"{path}.{number}.{part}.weight": each for part, each in parts}
    return found
