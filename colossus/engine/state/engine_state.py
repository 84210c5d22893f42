"""All state of an engine, to and from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from colossus.arithmetic import factors
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.matching import Rename, WeightMatch, match_weights
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.snapshot import RankState
from colossus.checkpoint.together import on_all_ranks
from colossus.checkpoint.values import decode, encode
from colossus.checkpoint.writer import About
from colossus.config import as_dict
from colossus.config.sizes import describe_zero
from colossus.engine.hooks import Hook
from colossus.engine.state.boxes import ParameterBox, buffers_of, parameter_boxes
from colossus.engine.state.buffers import held_buffers
from colossus.engine.state.optimizer import group_options, restore, restored_options
from colossus.engine.state.per_parameter import ParameterState, held_of_state, read_state
from colossus.engine.state.rng import rng_state, set_rng_state
from colossus.engine.state.weights import known_weights, load_matched, require_same_model, saved_weights
from colossus.layout.split_parameter import as_shards

if TYPE_CHECKING:
    from colossus.engine.engine import Engine

log = logging.getLogger("colossus.engine")

#: when reading fails although every byte had been read for the checksums
_MIXED = "; parts of it are loaded already: load a checkpoint before this engine trains"


class EngineState:
    """Gives and takes the state of an engine: parameters, buffers, optimizer, strategy, loss scale, place in the data,
    random generators, hooks.

    Attributes:
        hooks: whose ``state_dict`` belongs to the run; that of rank 0 is saved, and given to all.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.hooks: list[Hook] = []
        #: the options of the optimizer's groups as it was made
        self._made = group_options(engine.optimizer)

    def about(self) -> About:
        engine = self._engine
        grid, zero = engine.context.grid, describe_zero(engine.config.parallel)
        text = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "one process"
        return About(
            engine.completed_steps,
            {"axes": dict(grid.sizes), "text": f"{text}, {zero}" if zero else text, "num_ranks": grid.world_size},
            as_dict(engine.config),
        )

    # -- giving -------------------------------------------------------------------------------------------

    def collect(self) -> RankState:
        """What this rank adds to a checkpoint: views, no copies. Collective where the model has buffers.

        Raises:
            CheckpointError: for state that a checkpoint cannot hold.
        """
        engine, state = self._engine, RankState()
        with as_shards(), torch.no_grad():
            state.tensors += held_buffers(engine.model, engine.context)
            boxes = self._boxes()
            for box in boxes:
                state.tensors.append(box.held(f"model/{box.name}"))
                state.aliases.update(dict.fromkeys(box.aliases, box.name))
            for name, entry in buffers_of(engine.model).items():
                state.aliases.update({alias: name for alias in entry.names if alias != name})
            for section, held in self._per_parameter().items():
                state.tensors += held_of_state(section, held, boxes, state.values)
        for path, value in self._values().items():
            tensors: dict[str, Tensor] = {}
            state.values[path] = encode(value, path, tensors)
            state.tensors += [HeldTensor.whole(key, tensor) for key, tensor in tensors.items()]
        return state

    def _boxes(self) -> list[ParameterBox]:
        engine = self._engine
        elsewhere = [engine.store.stored(param) for param in engine.strategy.parts.counted_elsewhere]
        return parameter_boxes(engine.model, engine.context, elsewhere)

    def _per_parameter(self) -> dict[str, Mapping[Any, Mapping[str, Any]]]:
        engine = self._engine
        return {"optimizer": engine.optimizer.state, "strategy": engine.strategy.parameter_state()}

    def _values(self) -> dict[str, Any]:
        """What is no tensor of a parameter, each path from one rank."""
        engine, context = self._engine, self._engine.context
        values: dict[str, Any] = {f"ranks/{context.rank}/rng": rng_state(engine.device)}
        if self._is_first_but_along("pipeline"):
            is_empty = not any(param.numel() for group in engine.optimizer.param_groups for param in group["params"])
            values[f"optimizer_groups/{context.index('pipeline')}"] = {
                "made": self._made,
                "now": group_options(engine.optimizer),
                "is_empty": is_empty,
            }
        if self._is_first_but_along("data"):
            index = context.index("data")
            values[f"strategy_values/{index}"] = engine.strategy.state_dict()
            if engine.loaders is not None:
                values[f"loader/{index}"] = engine.loaders.train.state_dict()
        if context.rank == 0:
            values["train"] = {"completed_steps": engine.completed_steps, **engine.gradient_watch.state_dict()}
            if engine.loss_scaler is not None:
                values["loss_scale"] = engine.loss_scaler.state_dict()
            for name, hook in self._named_hooks():
                if hook_state := hook.state_dict():
                    values[f"hooks/{name}"] = hook_state
        return values

    def _is_first_but_along(self, public: str) -> bool:
        context = self._engine.context
        along = context.grid.axes(public)
        return all(at == 0 for axis, at in context.coordinates.items() if axis not in along)

    def _named_hooks(self) -> list[tuple[str, Hook]]:
        """By class; of several of one class by their number, too."""
        named: list[tuple[str, Hook]] = []
        for hook in self.hooks:
            name = type(hook).__qualname__
            count = sum(type(other) is type(hook) for _, other in named)
            named.append((f"{name}~{count + 1}" if count else name, hook))
        return named

    # -- taking -------------------------------------------------------------------------------------------

    def restore(self, reader: CheckpointReader, on_progress: Callable[[], None] = lambda: None) -> None:
        """Go on where a checkpoint was saved, under any plan. Collective.

        Raises:
            CheckpointError: on all ranks, before anything is changed: a file is corrupted, or the model another.
        """
        engine = self._engine
        world = engine.context.group(engine.context.grid.names)
        reader.verify(world, on_progress)
        with as_shards(), torch.no_grad():
            boxes = self._boxes()
            match = require_same_model(reader, known_weights(engine.model, boxes, engine.context))
            # what can be found wrong is found before anything is changed
            read = on_all_ranks(world, lambda: self._read(reader, boxes))
            on_all_ranks(world, lambda: self._take(reader, match, boxes, *read), _MIXED)
        torch.clear_autocast_cache()

    def _read(
        self, reader: CheckpointReader, boxes: Sequence[ParameterBox]
    ) -> tuple[ParameterState, list[dict[str, Any]], ParameterState]:
        """The state of optimizer and strategy by parameter, and the options of the optimizer's groups."""
        self._check_values(reader)
        trained = [box for box in boxes if self._is_trained(box)]
        return read_state("optimizer", reader, trained), self._options(reader), read_state("strategy", reader, boxes)

    def _check_values(self, reader: CheckpointReader) -> None:
        """That everything which is no tensor can be decoded."""
        own = f"ranks/{self._engine.context.rank}/"
        for path, value in reader.manifest.values.items():
            if path.startswith("ranks/") and not path.startswith(own):
                continue
            try:
                decode(value, reader.tensor)
            except CheckpointError as error:
                raise type(error)(f"{reader.folder}: {path}: {error}") from None
            except Exception as error:
                raise DamagedCheckpoint(
                    f"{reader.folder}: {path} cannot be understood ({type(error).__name__}: {error}): take another "
                    f"checkpoint"
                ) from error

    def _take(
        self,
        reader: CheckpointReader,
        match: WeightMatch,
        boxes: Sequence[ParameterBox],
        of_optimizer: ParameterState,
        options: Sequence[dict[str, Any]],
        of_strategy: ParameterState,
    ) -> None:
        engine = self._engine
        load_matched(reader, match, engine.model, boxes, engine.context.rank if self._is_same_plan(reader) else None)
        restore(engine.optimizer, of_optimizer, options)
        engine.strategy.load_parameter_state(of_strategy)
        self._take_values(reader)

    def load_weights(
        self,
        reader: CheckpointReader,
        *,
        only: Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        grow: Sequence[str] = (),
        on_progress: Callable[[], None] = lambda: None,
    ) -> WeightMatch:
        """Take parameters and buffers alone, see `match_weights`. Collective.

        Raises:
            CheckpointError: on all ranks, before anything is changed: a file is corrupted, a name or a shape does not
                fit.
        """
        engine = self._engine
        with as_shards(), torch.no_grad():
            boxes = self._boxes()
            known = known_weights(engine.model, boxes, engine.context)
            try:
                match = match_weights(
                    known, saved_weights(reader), reader.manifest.aliases, only=only, rename=rename, grow=grow
                )
                if strict and not match.is_complete:
                    raise CheckpointError(
                        f"it does not fit the model: {match}. only=[patterns] loads a part, rename={{..}} renames, "
                        f"grow=[patterns] lets tables have more rows here, strict=False loads what fits"
                    )
            except CheckpointError as error:
                raise CheckpointError(f"{reader.folder}: {error}") from None
            world = engine.context.group(engine.context.grid.names)
            reader.verify(world, on_progress)
            on_all_ranks(world, lambda: load_matched(reader, match, engine.model, boxes, None), _MIXED)
        torch.clear_autocast_cache()
        return match

    def _is_trained(self, box: ParameterBox) -> bool:
        groups = self._engine.optimizer.param_groups
        return any(box.parameter is param for group in groups for param in group["params"])

    def _is_same_plan(self, reader: CheckpointReader) -> bool:
        return bool(reader.manifest.plan.get("axes") == dict(self._engine.context.grid.sizes))

    def _options(self, reader: CheckpointReader) -> list[dict[str, Any]]:
        found = [
            decode(value, reader.tensor)
            for path, value in sorted(reader.manifest.values.items())
            if path.startswith("optimizer_groups/")
        ]
        if not found:
            return [dict(options) for options in self._made]
        groups = next((each for each in found if not each["is_empty"]), found[0])
        return restored_options(self._made, groups["made"], groups["now"])

    def _take_values(self, reader: CheckpointReader) -> None:
        engine, context = self._engine, self._engine.context
        values = reader.manifest.values

        def value(path: str) -> Any:
            return decode(values[path], reader.tensor) if path in values else None

        train = value("train") or {"completed_steps": reader.manifest.step}
        engine.completed_steps = train["completed_steps"]
        engine.gradient_watch.load_state_dict(train)
        if engine.loss_scaler is not None and (scale := value("loss_scale")) is not None:
            engine.loss_scaler.load_state_dict(scale)
        of_strategy = value(f"strategy_values/{context.index('data')}")
        engine.strategy.load_state_dict(of_strategy if of_strategy is not None else value("strategy_values/0") or {})
        if engine.loaders is not None:
            self._load_place_in_data(reader)
        for name, hook in self._named_hooks():
            if (hook_state := value(f"hooks/{name}")) is not None:
                hook.load_state_dict(hook_state)
        if self._is_same_plan(reader):
            set_rng_state(value(f"ranks/{context.rank}/rng"), engine.device)

    def _load_place_in_data(self, reader: CheckpointReader) -> None:
        """By the state of the same data rank where there are as many; else by that of the first."""
        engine, values = self._engine, reader.manifest.values
        assert engine.loaders is not None
        saved = sum(path.startswith("loader/") for path in values)
        if not saved:
            engine.loaders.train.set_step(engine.completed_steps)
            return
        index = engine.context.index("data") if saved == engine.context.size("data") else 0
        engine.loaders.train.load_state_dict(decode(values[f"loader/{index}"], reader.tensor))
