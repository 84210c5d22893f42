"""A run of two data ranks whose steps take a millisecond, with everything that a checkpoint holds."""

from __future__ import annotations

import logging
import random
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import colossus
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook

SAMPLES = 64


class Numbers(torch.utils.data.Dataset[Tensor]):
    def __init__(self, split: str = "train") -> None:
        self.values = torch.randn(SAMPLES, 5, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        return self.values[index]


class Net(torch.nn.Module):
    def __init__(self, width: int = 3, name: str = "second") -> None:
        super().__init__()
        self.first = torch.nn.Linear(5, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.add_module(name, torch.nn.Linear(width, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        last = list(self.children())[-1]
        return last(self.norm(self.first(inputs)))  # type: ignore[no-any-return]

    def loss(self, outputs: Tensor, batch: Tensor) -> tuple[Tensor, int]:
        return outputs.square().sum(), len(batch)


class Counter(Hook):
    """Has state."""

    def __init__(self) -> None:
        self.count = 0

    def on_step_end(self, engine: Engine, result: object) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: Any) -> None:
        self.count = state["count"]


def make_engine(
    root: Path | None, *, steps: int = 6, data: int = 2, model: Any = None, train_data: Any = Numbers, **checkpoint: Any
) -> Engine:
    return colossus.initialize(
        dict(
            parallel=dict(data=data),
            model=model or dict(type=Net),
            data=dict(type=train_data),
            optimizer=dict(type="AdamW", lr=0.01),
            train=dict(steps=steps, global_batch_size=8, seed=1, precision="fp64"),
            checkpoint=dict(dir=str(root) if root else None, **checkpoint),
            comm=dict(timeout_seconds=30.0),
            device="cpu",
        )
    )


def everything(engine: Engine) -> list[Any]:
    """All state of an engine that a load could change, as plain numbers."""
    model = {name: value.tolist() for name, value in engine.model.state_dict().items()}
    optimizer = [
        {name: value.tolist() if isinstance(value, Tensor) else value for name, value in state.items()}
        for state in engine.optimizer.state.values()
    ]
    assert engine.loaders is not None
    hooks = [hook.state_dict() for hook in engine.checkpoints.hooks]
    place = engine.loaders.train.state_dict()
    rng = torch.get_rng_state().tolist(), random.getstate()
    return [engine.completed_steps, model, optimizer, engine.optimizer.param_groups[0]["lr"], hooks, place, rng]


class Lines(logging.Handler):
    """What was logged, for ranks that have no caplog."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        for name in ("colossus.engine", "colossus.checkpoint"):
            logging.getLogger(name).handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")
