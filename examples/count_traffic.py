"""What a perceptron 512 -> 2048 -> 512 sends in each tensor mode: two lone linears, a pair, a pair between blocks.

torchrun --nproc-per-node 8 examples/count_traffic.py
"""

import os
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import colossus
from colossus.comm import accounting
from colossus.layers import Linear, to_residual, to_whole

PLANS = {
    "1d": dict(mode="1d", size=8),
    "1d, sequence_sharded": dict(mode="1d", size=8, sequence_sharded=True),
    'the same, gathered="keep"': dict(mode="1d", size=8, sequence_sharded=True, gathered="keep"),
    "2d, 2 x 4": dict(mode="2d", shape=(2, 4)),
    "2.5d, 2 x 2 x 2": dict(mode="2.5d", size=8, depth=2),
    "3d, 2 x 2 x 2": dict(mode="3d", size=8),
}
KINDS = ("lone", "pair", "pair between blocks")


class Net(nn.Module):
    """x + down(gelu(up(x))), x [batch, tokens, 512]."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up = Linear(512, 2048, split=None if kind == "lone" else "column")
        self.down = Linear(2048, 512, split=None if kind == "lone" else "row")

    def forward(self, x: Tensor) -> Tensor:
        x = x.requires_grad_()  # as from a layer before this one
        if self.kind != "pair between blocks":
            return x + self.down(F.gelu(self.up(x)))
        x = to_residual(x, self.up.parallel)
        return to_whole(x + self.down(F.gelu(self.up(x))))


def loss_fn(outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
    return outputs.square().sum(), outputs.numel()


def count(tensor: dict[str, object], kind: str) -> tuple[int, float]:
    """Collectives that rank 0 starts in one train step, and the megabytes that it sends in them."""
    config = dict(parallel=dict(tensor=tensor), train=dict(global_batch_size=16), device="cpu")
    engine = colossus.initialize(config, model=lambda: Net(kind), loss_fn=loss_fn)
    batch = torch.ones(16, 128, 512)
    with accounting.count() as moved:
        engine.train_step(batch)
    with accounting.count() as ends:  # a stack of blocks enters and leaves its layout once: not the pair's
        if kind == "pair between blocks":
            x = engine.inputs.local(batch).requires_grad_()
            to_whole(to_residual(x, engine.model.up.parallel)).sum().backward()
    engine.close()
    return moved.calls() - ends.calls(), (moved.bytes() - ends.bytes()) / 1e6


def table() -> Iterator[str]:
    """Rows in markdown; every rank takes them."""
    yield f"| mode | {' | '.join(KINDS)} |"
    yield "|---" * (1 + len(KINDS)) + "|"
    for name, tensor in PLANS.items():
        cells = (count(tensor, kind) for kind in KINDS)
        yield f"| {name} | {' | '.join(f'{sent:.1f} MB, {calls} calls' for calls, sent in cells)} |"


if __name__ == "__main__":
    for line in table():
        if os.environ.get("RANK") == "0":
            print(line, flush=True)
