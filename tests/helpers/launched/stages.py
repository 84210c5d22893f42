"""A pipeline of two ranks that is over in a moment, with trouble on rank 1 in step 3 when TROUBLE says so."""

import os
import signal
import time

import torch
from torch import nn

_CALLS_PER_STEP = 4


class _Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), index / 64)


class _Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2 * _CALLS_PER_STEP + 2:
            _trouble(os.environ.get("TROUBLE"))
        return self.layer(x)


def _trouble(kind: str | None) -> None:
    if kind == "raise":
        raise ArithmeticError("the block of stage 1 has failed")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        while True:
            time.sleep(0.1)


class _Model(nn.Sequential):
    def __init__(self, blocks: int = 2) -> None:
        super().__init__(nn.Linear(4, 3), *(nn.Tanh() for _ in range(blocks - 2)), _Last())

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.square().sum(), len(batch)


def _circle(stages: int, microbatches: int) -> list:
    """A schedule in which the backward of the last stage waits for that of the first."""
    from colossus.schedule.actions import Action

    own = [[Action("forward", stage, index) for index in range(microbatches)] for stage in range(stages)]
    for index in range(microbatches):
        own[0].insert(0, Action("backward", 0, index))
        own[1].append(Action("backward", 1, index))
    return own


if os.environ.get("CIRCLE"):
    schedule = dict(type=_circle, microbatches=4)
else:
    schedule = dict(type="1f1b", microbatches=4)
parallel = dict(pipeline=2)
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="SGD", lr=0.01)
train = dict(steps=5, global_batch_size=8, log_every=1)
comm = dict(timeout_seconds=3.0)
