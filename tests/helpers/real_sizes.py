"""Plans that people run, at their sizes: Llama 3 of 8B, 70B and 405B, GPT-3, Mixtral 8x22B, ViT-g."""

from __future__ import annotations

from typing import Any

import torch

LLAMA_8B = dict(
    type="Llama", num_layers=32, hidden_size=4096, num_heads=32, num_kv_heads=8, ffn_hidden_size=14336,
    vocab_size=128256, seq_len=8192, tie_embeddings=False,
)  # fmt: skip
LLAMA_70B = {**LLAMA_8B, "num_layers": 80, "hidden_size": 8192, "num_heads": 64, "ffn_hidden_size": 28672}
LLAMA_405B = {**LLAMA_8B, "num_layers": 126, "hidden_size": 16384, "num_heads": 128, "ffn_hidden_size": 53248}
GPT3 = dict(type="GPT", num_layers=96, hidden_size=12288, num_heads=96, vocab_size=51200, seq_len=2048)
MIXTRAL = dict(
    type="Llama", num_layers=56, hidden_size=6144, num_heads=48, num_kv_heads=8, ffn_hidden_size=16384,
    experts=dict(num=8, top_k=2), vocab_size=32768, seq_len=4096, tie_embeddings=False,
)  # fmt: skip
VIT_G = dict(
    type="ViT", num_layers=40, hidden_size=1408, num_heads=16, ffn_hidden_size=6144, image_size=224, patch_size=14,
    in_channels=3, num_classes=1000,
)  # fmt: skip


class OneSample(torch.utils.data.Dataset[Any]):
    """A dataset of one sample of a model's shape."""

    def __init__(self, model: dict[str, Any]) -> None:
        size = model.get("image_size")
        self._sample: dict[str, torch.Tensor]
        if size is None:
            ids = torch.zeros(model["seq_len"], dtype=torch.int64)
            self._sample = {"inputs": ids, "labels": ids}
        else:
            self._sample = {"inputs": torch.zeros(model["in_channels"], size, size), "labels": torch.tensor(0)}

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> Any:
        return self._sample


def run_of(
    model: dict[str, Any], *, layers: int, samples: int = 1, microbatches: int = 1, recompute: str = "none",
    schedule: dict[str, Any] | None = None, precision: Any = "bf16", seq_len: int | None = None, **parallel: Any,
) -> dict[str, Any]:  # fmt: skip
    """Return the config of a run.

    Args:
        model: options of the model.
        layers: number of its layers.
        samples: samples of a microbatch on a data rank.
        microbatches: number of microbatches.
        recompute: type of activation checkpointing.
        schedule: further keys of the schedule.
        precision: ``train.precision``.
        seq_len: tokens of a sample, by default the model's.
        parallel: the plan.
    """
    model = {**model, "num_layers": layers}
    if seq_len is not None:
        model["seq_len"] = seq_len
    batch = samples * microbatches * parallel.get("data", 1)
    return dict(
        parallel=parallel,
        model=model,
        optimizer=dict(type="AdamW", lr=1e-4),
        schedule=dict(microbatches=microbatches, **(schedule or {})),
        train=dict(global_batch_size=batch, precision=precision, steps=4, activation_checkpoint=recompute),
        data=OneSample(model),
    )


