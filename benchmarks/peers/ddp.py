"""torch's DistributedDataParallel, and its ZeroRedundancyOptimizer: optimizer state sharded over ranks (ZeRO-1)."""

from __future__ import annotations

import torch
from torch import distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.plain import PlainGPT, autocast, loss_of
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload, fuse_qkv


class DDPCase:
    """Gradients stay in DDP's buckets (no copy); the global loss travels while backward runs.

    Args:
        low: forward under autocast to bf16; gradients are reduced in fp32.
    """

    def __init__(self, workload: Workload, rank: int, world: int, *, low: bool = False) -> None:
        model = PlainGPT(workload)
        model.load_state_dict(fuse_qkv(workload.state()))
        self.params = list(model.parameters())
        self.model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
        self.optimizer = self.make_optimizer()
        self.batches = workload.batches(part=rank, parts=world)
        self.world, self.low = world, low

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)

    def step(self, index: int) -> tuple[float, float]:
        ids, labels = self.batches[index % len(self.batches)]
        self.optimizer.zero_grad(set_to_none=True)
        with autocast("cpu", self.low):
            loss = loss_of(self.model(ids), labels)
        total = loss.detach().clone()
        reduced = dist.all_reduce(total, async_op=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.params, CLIP_NORM)
        self.optimizer.step()
        reduced.wait()
        return total.item() / self.world, norm.item()


class ZeroRedundancyCase(DDPCase):
    """Each rank updates whole parameters of about a share of the model, and broadcasts them."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(
            self.params, torch.optim.AdamW, parameters_as_bucket_view=True, lr=LEARNING_RATE, fused=True
        )
