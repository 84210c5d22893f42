"""Checkpoints of small language models whose logits differ, and the same models in plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from helpers.twins import PlainGPT, PlainLlama
from torch import Tensor

import colossus
from colossus.checkpoint.state_dict import read_state_dict
from colossus.inference.config import WeightSource, find_source

LENGTH = 12
MODELS: dict[str, dict[str, Any]] = {
    "gpt": dict(type="GPT", num_layers=2, hidden_size=24, num_heads=4, vocab_size=53, seq_len=LENGTH),
    # fewer key/value heads than four ranks; every frequency is scaled otherwise
    "llama": dict(
        type="Llama", num_layers=2, hidden_size=48, num_heads=8, num_kv_heads=2, ffn_hidden_size=64, vocab_size=61,
        seq_len=LENGTH, window=4, attention_pattern=("local", "global"), rotary_base=100.0, rotary_base_local=50.0,
        sinks=True, soft_cap=0.5, attention_scale=0.6, rotary_fraction=0.7, logit_cap=2.0,
        rotary_scaling=dict(factor=8.0, original_max_position_embeddings=16),
    ),
    "latent": dict(
        type="Llama", num_layers=2, hidden_size=24, num_heads=4, ffn_hidden_size=32, vocab_size=59, seq_len=LENGTH,
        latent=dict(kv_rank=8, q_rank=12, nope_dim=6, rope_dim=4, value_dim=5),
    ),
}  # fmt: skip


def save(folder: Path, model: dict[str, Any], **train: Any) -> WeightSource:
    """A checkpoint of one process, its initial weights grown so that logits differ by whole numbers."""
    config = dict(
        parallel=dict(data=1),
        model=model,
        train=dict(global_batch_size=4, seed=1, **{"precision": "fp64", **train}),
        checkpoint=dict(dir=str(folder), keep_last=0),
        device="cpu",
    )
    engine = colossus.initialize(config)
    with torch.no_grad():
        for name, param in engine.model.named_parameters():
            param.mul_(1.5 if "norm" in name else 8.0)
    engine.checkpoints.save(background=False).wait()
    engine.close()
    return find_source(folder)


def plain(source: WeightSource, model: dict[str, Any]) -> PlainGPT:
    """The oracle with the weights of the checkpoint."""
    options = {key: value for key, value in model.items() if key != "type"}
    twin = (PlainLlama if model["type"] == "Llama" else PlainGPT)(**options).double()
    twin.load_state_dict(read_state_dict(source.folder))
    return twin.eval()


def ids_of(rows: int, vocab_size: int, length: int = LENGTH) -> Tensor:
    return torch.randint(0, vocab_size, (rows, length), generator=torch.Generator().manual_seed(5))
