"""A run that is over in a moment, in which the rank CULPRIT meets FAULT at MOMENT; see `helpers.faults`."""

import os
import resource
import signal
import sys
import time
from pathlib import Path

import torch
import torch.fx.experimental.symbolic_shapes  # torch's first backward does, for a second in each forked rank
from torch import Tensor, nn

from colossus import layers
from colossus.engine import Hook

_FOLDER = Path(os.environ["FAULT_FOLDER"])
_RANK = os.environ.get("RANK")
if _RANK is not None:
    (_FOLDER / f"pid-{_RANK}").write_text(str(os.getpid()))

_SIGNALS = {"term": signal.SIGTERM, "int": signal.SIGINT, "kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _moment(name: str) -> None:
    """Come by one of the moments; the fault happens once, but for data that cannot be read."""
    injected = _FOLDER / "injected"
    if name != os.environ.get("MOMENT") or os.environ["CULPRIT"] != _RANK:
        return
    # data that cannot be read stays so: what compares it with that of other ranks reads it first, and goes on
    if injected.exists() and not (name == "data" and os.environ["FAULT"] in ("exception", "memory")):
        return
    injected.write_text(str(time.time()))
    fault = os.environ["FAULT"]
    kind, _, target = fault.partition("-")
    if fault == "exception":
        raise ValueError("injected")
    if fault == "memory":
        raise MemoryError("injected")
    if fault == "exit0":
        os._exit(0)
    if fault == "exit1":
        os._exit(1)
    if fault == "sysexit":
        sys.exit(0)
    if fault == "disk":  # no file can grow any more, as on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
    if kind == "hang":
        while True:
            time.sleep(0.1)
    if target == "launcher":
        launcher = os.getppid()
        os.kill(launcher, _SIGNALS[kind])
        while kind == "kill" and os.getppid() == launcher:  # on a busy machine it dies a while later
            time.sleep(0.01)
    elif target == "group":  # what a terminal does
        os.killpg(os.getpgid(os.getppid()), _SIGNALS[kind])
    elif kind in _SIGNALS:
        os.kill(os.getpid(), _SIGNALS[kind])


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        _moment("data")
        return self.values[index]


class _Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        _moment("backward")
        return grad


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(4, 6, split="column"), layers.Linear(6, 4, split="row")

    def forward(self, x: Tensor) -> Tensor:
        _moment("forward" if self.training else "evaluation")
        time.sleep(0.01)
        y = x + self.down(self.up(x).tanh())
        return _Backward.apply(y) if self.training else y


class _Model(nn.Sequential):
    def __init__(self) -> None:
        _moment("constructor")
        super().__init__(_Block(), _Block())

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(batch)


class _Moments(Hook):
    def on_step_end(self, engine: object, result: object) -> None:
        _moment("between steps")

    def on_train_end(self, engine: object) -> None:
        _moment("close")


hooks = [_Moments]
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="SGD", lr=0.01)
schedule = dict(type="1f1b", microbatches=2)
train = dict(steps=12, global_batch_size=8, eval_every=2, eval_batches=1, log_every=100)
