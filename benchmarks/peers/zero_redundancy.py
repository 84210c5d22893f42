"""torch's ZeroRedundancyOptimizer under DistributedDataParallel: optimizer state sharded over ranks (ZeRO-1)."""

from __future__ import annotations

import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

from benchmarks.peers.ddp import DDPCase
from benchmarks.workload import LEARNING_RATE


class ZeroRedundancyCase(DDPCase):
    """Each rank updates whole parameters of about a share of the model, and broadcasts them."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.params, torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
        )
