"""The parts of a run that have a state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from colossus.checkpoint.weight_sources import GENERATION, Assets, read_assets
from colossus.config import Config
from colossus.config.learning_rates import LearningRates
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.data.loader import Loaders
from colossus.data_parallel.strategy import Strategy
from colossus.data_parallel.zero.parameter_store import ParameterStore
from colossus.state.optimizer import GroupOptions, ParameterState, group_options


class Stateful(Protocol):
    """An object that returns its state and takes it back."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class SavedHook(Stateful, Protocol):
    """The part of a hook that a checkpoint needs."""

    def on_save(self, engine: Any) -> None: ...

    def parameter_state(self) -> ParameterState: ...

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None: ...


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
        on_progress: called from any thread when a part of a checkpoint was written or read, as a sign of life.
        stop: this rank's request to stop (`results.addend`); 0 for none.
        owes_evaluation: whether the evaluation after the last step is not complete: it runs, or a stop has left it out.
        is_resumed: whether the run was restored from a checkpoint and no step has run since.
        hooks: hooks whose state belongs to the run.
        engine: the engine that owns the run, with which hooks are called.
        assets: files and settings that came with the loaded weights, or with the model; on the first rank.
        made_options: options of the optimizer's groups when it was made.
        rates: learning rate of each step.
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
    on_progress: Callable[[], None] = lambda: None
    stop: float = 0.0
    owes_evaluation: bool = False
    is_resumed: bool = False
    hooks: Sequence[SavedHook] = ()
    engine: Any = None
    assets: Assets = field(default_factory=Assets)

    def __post_init__(self) -> None:
        self.made_options: list[GroupOptions] = group_options(self.optimizer)
        self.rates = LearningRates(self.config)
        if self.context.is_logging_rank:
            self.assets = _assets_of_model(self.model)

    @property
    def world(self) -> AxisGroup:
        """The group of all ranks."""
        return self.context.group(self.context.grid.names)


def _assets_of_model(model: Any) -> Assets:
    """Return the assets of a model of transformers: files of its folder, and its generation settings. Else none."""
    folder, settings = getattr(model, "name_or_path", None), getattr(model, "generation_config", None)
    is_folder = isinstance(folder, str) and bool(folder) and Path(folder).is_dir()
    files = dict(read_assets(Path(folder), {}).files) if is_folder else {}  # type: ignore[arg-type]
    is_own = not getattr(settings, "_from_model_config", True) or GENERATION not in files  # else the file says more
    if is_own and hasattr(settings, "to_json_string"):
        files[GENERATION] = settings.to_json_string().encode()  # type: ignore[union-attr]
    return Assets(files=files)
