"""A small run that is saved, and others that go on with it: what they see, what they are told."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn
from torch.utils.data import Dataset

import colossus
from colossus import layers
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import name_of
from colossus.engine.fit import Hook
from colossus.layout.split_parameter import as_shards

WIDTH, CLASSES = 6, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(WIDTH, 8, split="column"), layers.Linear(8, CLASSES, split="row")
        self.norm = nn.LayerNorm(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.up(x).tanh()))


def classify(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
    return nn.functional.cross_entropy(outputs, batch["labels"], reduction="sum"), len(outputs)


def uneven(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """`classify` where replicas train on other numbers of tokens, by which averages and sums weigh them."""
    counted = batch["labels"] > 1
    return (nn.functional.cross_entropy(outputs, batch["labels"], reduction="none") * counted).sum(), counted.sum()


class Vectors(Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"inputs": torch.randn(WIDTH, generator=generator), "labels": torch.tensor(index % CLASSES)}


class OwnBatches:
    """A loader of one's own that gives each data rank its own batches, and knows its place."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size, self.next = rank, size, 0

    def __iter__(self) -> Iterator[Any]:
        part = 8 // self.size
        while True:
            first = (8 * self.next + part * self.rank) % 32
            self.next += 1
            samples = [Vectors()[index] for index in range(first, first + part)]
            yield {key: torch.stack([each[key] for each in samples]) for key in samples[0]}

    def state_dict(self) -> dict[str, Any]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next = state["next"]


def own_batches(data_rank: int, data_size: int) -> OwnBatches:
    return OwnBatches(data_rank, data_size)


class Listener(logging.Handler):
    """What this rank logs."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


def settings(folder: Path, parallel: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    config: dict[str, Any] = dict(
        parallel=parallel or {},
        train=dict(steps=2, global_batch_size=8, precision="fp64", seed=3),
        optimizer=dict(type="AdamW", lr=1e-2),
        checkpoint=dict(dir=str(folder)),
        device="cpu",
    )
    for key, value in more.items():
        config[key] = {**config.get(key, {}), **value} if isinstance(value, dict) else value
    return config


def engine_of(config: dict[str, Any], data: Any = None, optimizer: Any = None) -> Any:
    if optimizer is not None:
        del config["optimizer"]
    if data is own_batches:
        data = dict(type=own_batches, per_rank=True)
    given = dict(data=Vectors() if data is None else data) | ({} if optimizer is None else dict(optimizer=optimizer))
    return colossus.initialize(config, model=Net, loss_fn=classify, **given)


def save_after(rank: int, steps: int, config: dict[str, Any], hooks: Sequence[Hook] = (), **given: Any) -> list[float]:
    """Body of a rank: train and save."""
    engine = engine_of(config, **given)
    losses = [engine.train_step(next(engine.loader)).loss for _ in range(steps)]
    engine.checkpoints.save().wait()
    engine.close()
    return losses


def saved(folder: Path, steps: int = 2, world: int = 1, parallel: Any = None, given: Any = None, **more: Any) -> Path:
    body = partial(save_after, **(given or {}))
    run_ranks(world, body, steps, settings(folder, parallel, **more), with_context=False)
    return folder / name_of(steps)


def loaded(
    rank: int, path: Path, config: dict[str, Any], look: Callable[[Any], Any], given: dict[str, Any]
) -> tuple[Any, list[str], str]:
    """Body of a rank: what ``look`` sees after a load, what was logged, and what was refused."""
    listener = Listener()
    logging.getLogger("colossus").addHandler(listener)
    engine = engine_of(config, **given)
    before = {name: param.detach().clone() for name, param in engine.model.named_parameters()}
    refused = ""
    try:
        engine.checkpoints.load(path)
    except CheckpointError as error:
        refused = str(error)
        with as_shards():
            assert all(torch.equal(param, before[name]) for name, param in engine.model.named_parameters())
        assert engine.completed_steps == 0
        assert not engine.optimizer.state
    seen = look(engine)
    engine.close()
    return seen, listener.told, refused


def load(
    path: Path,
    config: dict[str, Any],
    look: Callable[[Any], Any] = lambda engine: None,
    world: int = 1,
    **given: Any,
) -> list[tuple[Any, list[str], str]]:
    return run_ranks(world, loaded, path, config, look, given, with_context=False)
