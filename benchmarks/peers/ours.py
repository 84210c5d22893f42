"""colossus, used as its users do."""

from __future__ import annotations

from typing import Any

import torch

import colossus
from benchmarks.undrawn import undrawn
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload
from colossus.checkpoint import load_full_state_dict
from colossus.engine.results import StepResult


class ColossusCase:
    """
    Args:
        recompute: ``train.activation_checkpoint``.
        zero: stage of ZeRO over the data ranks.
        weights: for how long gathered weights are kept, ``parallel.tensor.weights``.
        precision: ``train.precision``.
        checkpoint: the config's section.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        *,
        data: int = 1,
        tensor: int = 1,
        zero: int = 0,
        weights: str = "matmul",
        precision: str = "fp32",
        recompute: Any = "none",
        checkpoint: dict[str, Any] | None = None,
    ) -> None:
        w = workload
        config: dict[str, Any] = {
            "parallel": {"data": data, "tensor": {"mode": "1d", "size": tensor, "weights": weights}, "zero": zero},
            "model": {
                "type": "GPT",
                "num_layers": w.layers,
                "hidden_size": w.hidden,
                "num_heads": w.heads,
                "vocab_size": w.vocab,
                "seq_len": w.tokens,
                "tie_embeddings": False,
            },
            "optimizer": {"type": "AdamW", "lr": LEARNING_RATE},
            "train": {
                "global_batch_size": w.batch,
                "clip_grad_norm": CLIP_NORM,
                "precision": precision,
                "activation_checkpoint": recompute,
            },
            "checkpoint": checkpoint or {},
            "device": w.device,
        }
        with undrawn():
            self.engine = colossus.initialize(config)
        load_full_state_dict(self.engine.model, w.state(w.device), self.engine.context)
        pairs = w.batches(part=self.engine.context.index("data"), parts=data)
        device = self.engine.device
        self.batches = [{"inputs": ids.to(device), "labels": labels.to(device)} for ids, labels in pairs]

    @property
    def model(self) -> torch.nn.Module:
        """Return the model, called once: what layers note at their first call would be a graph of its own."""
        with torch.no_grad():
            self.engine.model(self.batches[0]["inputs"][:1])
        return self.engine.model

    def run(self, index: int) -> StepResult:
        """Run a step and do not read its result: an accelerator is not waited for."""
        return self.engine.train_step(self.batches[index % len(self.batches)])

    def step(self, index: int) -> tuple[float, float]:
        result = self.run(index)
        return result.loss, result.grad_norm