TOKENS_SPLIT = dict(size=8, sequence_sharded=True)
#: by default, and the others
SOME = ("70b 1d fsdp",)
REAL_SIZES: dict[str, dict[str, Any]] = {
    # FSDP and ZeRO
    "70b fsdp": run_of(LLAMA_70B, layers=8, recompute="full", data=64, zero=3),
    "70b fsdp 4 microbatches": run_of(LLAMA_70B, layers=6, recompute="full", microbatches=4, data=64, zero=3),
    "8b fsdp, all kept": run_of(LLAMA_8B, layers=8, data=8, zero=3),
    "8b fsdp, selective": run_of(LLAMA_8B, layers=8, recompute="selective", data=8, zero=3),
    "70b fsdp for a step": run_of(
        LLAMA_70B, layers=6, recompute="full", data=64, zero=3, tensor=dict(weights="step")
    ),
    "70b fsdp for a microbatch": run_of(
        LLAMA_70B, layers=6, recompute="full", microbatches=2, data=64, zero=3, tensor=dict(weights="microbatch")
    ),
    "8b hsdp": run_of(LLAMA_8B, layers=8, recompute="full", data=64, zero=dict(stage=3, shard=8)),
    "8b zero 2": run_of(LLAMA_8B, layers=8, recompute="full", microbatches=2, data=64, zero=2),
    "8b zero 1": run_of(LLAMA_8B, layers=8, microbatches=2, data=64, zero=1),
    "8b zero 1, one microbatch": run_of(LLAMA_8B, layers=8, recompute="full", data=64, zero=1),
    "8b data": run_of(LLAMA_8B, layers=8, recompute="full", data=8),
    "8b data 3 microbatches": run_of(LLAMA_8B, layers=8, recompute="full", microbatches=3, data=8),
    "8b masters": run_of(
        LLAMA_8B, layers=8, recompute="full", microbatches=2, data=8, precision=dict(params="bf16")
    ),
    "gpt3 data, tied": run_of(GPT3, layers=2, recompute="full", microbatches=2, data=8, tensor=8),
    "gpt3 fsdp, tied": run_of(GPT3, layers=4, recompute="full", data=64, zero=3, tensor=8),
    "vit fsdp": run_of(VIT_G, layers=12, samples=32, data=64, zero=3),
    "vit data": run_of(VIT_G, layers=12, samples=32, microbatches=2, data=64),
    # tensor parallelism
    "70b 1d fsdp": run_of(LLAMA_70B, layers=8, recompute="full", data=8, zero=3, tensor=TOKENS_SPLIT),
    "70b 1d zero 1": run_of(LLAMA_70B, layers=8, microbatches=2, data=8, zero=1, tensor=TOKENS_SPLIT),
    "70b 1d selective": run_of(
        LLAMA_70B, layers=8, recompute="selective", microbatches=2, data=8, zero=1, tensor=TOKENS_SPLIT
    ),
    "70b 1d whole tokens": run_of(LLAMA_70B, layers=6, recompute="full", microbatches=2, data=8, tensor=8),
    "405b 2d": run_of(
        LLAMA_405B, layers=4, samples=4, recompute="full", data=4, zero=1, tensor=dict(mode="2d", size=16)
    ),
    "405b 2.5d": run_of(
        LLAMA_405B, layers=4, samples=8, recompute="full", data=4, zero=1,
        tensor=dict(mode="2.5d", size=32, depth=2),
    ),
    "405b 2d for a step": run_of(
        LLAMA_405B, layers=8, samples=2, recompute="full", microbatches=8, data=2, pipeline=4, zero=1,
        tensor=dict(mode="2d", size=4, weights="step"),
    ),
    "70b 3d for a step": run_of(
        LLAMA_70B, layers=6, samples=4, microbatches=3, data=2, tensor=dict(mode="3d", size=8, weights="step")
    ),
    "8b weights cast for a step": run_of(
        LLAMA_8B, layers=8, microbatches=4, data=2, pipeline=2, tensor=dict(size=8, weights="step")
    ),
    "70b 3d": run_of(LLAMA_70B, layers=4, samples=4, data=4, zero=1, tensor=dict(mode="3d", size=8)),
    "8b ring": run_of(LLAMA_8B, layers=8, recompute="full", seq_len=32768, data=2, zero=3, sequence=8),
    # pipelines
    "405b pipeline": run_of(
        LLAMA_405B, layers=8, microbatches=8, data=2, pipeline=4, zero=1, tensor=TOKENS_SPLIT, recompute="full"
    ),
    "70b pipeline, all kept": run_of(LLAMA_70B, layers=8, microbatches=8, pipeline=4, tensor=TOKENS_SPLIT),
    "gpt3 interleaved": run_of(
        GPT3, layers=8, microbatches=8, schedule=dict(type="interleaved", chunks=2), pipeline=4, tensor=TOKENS_SPLIT
    ),
    "70b zb-h1": run_of(
        LLAMA_70B, layers=8, microbatches=8, schedule=dict(type="zb-h1"), data=2, pipeline=4, zero=1,
        tensor=TOKENS_SPLIT,
    ),
    "70b pipeline fsdp": run_of(
        LLAMA_70B, layers=8, microbatches=4, recompute="full", data=8, pipeline=4, zero=3, tensor=TOKENS_SPLIT
    ),
    # experts
    "mixtral": run_of(MIXTRAL, layers=4, recompute="full", data=16, zero=1, expert=8),
    "mixtral fsdp": run_of(MIXTRAL, layers=4, recompute="full", microbatches=2, data=64, zero=3, expert=8),
}  # fmt: skip
