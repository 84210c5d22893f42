"""A run of two ranks that is over in a moment, which meets TROUBLES, ``kind@moment`` one after the other, each once:
see `helpers.restart_faults`."""

import errno
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from colossus import layers
from colossus.checkpoint import part
from colossus.engine import Hook

_RANK = os.environ.get("RANK")
_TROUBLES = [tuple(word.split("@")) for word in os.environ.get("TROUBLES", "").split()]
_IS_FIRST_ATTEMPT = os.environ.get("TORCHELASTIC_RESTART_COUNT") == "0"
_MEMORY = os.environ.get("COLOSSUS_MEMORY")
if _RANK is not None:
    Path(f"pid-{_RANK}-{os.getpid()}").write_text(str(os.getpid()))


def _moment(name: str, rank: str = "1") -> bool:
    """Come by one of the moments: the trouble that is due then happens; whether there was one."""
    met = len(list(Path().glob("met-*")))
    if rank != _RANK or met >= len(_TROUBLES) or _TROUBLES[met][1] != name:
        return False
    if name.isdecimal() and os.environ.get("WAIT_FOR_MEMORY"):
        while not Path(_MEMORY, f"step-{int(name) - 1:08d}").exists():
            time.sleep(0.01)
    Path(f"met-{met}").touch()
    kind = _TROUBLES[met][0]
    if kind == "raise":
        raise ValueError("one step too many")
    if kind == "exit":
        os._exit(3)
    if kind in ("kill", "stop", "term"):
        os.kill(os.getppid() if kind == "term" else os.getpid(), getattr(signal, f"SIG{kind.upper()}"))
    if kind == "orphan":
        launcher = os.getppid()
        os.kill(launcher, signal.SIGKILL)
        while os.getppid() == launcher:  # on a busy machine it dies a while later
            time.sleep(0.01)
    while kind in ("hang", "term"):
        time.sleep(0.1)
    return True


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))
        if split == "train":
            self.values[int(os.environ.get("POISONED", "0"))] *= float(os.environ.get("POISON", "1"))

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(4, 6, split="column"), layers.Linear(6, 4, split="row")
        self.dropout = layers.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return x + self.dropout(self.down(self.up(x).tanh()))


class _Model(nn.Sequential):
    def __init__(self) -> None:
        _moment("constructor")
        super().__init__(_Block(), _Block())

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(batch)


class _Moments(Hook):
    def on_train_start(self, engine: Any) -> None:
        _moment("begin")

    def on_step_start(self, engine: Any) -> None:
        step = engine.completed_steps + 1
        left_out = os.environ.get("LEFT_OUT")  # "4:3": three batches are left out before step 4
        if left_out is not None and left_out.startswith(f"{step}:"):
            engine.loader.set_step(engine.loader.step + int(left_out.split(":")[1]))
        if _TROUBLES and _TROUBLES[0][0] == "flip":
            if _moment(str(step)):
                with torch.no_grad():
                    [*engine.model.parameters()][-1].view(-1)[0] += 1.0  # a bias, of which tensor ranks have copies
        else:
            _moment(str(step))


def _write_file(path: Path, *arguments: Any) -> int:
    """In memory or on the disk: a save during which the rank dies, and a disk that is full until there is a restart."""
    if "checkpoints" in path.parts and _IS_FIRST_ATTEMPT and os.environ.get("DISK") == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    _moment("save")
    return _write(path, *arguments)


def _damage(how: str) -> None:
    """What became of the newest checkpoint in memory before the ranks were started again."""
    newest = max(Path(_MEMORY).glob("step-*"))
    file = max(newest.glob("rank-*.safetensors"))
    if how == "flip":
        file.write_bytes(file.read_bytes()[:-1] + bytes([file.read_bytes()[-1] ^ 1]))
    elif how == "remove":
        file.unlink()
    else:
        for path in itertools.chain(*(step.iterdir() for step in Path(_MEMORY).glob("step-*"))):
            path.write_bytes(b"")


if _RANK is not None:
    _write, part.write_file = part.write_file, _write_file
    if "DAMAGE" in os.environ and _RANK == "0" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
        _damage(os.environ["DAMAGE"])

hooks = [_Moments]
parallel = dict(data=2)
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="AdamW", lr=0.01)
schedule = dict(type="1f1b", microbatches=2)
train = dict(steps=8, global_batch_size=8, log_every=2)
checkpoint = dict(every=3, background=False)
comm = dict(timeout_seconds=20.0)
