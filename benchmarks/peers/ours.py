"""colossus, used as its users do."""

from __future__ import annotations

from typing import Any

import torch

import colossus
from benchmarks.undrawn import undrawn
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload
from colossus.checkpoint import load_full_state_dict
from colossus.comm import shared_memory
from colossus.engine.results import StepResult


class ColossusCase:
    """A GPT under a plan, with the weights and batches of a workload.

    Args:
        parallel, schedule, checkpoint: sections of the config.
        precision: ``train.precision``.
        recompute: ``train.activation_checkpoint``.
        over_gloo: ranks of a host send through gloo, as on hosts of their own, not through shared memory.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        *,
        parallel: dict[str, Any] | None = None,
        schedule: dict[str, Any] | None = None,
        checkpoint: dict[str, Any] | None = None,
        precision: str = "fp32",
        recompute: Any = "none",
        over_gloo: bool = False,
    ) -> None:
        shared_memory.enable(not over_gloo)
        w = workload
        config: dict[str, Any] = {
            "parallel": parallel or {"data": 1},
            "schedule": schedule or {},
            "model": dict(
                type="GPT", num_layers=w.layers, hidden_size=w.hidden, num_heads=w.heads, vocab_size=w.vocab,
                seq_len=w.tokens, tie_embeddings=False,
            ),
            "optimizer": {"type": "AdamW", "lr": LEARNING_RATE},
            "train": dict(
                global_batch_size=w.batch, clip_grad_norm=CLIP_NORM, precision=precision,
                activation_checkpoint=recompute,
            ),
            "checkpoint": checkpoint or {},
            "device": w.device,
        }  # fmt: skip
        with undrawn():
            self.engine = colossus.initialize(config)
        context, device = self.engine.context, self.engine.device
        load_full_state_dict(self.engine.model, w.state(w.device), context)
        pairs = w.batches(part=context.index("data"), parts=context.size("data"))
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
