"""A run of two ranks whose steps take a moment; before step AT rank 1 meets TROUBLE, in the first TIMES attempts."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from colossus import layers
from colossus.engine import Hook

_TROUBLED = os.environ.get("RANK") == "1"
if "RANK" in os.environ:
    Path(f"pid-{os.environ['RANK']}-{os.getpid()}").write_text(str(os.getpid()))


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.dropout, self.down = layers.Linear(4, 6), layers.Dropout(0.2), layers.Linear(6, 2)
        if os.environ.get("AT") == "0":
            _meet_trouble()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return self.down(self.dropout(self.up(inputs).tanh()))

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.square().sum(), len(batch)


def _meet_trouble() -> None:
    met = len(list(Path().glob("met-*")))
    if not _TROUBLED or met >= int(os.environ.get("TIMES", "1")):
        return
    Path(f"met-{met}").touch()
    kind = os.environ["TROUBLE"]
    if kind == "raise":
        raise ValueError("one step too many")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(3)
    while True:
        time.sleep(0.1)


class _Trouble(Hook):
    def on_step_start(self, engine: Any) -> None:
        if os.environ.get("AT") == str(engine.completed_steps + 1):
            _meet_trouble()


hooks = [_Trouble]
parallel = dict(data=2)
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="AdamW", lr=0.01)
train = dict(steps=8, global_batch_size=4, log_every=2)
checkpoint = dict(every=3, background=False)
comm = dict(timeout_seconds=20.0)
