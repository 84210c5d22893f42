"""A run of two ranks beside servers that they do not use, so that the launcher is seen alone. When SIGNAL says
"1:9", rank 0 sends that server that signal after step 3; ranks that DEATHS names ("2:5 0:9", rank and step) kill
themselves."""

import os
import signal
import time
from typing import Any

import torch

from colossus.data_parallel.options.strategy_options import Count, PerReplicaOptions
from colossus.data_parallel.per_replica import PerReplica
from colossus.engine import Hook
from colossus.registry import STRATEGIES
from colossus.server.process import read_environment


class ServedOptions(PerReplicaOptions):
    servers: Count | None = 2


@STRATEGIES.register("served", options=ServedOptions)
class Served(PerReplica):
    """Replicas that train alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__(ServedOptions(**options))


class _Numbers(torch.utils.data.Dataset):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index]


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        return self.layer(inputs)

    def loss(self, outputs: torch.Tensor, batch: torch.Tensor) -> tuple[torch.Tensor, int]:
        return outputs.square().sum(), len(batch)


class _Signals(Hook):
    def on_step_end(self, engine: object, result: object) -> None:
        order = os.environ.get("SIGNAL")
        if order and result.step == 3 and os.environ["RANK"] == "0":
            index, signum = map(int, order.split(":"))
            endpoints, _ = read_environment()
            os.kill(endpoints[index]["process"], signum)
        for death in os.environ.get("DEATHS", "").split():
            if death == f"{os.environ['RANK']}:{result.step}":
                os.kill(os.getpid(), signal.SIGKILL)


hooks = [_Signals]
parallel = dict(data=2, strategy="served")
model = dict(type=_Model)
data = dict(type=_Numbers)
optimizer = dict(type="SGD", lr=0.1)
train = dict(steps=5, global_batch_size=4, eval_every=2, eval_batches=2, log_every=2)
comm = dict(timeout_seconds=20.0)
