"""A model and a loop of your own. Any plan trains the same network:

python examples/own_model.py
torchrun --nproc-per-node 4 examples/own_model.py parallel.tensor=2
"""

import sys

import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import colossus
from colossus import layers


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(32, 128)  # torch.nn.Linear(32, 128)
        self.norm = torch.nn.LayerNorm(128)  # plain modules stay as they are
        self.down = layers.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(F.gelu(self.up(x))))


def loss_fn(outputs: torch.Tensor, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    _, labels = batch
    return F.cross_entropy(outputs, labels, reduction="sum"), labels.numel()


def make_dataset() -> TensorDataset:
    """Ten noisy clusters."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 32, generator=generator)
    labels = torch.randint(0, 10, (4096,), generator=generator)
    return TensorDataset(centres[labels] + torch.randn(4096, 32, generator=generator), labels)


def main() -> None:
    config = dict(
        train=dict(steps=60, global_batch_size=64, clip_grad_norm=1.0),
        optimizer=dict(type="AdamW", lr=3e-3),
    )
    engine = colossus.initialize(config, model=Net, loss_fn=loss_fn, data=make_dataset(), overrides=sys.argv[1:])
    for batch in engine.loader:
        result = engine.train_step(batch)
        if engine.context.is_logging_rank and result.step % 20 == 0:
            print(f"step {result.step}: loss {result.loss:.6f}, gradient norm {result.grad_norm:.6f}", flush=True)
        if result.step == engine.config.train.steps:
            break
    engine.close()


if __name__ == "__main__":
    main()
