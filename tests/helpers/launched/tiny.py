"""A run of two ranks that is over in a moment, with trouble on a rank (1) in step 3 when TROUBLE says so."""

import errno
import os
import signal
import time
from pathlib import Path

import torch

from colossus.comm.peer_gone import PeerGone
from colossus.engine import Hook

_SAMPLES = 64


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(_SAMPLES, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)
        self.calls = 0
        if os.environ.get("TROUBLE") == "slow start" and "RANK" in os.environ:
            Path("building").touch()
            time.sleep(600.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
            if self.calls == 3 and os.environ.get("TROUBLE") == "slow culprit":
                if os.environ["RANK"] == "0":  # a victim, which is faster
                    raise PeerGone("Connection closed by peer")
                time.sleep(0.25)
                raise ValueError("the culprit")
            if self.calls == 3 and os.environ["RANK"] == os.environ.get("TROUBLED_RANK", "1"):
                _trouble(os.environ.get("TROUBLE"))
            if self.calls == 3 and (os.environ["RANK"], os.environ.get("TROUBLE")) == ("1", "nan"):
                inputs = inputs * torch.nan
        return self.layer(inputs)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.square().sum(), len(batch)


def _trouble(kind: str | None) -> None:
    if kind == "raise":
        raise ValueError("the third step is one too many")
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "hang":
        while True:
            time.sleep(0.1)


class _Disk(Hook):
    """Checkpoints of rank 1 are flushed slowly, or not at all."""

    def on_train_start(self, engine: object) -> None:
        fsync, trouble = os.fsync, os.environ.get("TROUBLE")

        def flush(descriptor: int) -> None:
            if trouble == "slow disk":
                time.sleep(2.0)
            if trouble == "full disk":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        if os.environ["RANK"] == "1" and trouble in ("slow disk", "full disk"):
            os.fsync = flush


class _Loaded(Hook):
    """State that takes its time to be loaded."""

    def state_dict(self) -> dict:
        return {"loaded": True}

    def load_state_dict(self, state: dict) -> None:
        if os.environ.get("TROUBLE") == "slow load":
            Path("loading").touch()
            time.sleep(2.0)


class _Linger(Hook):
    def on_train_end(self, engine: object) -> None:
        if os.environ.get("TROUBLE") == "linger" and os.environ["RANK"] == "1":
            time.sleep(1.5)


hooks = [_Linger, _Disk, _Loaded]
parallel = dict(data=2)
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="SGD", lr=0.1)
train = dict(steps=5, global_batch_size=4, eval_every=2, eval_batches=2, log_every=2)
comm = dict(timeout_seconds=20.0)
