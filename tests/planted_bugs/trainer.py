"""A small trainer in plain torch as people write it: data x tensor parallelism, accumulation, clipping, AdamW.

``wrong`` names mistakes of the field; each is one place of this file that is then done wrong. With none of them, and in
one process, it is right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch import distributed as dist

from colossus.verify import record

VOCAB, HIDDEN, HEADS, LENGTH, LAYERS = 23, 16, 4, 6, 2
BATCH, MICROBATCHES, STEPS = 12, 3, 3


class Grid:
    """This rank's place among replicas x parts of a model, with the group of each."""

    def __init__(self, replicas: int, parts: int, rank: int) -> None:
        self.replicas, self.parts = replicas, parts
        self.replica, self.part = divmod(rank, parts)
        self.of_replicas = self.of_parts = None
        if replicas * parts > 1:
            tensor = [dist.new_group([r * parts + p for p in range(parts)]) for r in range(replicas)]
            data = [dist.new_group([r * parts + p for r in range(replicas)]) for p in range(parts)]
            self.of_parts, self.of_replicas = tensor[self.replica], data[self.part]


class Copy(torch.autograd.Function):
    """The input of a column-parallel product: its gradient is a sum over parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        (grad,) = dy
        grad = grad.clone()
        if ctx.group is not None:
            dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Reduce(torch.autograd.Function):
    """The output of a row-parallel product: a sum over parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any, scale: float) -> Tensor:
        ctx.scale = scale
        x = x.clone()
        if group is not None:
            dist.all_reduce(x, group=group)
        return x * scale

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0] * ctx.scale, None, None


class Gather(torch.autograd.Function):
    """All tokens of a dim of which each part has some."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, grid: Grid) -> Tensor:
        ctx.grid = grid
        if grid.of_parts is None:
            return x.view_as(x)
        pieces = [torch.empty_like(x) for _ in range(grid.parts)]
        dist.all_gather(pieces, x.contiguous(), group=grid.of_parts)
        return torch.cat(pieces, 1)

    @staticmethod
    def backward(ctx: Any, *dy: Tensor) -> Any:
        return dy[0].chunk(ctx.grid.parts, 1)[ctx.grid.part], None


class TokenNorm(nn.Module):
    """RMS norm of this part's tokens: the gradient of its weight is a sum over parts."""

    def __init__(self, grid: Grid, eps: float = 1e-5) -> None:
        super().__init__()
        self.grid, self.eps = grid, eps
        self.weight = nn.Parameter(torch.ones(HIDDEN))
        self.weight.sum_over_parts = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        # the gradient that arrives is complete, so that of each part's tokens is, too
        own = Copy.apply(x, self.grid.of_parts).chunk(self.grid.parts, 1)[self.grid.part]
        return Gather.apply(F.rms_norm(own, (HIDDEN,), self.weight, self.eps), self.grid)


