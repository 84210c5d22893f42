"""What a run consists of."""

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
    """What gives its state, and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Watch(Stateful, Protocol):
    """A watch on each step, which may learn late what an accelerator has found."""

    def settle(self) -> None: ...


@dataclass
class Run:
    """The parts of a run that have a state, and how far it is. An engine has one and moves it on; checkpoints save it.

    Attributes:
        gradient_watch: counts the steps that were skipped.
        loss_scaler: of fp16, else None.
        completed_steps: optimizer steps done.
        rolled_back: when batches were left out the last time, in seconds since the epoch; 0: never.
        folder: where the launcher keeps what this run writes; None outside of a launch.
        stop: this rank's request to stop (`results.addend`); 0 for none.
        owes_evaluation: one is due after the last step, and is not complete: under way, or left out because of a stop.
        is_resumed: it was taken from a checkpoint, and no step has run since.
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
