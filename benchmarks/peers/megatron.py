"""Tensor parallelism written by hand after Megatron-LM (1909.08053 section 3, and its `tensor_parallel` layers).

The f and g of the paper are inside of the linears: a column-parallel linear sums dx in backward, asynchronously while
dw is computed; a row-parallel linear sums its product in forward. Embedding, head and cross-entropy split the
vocabulary as Megatron does, or are whole on every rank, which moves less where the vocabulary is as small as here.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from benchmarks.peers.plain import Block, PlainGPT, loss_of
from benchmarks.workload import CLIP_NORM, LEARNING_RATE, State, Workload, fuse_qkv


class _ColumnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        dy = grads[0]
        x, weight = ctx.saved_tensors
        dx = dy.matmul(weight)
        work = dist.all_reduce(dx, async_op=True)
        dy = dy.flatten(0, -2)
        dw = dy.t().matmul(x.flatten(0, -2))
        db = dy.sum(0) if ctx.has_bias else None
        work.wait()
        return dx, dw, db


class _SumForward(torch.autograd.Function):
    """g: all-reduce forward, identity backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


class ColumnLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return _ColumnLinear.apply(x, self.weight, self.bias)


class RowLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return _SumForward.apply(F.linear(x, self.weight)).add_(self.bias)


class VocabularyEmbedding(nn.Module):
    def __init__(self, vocab: int, hidden: int, rank: int, world: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab // world, hidden))
        self.start, self.stop = rank * vocab // world, (rank + 1) * vocab // world

    def forward(self, ids: Tensor) -> Tensor:
        elsewhere = (ids < self.start) | (ids >= self.stop)
        local = (ids - self.start).masked_fill_(elsewhere, 0)
        # masked out of place: the rows are a node of the graph
        return _SumForward.apply(F.embedding(local, self.weight).masked_fill(elsewhere.unsqueeze(-1), 0.0))


class _VocabularyCrossEntropy(torch.autograd.Function):
    """Sum over the tokens; logits [tokens, vocab / ranks], labels [tokens]. Three all-reduces, as in Megatron."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, start: int) -> Tensor:
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        shifted = logits - top.unsqueeze(-1)
        elsewhere = (labels < start) | (labels >= start + logits.shape[1])
        column = (labels - start).masked_fill_(elsewhere, 0)
        picked = shifted.gather(1, column.unsqueeze(1)).squeeze(1).masked_fill_(elsewhere, 0.0)
        exponentials = shifted.exp_()
        total = exponentials.sum(-1)
        works = [dist.all_reduce(picked, async_op=True), dist.all_reduce(total, async_op=True)]
        for work in works:
            work.wait()
        ctx.save_for_backward(exponentials.div_(total.unsqueeze(-1)), column, elsewhere)
        return (total.log() - picked).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        out, column, elsewhere = ctx.saved_tensors
        out.scatter_add_(1, column.unsqueeze(1), elsewhere.to(out.dtype).sub_(1.0).unsqueeze(1))
        return out.mul_(grads[0]), None, None


class MegatronGPT(PlainGPT):
    """The plain GPT with its linears replaced by parallel ones; with ``split_vocabulary`` embedding and head too."""

    def __init__(self, workload: Workload, rank: int, world: int, split_vocabulary: bool) -> None:
        with torch.device("meta"):
            super().__init__(workload, ways=world)
        h = workload.hidden
        for block in self.blocks:
            assert isinstance(block, Block)
            block.attention.qkv = ColumnLinear(h, 3 * h // world)
            block.attention.out = RowLinear(h // world, h)
            block.mlp.up = ColumnLinear(h, 4 * h // world)
            block.mlp.down = RowLinear(4 * h // world, h)
        if split_vocabulary:
            self.embedding = VocabularyEmbedding(workload.vocab, h, rank, world)
            self.head = ColumnLinear(h, workload.vocab // world, bias=False)
        self.to_empty(device="cpu")


#: class -> the dim in which its weight is split, and whether its bias is
_SPLIT = {VocabularyEmbedding: (0, False), ColumnLinear: (0, True), RowLinear: (1, False)}


def _split_dims(model: nn.Module) -> dict[str, int]:
    """Name -> dim of every parameter of which a rank holds a part."""
    dims: dict[str, int] = {}
    for name, module in model.named_modules():
        dim, splits_bias = _SPLIT.get(type(module), (None, False))
        if dim is not None:
            dims[f"{name}.weight"] = dim
            if splits_bias:
                dims[f"{name}.bias"] = 0
    return dims


class MegatronCase:
    """Every rank sees the whole batch; the norm counts each element once with one small all-reduce."""

    def __init__(self, workload: Workload, rank: int, world: int, *, split_vocabulary: bool = True) -> None:
        self.model = MegatronGPT(workload, rank, world, split_vocabulary)
        dims = _split_dims(self.model)
        local: State = {}
        for name, value in fuse_qkv(workload.state(), interleave=world).items():
            local[name] = value.chunk(world, dims[name])[rank] if name in dims else value
        self.model.load_state_dict(local)
        named = dict(self.model.named_parameters())
        self.params = list(named.values())
        self.split = [param for name, param in named.items() if name in dims]
        self.replicated = [param for name, param in named.items() if name not in dims]
        self.optimizer = torch.optim.AdamW(self.params, lr=LEARNING_RATE, fused=True)
        self.batches = workload.batches()
        self.start = rank * workload.vocab // world
        self.split_vocabulary = split_vocabulary

    def step(self, index: int) -> tuple[float, float]:
        ids, labels = self.batches[index % len(self.batches)]
        self.optimizer.zero_grad(set_to_none=True)
        loss = self._loss(self.model(ids), labels)
        loss.backward()
        norm = self._clip()
        self.optimizer.step()
        return loss.item(), norm.item()

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.split_vocabulary:
            return loss_of(logits, labels)
        total: Tensor = _VocabularyCrossEntropy.apply(logits.flatten(0, 1), labels.flatten(), self.start)
        return total / labels.numel()

    def _clip(self) -> Tensor:
        square = _square(self.split)
        work = dist.all_reduce(square, async_op=True)
        replicated = _square(self.replicated)
        work.wait()
        norm = (square + replicated).sqrt()
        torch.nn.utils.clip_grads_with_norm_(self.params, CLIP_NORM, norm)
        return norm


def _square(params: list[nn.Parameter]) -> Tensor:
    grads = [param.grad for param in params if param.grad is not None]
    return torch.nn.utils.get_total_norm(grads).square()