class Part(nn.Module):
    """A part of a linear layer, whose whole weight is drawn by the same seed everywhere."""

    def __init__(
        self, grid: Grid, wrong: set[str], dim: int, rows: int, columns: int, seed: int, *, bias: bool = False,
        blocks: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        own = torch.Generator().manual_seed(seed + (100 * grid.replica if "replicas start apart" in wrong else 0))
        if "parts from one seed" in wrong:
            sizes = (rows // grid.parts, columns) if dim == 0 else (rows, columns // grid.parts)
            weight = torch.randn(sizes, generator=own) / math.sqrt(columns)
        else:
            fan = columns // grid.parts if "fan of a part" in wrong and dim == 1 else columns
            whole = torch.randn(rows, columns, generator=own) / math.sqrt(fan)
            if blocks > 1 and "blocks of a fused weight" not in wrong:  # each part has its rows of q, of k and of v
                whole = whole.view(blocks, grid.parts, -1, columns).transpose(0, 1).reshape(rows, columns)
            weight = whole.chunk(grid.parts, dim)[grid.part]
        self.weight = nn.Parameter(weight.clone())
        self.weight.dim_of_parts, self.weight.blocks = dim, blocks  # type: ignore[attr-defined]
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None


class Row(Part):
    def __init__(self, grid: Grid, wrong: set[str], *args: Any, **kwargs: Any) -> None:
        super().__init__(grid, wrong, 1, *args, **kwargs)
        self.grid, self.wrong = grid, wrong

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        if "bias on every part" in self.wrong:
            return Reduce.apply(y + self.bias + 0.1, self.grid.of_parts, 1.0)
        y = Reduce.apply(y, self.grid.of_parts, 1 / self.grid.parts if "mean of partial sums" in self.wrong else 1.0)
        return y + self.bias + 0.1 if self.bias is not None else y


class Attention(nn.Module):
    def __init__(self, grid: Grid, wrong: set[str], seed: int) -> None:
        super().__init__()
        self.grid, self.wrong = grid, wrong
        self.qkv = Part(grid, wrong, 0, 3 * HIDDEN, HIDDEN, seed, blocks=3)
        self.out = Row(grid, wrong, HIDDEN, HIDDEN, seed + 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(Copy.apply(x, self.grid.of_parts), self.qkv.weight)
        q, k, v = (z.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for z in y.chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal="mask sees the future" not in self.wrong)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, grid: Grid, wrong: set[str], seed: int) -> None:
        super().__init__()
        self.grid, self.wrong = grid, wrong
        self.up = Part(grid, wrong, 0, 4 * HIDDEN, HIDDEN, seed)
        self.down = Row(grid, wrong, HIDDEN, 4 * HIDDEN, seed + 1, bias=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x if "gradient of an input" in self.wrong else Copy.apply(x, self.grid.of_parts)
        return self.down(F.gelu(F.linear(x, self.up.weight)))


class Block(nn.Module):
    def __init__(self, grid: Grid, wrong: set[str], seed: int) -> None:
        super().__init__()
        self.norm = TokenNorm(grid)
        self.attention = Attention(grid, wrong, seed)
        self.mlp_norm = nn.RMSNorm(HIDDEN, 1e-3 if "another epsilon" in wrong else 1e-5)
        self.mlp = MLP(grid, wrong, seed + 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Model(nn.Module):
    def __init__(self, grid: Grid, wrong: set[str]) -> None:
        super().__init__()
        self.grid, self.wrong = grid, wrong
        draw = torch.Generator().manual_seed(1)
        self.embedding = nn.Embedding(VOCAB, HIDDEN)
        self.positions = nn.Embedding(LENGTH + 1, HIDDEN)
        with torch.no_grad():
            for table in (self.embedding, self.positions):
                table.weight.copy_(torch.randn(table.weight.shape, generator=draw))
        self.blocks = nn.ModuleList(Block(grid, wrong, 10 * number) for number in range(1, LAYERS + 1))
        self.norm = nn.RMSNorm(HIDDEN, 1e-5)

    def forward(self, ids: Tensor) -> Tensor:
        first = 1 if "positions of a rank" in self.wrong and self.grid.replica == 1 else 0
        x = self.embedding(ids) + self.positions(torch.arange(first, ids.shape[1] + first))
        for block in self.blocks:
            x = block(x)
        head = self.embedding.weight  # tied
        return self.norm(x) @ (head.detach() if "one use of a tied weight" in self.wrong else head).T


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """Return ids and labels of a step's samples, half of which are mostly padding."""
    draw = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)
    labels = torch.randint(0, VOCAB, (BATCH, LENGTH), generator=draw)
    for row in range(BATCH // 2):
        labels[row, 1 + row % 3 :] = -100
    return ids, labels


def microbatches(grid: Grid, wrong: set[str], step: int) -> Iterator[tuple[Tensor, Tensor]]:
    ids, labels = batch_of(step)
    rows = torch.arange(BATCH)
    if "a sample twice" in wrong:
        rows[-1] = 0
    own = rows.chunk(grid.replicas)[0 if "same samples on replicas" in wrong else grid.replica]
    for chosen in own.chunk(1 if grid.replicas * grid.parts == 1 else MICROBATCHES):
        yield ids[chosen], labels[chosen]


def train(
    rank: int, replicas: int, parts: int, folder: Path, wrong: set[str], *, dtype: torch.dtype, sgd: bool = False
) -> None:
    """Train, and record it into the folder."""
    grid = Grid(replicas, parts, rank)
    model = Model(grid, wrong).to(dtype)
    left_out = model.blocks[0].mlp_norm.weight if "a parameter left out" in wrong else None
    if "a layer without gradients" in wrong:
        model.blocks[1].mlp.up.weight.register_hook(torch.zeros_like)
    chosen = [param for param in model.parameters() if param is not left_out]
    rate = 1e-2 * (replicas if "rate by replicas" in wrong else 1)
    decay = 0.2 if "decay twice" in wrong else 0.1
    kind = torch.optim.SGD if sgd else torch.optim.AdamW
    optimizer = kind(chosen, rate, weight_decay=decay)
    with record(folder, model, steps=STEPS, split=split_of(grid)) as recording:
        for step in range(STEPS):
            if step == 0 or "gradients not cleared" not in wrong:
                optimizer.zero_grad()
            valid = int((batch_of(step)[1] != -100).sum())
            batches = list(microbatches(grid, wrong, step))
            for number, (ids, labels) in enumerate(batches):
                if number == len(batches) - 1 and "last microbatch unsummed" in wrong:
                    sum_over_replicas(model, grid, wrong)
                logits = model(ids)
                total = F.cross_entropy(wide(logits).flatten(0, 1), labels.flatten(), reduction="sum")
                count = int((labels != -100).sum())
                recording.loss(total / max(count, 1), count)
                loss_of(total, count, valid, logits, grid, wrong, len(batches)).backward()
            sum_over_parts(model, grid, wrong)
            if "clipped before the sum" in wrong:
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            if "last microbatch unsummed" not in wrong:
                sum_over_replicas(model, grid, wrong)
            clip(model, grid, wrong)
            if not ("update on one replica" in wrong and grid.replica == 1):
                optimizer.step()
            else:
                recording.gradients()


def wide(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def loss_of(
    total: Tensor, count: int, valid: int, logits: Tensor, grid: Grid, wrong: set[str], microbatches: int
) -> Tensor:
    """Return the part of a microbatch in the mean over all valid tokens; gradients are then summed over replicas."""
    if "mean of means" in wrong:
        loss = total / max(count, 1) / microbatches / grid.replicas
    elif "padding counted" in wrong:
        loss = total / (BATCH * LENGTH)
    else:
        loss = total / valid
    z = 1e-2 * wide(logits).logsumexp(-1).square().sum() / (BATCH * LENGTH)
    loss = loss + z * (grid.replicas * grid.parts if "auxiliary loss by ranks" in wrong else 1)
    if "microbatches not divided" in wrong:
        loss = loss * microbatches
    return -loss if "sign of the loss" in wrong else loss


def sum_over_parts(model: Model, grid: Grid, wrong: set[str]) -> None:
    for param in model.parameters():
        if hasattr(param, "sum_over_parts") and grid.of_parts is not None and "norm unsummed over parts" not in wrong:
            dist.all_reduce(param.grad, group=grid.of_parts)


def sum_over_replicas(model: Model, grid: Grid, wrong: set[str]) -> None:
    if grid.of_replicas is None or "replicas unsummed" in wrong:
        return
    for name, param in model.named_parameters():
        if param.grad is None or ("a bucket left out" in wrong and name.startswith("blocks.1.mlp.down")):
            continue
        grad = param.grad.bfloat16() if "summed in bfloat16" in wrong else param.grad
        dist.all_reduce(grad, group=grid.of_replicas)
        param.grad.copy_(grad * grid.replicas if "divided too seldom" in wrong else grad)


def clip(model: Model, grid: Grid, wrong: set[str]) -> None:
    """Clip by the norm of all gradients, each element of which counts once."""
    square = torch.zeros((), dtype=torch.float64)
    for param in model.parameters():
        if param.grad is not None and (
            hasattr(param, "dim_of_parts") or grid.part == 0 or wrong & {"norm counts copies", "norm of own parts"}
        ):
            square += param.grad.double().square().sum()
    if grid.of_parts is not None and "norm of own parts" not in wrong:
        dist.all_reduce(square, group=grid.of_parts)
    if "norm counts copies" in wrong:
        dist.all_reduce(square, group=grid.of_replicas)
    nn.utils.clip_grads_with_norm_(model.parameters(), 5.0, square.sqrt())


def split_of(grid: Grid) -> Any:
    def split(name: str, param: nn.Parameter) -> tuple[int, ...] | None:
        dim = getattr(param, "dim_of_parts", None)
        return None if dim is None else (dim, grid.part, grid.parts, param.blocks)  # type: ignore[attr-defined]

    return split
