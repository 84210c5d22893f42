"""The parts of a run that have a state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from colossus.config import Config
from colossus.context.parallel_context import ParallelContext
from colossus.data.loader import Loaders
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore


class Stateful(Protocol):
    """An object that returns its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Watch(Stateful, Protocol):
    """A watch on each step. Results that an accelerator computes reach it late: `settle` waits for them."""

    def settle(self) -> None: ...


@dataclass
class Run:
    """The parts of a run that have a state, and its progress. An engine owns it and advances it; checkpoints save it.

    Attributes:
        gradient_watch: counts the steps that were skipped.
        loss_scaler: loss scale of fp16, else None.
        completed_steps: optimizer steps done.
        rolled_back: time of the last rollback that left batches out, in seconds since the epoch; 0 for none.
        folder: folder in which the launcher keeps the files of this run; None outside of a launch.
        stop: this rank's request to stop (`results.addend`); 0 for none.
        owes_evaluation: whether the evaluation after the last step is not complete: it runs, or a stop has left it out.
        is_resumed: whether the run was restored from a checkpoint and no step has run since.
    """

    config: Config
    context: ParallelContext
    model: nn.Module
    optimizer: torch.optim.Optimizer
    store: ParameterStore
    strategy: Strategy
    gradient_watch: Watch
    loss_scaler: Stateful | None
    loaders: Loaders | None
    completed_steps: int = 0
    rolled_back: float = 0.0
    folder: Path | None = None
    stop: float = 0.0
    owes_evaluation: bool = False
    is_resumed: bool = False
