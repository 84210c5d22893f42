"""A run in which the ranks that DEATHS names ("2:5 0:9", rank and step) kill themselves after a step, or raise, and
the one that DIES_IN_EVALUATION names in the first one."""

import os
import signal
import time

import torch
from torch import Tensor, nn

from colossus import layers
from colossus.engine import Hook

_TRUTH = torch.linspace(-1.0, 1.0, 5)


class _Line(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.x = torch.randn(96, 5, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.x[index] @ _TRUTH


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(5, 6, split="column"), layers.Linear(6, 1, split="row")

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled() and os.environ.get("DIES_IN_EVALUATION") == os.environ["RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(float(os.environ.get("STEP_SECONDS", "0.01")))
        return self.down(self.up(x))

    def loss(self, outputs: Tensor, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, int]:
        return (outputs[:, 0] - batch[1]).square().sum(), len(batch[1])


class _Dies(Hook):
    def __init__(self) -> None:
        told = os.environ.get("DEATHS", "").split()
        self.deaths = [tuple(map(int, death.split(":"))) for death in told]

    def on_step_end(self, engine: object, result: object) -> None:
        if os.environ["RANK"] == "0" and str(result.step) == os.environ.get("STOP"):
            os.kill(os.getppid(), signal.SIGTERM)
        if (int(os.environ["RANK"]), result.step) in self.deaths:
            if os.environ.get("DEATH", "kill") == "raise":
                raise ValueError("one of them has had enough")
            os.kill(os.getpid(), signal.SIGKILL)

    def on_eval_end(self, engine: object, summary: object) -> None:
        if engine.context.is_logging_rank:
            print(f"validation {summary.step} {summary.loss:.8f}", flush=True)


hooks = [_Dies]
parallel = dict(data=4, strategy=dict(type="sgp", on_death="continue"))
model = dict(type=_Model)
data = dict(type=_Line)
optimizer = dict(type="SGD", lr=0.05)
train = dict(steps=40, global_batch_size=16, eval_every=20, eval_batches=2, log_every=10, precision="fp64")
comm = dict(timeout_seconds=20.0)
