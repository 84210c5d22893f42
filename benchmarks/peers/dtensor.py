"""torch's own tensor parallelism: DTensor with ``parallelize_module``.

The fastest of the plans that were tried for it: see `block_plan`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.plain import PlainGPT, loss_of
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, Workload, fuse_qkv


def block_plan(layers: int) -> dict[str, ParallelStyle]:
    """Column and row pairs in the blocks, the head split by vocabulary, everything else replicated.

    Query, key and value are one column-parallel linear (three would cost three all-reduces in backward); between the
    linears tensors are local, because each operation on a DTensor costs several plain ones. The logits stay split for
    ``loss_parallel``: whole logits, and a whole head on every rank, were no faster and at 4 ranks slower. A split
    embedding would cost an all-reduce more.
    """
    plan: dict[str, ParallelStyle] = {"head": ColwiseParallel(use_local_output=False)}
    for index in range(layers):
        plan[f"blocks.{index}.attention.qkv"] = ColwiseParallel()
        plan[f"blocks.{index}.attention.out"] = RowwiseParallel()
        plan[f"blocks.{index}.mlp.up"] = ColwiseParallel()
        plan[f"blocks.{index}.mlp.down"] = RowwiseParallel()
    return plan


class DTensorCase:
    """Clipping and AdamW run on the local shards, where torch's fused kernels take them all at once."""

    def __init__(self, workload: Workload, rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        self.model = PlainGPT(workload, ways=world)
        # rows ordered so that the even split of the fused weight gives every rank whole heads
        self.model.load_state_dict(fuse_qkv(workload.state(), interleave=world))
        parallelize_module(self.model, mesh, block_plan(workload.layers))
        self.params = list(self.model.parameters())
        self.split: list[nn.Parameter] = []
        self.replicated: list[nn.Parameter] = []
        for param in self.params:
            is_split = isinstance(param, DTensor) and any(place.is_shard() for place in param.placements)
            (self.split if is_split else self.replicated).append(param)
        self.local = {param: nn.Parameter(_local(param.detach())) for param in self.params}
        self.optimizer = torch.optim.AdamW(self.local.values(), lr=LEARNING_RATE, fused=True)
        self.batches = workload.batches()

    def step(self, index: int) -> tuple[float, float]:
        ids, labels = self.batches[index % len(self.batches)]
        self.model.zero_grad(set_to_none=True)
        with loss_parallel():
            loss = loss_of(self.model(ids), labels)
            loss.backward()
        for param, local in self.local.items():
            assert param.grad is not None
            local.grad = _local(param.grad)
        norm = self._clip()
        self.optimizer.step()
        return _local(loss).item(), norm.item()

    def _clip(self) -> Tensor:
        square = self._square(self.split)
        work = dist.all_reduce(square, async_op=True)
        replicated = self._square(self.replicated)
        work.wait()
        norm = (square + replicated).sqrt()
        torch.nn.utils.clip_grads_with_norm_(list(self.local.values()), CLIP_NORM, norm)
        return norm

    def _square(self, params: list[nn.Parameter]) -> Tensor:
        grads = [self.local[param].grad for param in params]
        return torch.nn.utils.get_total_norm([grad for grad in grads if grad is not None]).square()


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
