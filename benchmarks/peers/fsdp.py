"""torch's FSDP2: `fully_shard` of every block and of the whole, which shards weights, gradients and optimizer state."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from benchmarks.peers.plain import PlainGPT, loss_of
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload, fuse_qkv


class FSDPCase:
    """Clipping and fused AdamW work on local shards.

    Args:
        reshard: gather a block's weights again in backward (the default of `fully_shard`), or keep them until then.
        prefetch: gather the next block's weights during a block's forward. By default `fully_shard` prefetches on
            streams, which a CPU does not have.
        low: gather and compute in bf16, reduce gradients in fp32.
    """

    def __init__(
        self,
        workload: Workload,
        rank: int,
        world: int,
        *,
        reshard: bool = True,
        prefetch: bool = False,
        low: bool = False,
    ) -> None:
        model = PlainGPT(workload)
        model.load_state_dict(fuse_qkv(workload.state()))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low else MixedPrecisionPolicy()
        mesh = dist.init_device_mesh("cpu", (world,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy)
        self.model = fully_shard(model, mesh=mesh, mp_policy=policy)
        if prefetch:
            for block, following in pairwise(model.blocks):
                block.register_forward_pre_hook(partial(_unshard, following))
        self.params = list(model.parameters())
        self.local = [nn.Parameter(_local(param.detach())) for param in self.params]
        self.optimizer = torch.optim.AdamW(self.local, lr=LEARNING_RATE, fused=True)
        self.batches = workload.batches(part=rank, parts=world)
        self.world = world

    def step(self, index: int) -> tuple[float, float]:
        ids, labels = self.batches[index % len(self.batches)]
        self.model.zero_grad(set_to_none=True)
        loss = loss_of(self.model(ids).float(), labels)
        total = loss.detach().clone()
        reduced = dist.all_reduce(total, async_op=True)
        loss.backward()
        for param, local in zip(self.params, self.local, strict=True):
            assert param.grad is not None
            local.grad = _local(param.grad)
        norm = self._clip()
        self.optimizer.step()
        reduced.wait()
        return total.item() / self.world, norm.item()

    def _clip(self) -> Tensor:
        square = torch.nn.utils.get_total_norm([param.grad for param in self.local if param.grad is not None]).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.local, CLIP_NORM, norm)
        return norm


def _unshard(module: Any, *_: Any) -> None:
    module.unshard(async_op=True)


def _local(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.to_local()
