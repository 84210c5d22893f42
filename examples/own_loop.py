"""A training loop of your own: your optimizer, your evaluation, your log. Any plan trains the same network:

python examples/own_loop.py
torchrun --nproc-per-node 4 examples/own_loop.py parallel.tensor.mode=2d parallel.tensor.size=4
torchrun --nproc-per-node 4 examples/own_loop.py parallel.pipeline=2 schedule.microbatches=4 log=/tmp/loss.jsonl
"""

import json
import sys
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import colossus
from colossus import layers

CONFIG = dict(
    train=dict(steps=80, global_batch_size=64, clip_grad_norm=1.0, eval_batches=8),
    lr_schedule=dict(type="cosine", warmup_steps=10),
    schedule=dict(microbatches=2),  # without a pipeline: gradients of 2 x 32 samples are accumulated for each step
)


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(32)
        self.up, self.down = layers.Linear(32, 128, split="column"), layers.Linear(128, 32, split="row")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Net(torch.nn.Sequential):
    """A chain, so that a pipeline can cut it."""

    def __init__(self) -> None:
        super().__init__(Block(), Block(), layers.Linear(32, 10))


def loss_fn(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    _, labels = batch
    return F.cross_entropy(outputs, labels, reduction="sum"), labels.numel()


def make_optimizer(named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """AdamW without weight decay of biases and norms. A rank of a pipeline is given the parameters of its stage."""
    decayed = [param for _, param in named if param.ndim > 1]
    others = [param for _, param in named if param.ndim <= 1]
    groups = [dict(params=decayed, weight_decay=0.1), dict(params=others, weight_decay=0.0)]
    return torch.optim.AdamW(groups, lr=3e-3, fused=True)


def make_dataset(split: str = "train") -> TensorDataset:
    """Ten noisy clusters; called for "train" and for "validation"."""
    samples, seed = (4096, 1) if split == "train" else (512, 2)
    centres = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (samples,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(samples, 32, generator=generator), labels)


def main() -> None:
    if {"-h", "--help"} & {*sys.argv}:
        print(__doc__)
        return
    log = next((Path(word[4:]) for word in sys.argv[1:] if word.startswith("log=")), None)
    engine = colossus.initialize(
        CONFIG,
        model=Net,
        loss_fn=loss_fn,
        data=make_dataset,
        optimizer=make_optimizer,
        overrides=[word for word in sys.argv[1:] if not word.startswith("log=")],
    )
    begin = time.perf_counter()
    for batch in engine.loader:  # this data rank's share of each global batch, without end
        result = engine.train_step(batch)
        row = dict(step=result.step, loss=result.loss, norm=result.grad_norm, lr=result.lr)
        if result.step % 20 == 0:
            row["validation"] = engine.evaluate().loss  # called on all ranks, which have a part of the samples each
        if engine.context.is_logging_rank:
            row["seconds"] = round(time.perf_counter() - begin, 3)
            if log is not None:
                with log.open("a") as file:
                    file.write(json.dumps(row) + "\n")
            if "validation" in row:
                print(
                    "step {step}: loss {loss:.6f}, validation {validation:.6f}, lr {lr:.2e}".format(**row), flush=True
                )
        if result.step == engine.config.train.steps:
            break
    engine.close()


if __name__ == "__main__":
    main()
