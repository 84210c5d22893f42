"""Model folders of Hugging Face, written without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from colossus.hf.hf_folder import CONFIG, INDEX, SINGLE, options_of, spec_of

GPT2: dict[str, Any] = dict(
    model_type="gpt2", n_embd=8, n_layer=1, n_head=2, n_positions=6, vocab_size=11, eos_token_id=3, resid_pdrop=0.0,
    embd_pdrop=0.0, attn_pdrop=0.0,
)  # fmt: skip
LLAMA: dict[str, Any] = dict(
    model_type="llama", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=12, vocab_size=11, max_position_embeddings=6,
)  # fmt: skip
QWEN3: dict[str, Any] = LLAMA | dict(model_type="qwen3", head_dim=6)
MIXTRAL: dict[str, Any] = LLAMA | dict(model_type="mixtral", num_local_experts=3)
QWEN3_MOE: dict[str, Any] = QWEN3 | dict(
    model_type="qwen3_moe", num_hidden_layers=2, num_experts=3, num_experts_per_tok=2, moe_intermediate_size=5,
    decoder_sparse_step=2,
)  # fmt: skip
VIT: dict[str, Any] = dict(
    model_type="vit", hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, image_size=8,
    patch_size=4, id2label={"0": "a cat", "1": "a dog", "2": "a hat"},
)  # fmt: skip


def random_tensors(config: dict[str, Any], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """What a folder with this config holds, in the shapes that the config says."""
    family, spec = spec_of(Path("nowhere"), config, {})
    generator = torch.Generator().manual_seed(len(config))
    return {
        each.name: torch.randn(each.shape, generator=generator, dtype=torch.float64).to(dtype)
        for each in family.tensors(options_of(spec))
    }


def make_folder(path: Path, config: dict[str, Any], tensors: dict[str, Tensor] | None = None, files: int = 1) -> Path:
    """A folder with these tensors, in one file or dealt out to several with an index."""
    tensors = random_tensors(config) if tensors is None else tensors
    path.mkdir(parents=True)
    (path / CONFIG).write_text(json.dumps(config))
    if files == 1:
        save_file(tensors, path / SINGLE, {"format": "pt"})
        return path
    where = {name: f"model-{number % files + 1:05d}-of-{files:05d}.safetensors" for number, name in enumerate(tensors)}
    for file in set(where.values()):
        save_file({name: tensors[name] for name in tensors if where[name] == file}, path / file, {"format": "pt"})
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return path
