"""All state of a run, to and from a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from colossus.arithmetic import factors
from colossus.checkpoint.companions import Companions, read_companions
from colossus.checkpoint.entries import Entry
from colossus.checkpoint.errors import CheckpointError, DamagedCheckpoint
from colossus.checkpoint.held_tensor import HeldTensor
from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.checkpoint.matching import Rename, WeightMatch, match_weights
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.snapshot import RankState
from colossus.checkpoint.together import gather_on_all_ranks, on_all_ranks
from colossus.checkpoint.values import decode
from colossus.checkpoint.writer import About
from colossus.config import as_dict
from colossus.config.sizes import describe_zero
from colossus.data_parallel.replica_average import ReplicaAverage
from colossus.layout.split_parameter import as_shards
from colossus.state.boxes import ParameterBox, buffers_of
from colossus.state.buffers import checksums, held_buffers, persistent_names, require_no_late_buffers
from colossus.state.hook_state import EncodedState, HookStates
from colossus.state.of_ranks import own_path
from colossus.state.optimizer import (
    group_options,
    optimizer_values,
    options_to_go_on,
    require_same_optimizer,
    restore,
    saved_groups,
)
from colossus.state.parameters import add_parameters, boxes_of
from colossus.state.per_parameter import read_state, require_state_fits
from colossus.state.replicas import AVERAGE, Source, source_of
from colossus.state.run import Run
from colossus.state.run_state import restore_run, run_values, written_for
from colossus.state.weights import (
    known_weights,
    load_matched,
    other_functions,
    require_same_model,
    saved_weights,
)

log = logging.getLogger("colossus.engine")

#: when reading fails although every byte had been read for the checksums
_MIXED = "; parts of it are loaded already: load a checkpoint before this engine trains"


class State:
    """What a checkpoint saves of a run, and how it is taken back: parameters, buffers, optimizer, strategy, loss scale,
    place in the data, random generators, hooks.

    Args:
        owner: what hooks are called with: the engine.

    Attributes:
        run: whose state it is.
        hook_states: of the hooks that belong to the run.
    """

    def __init__(self, run: Run, owner: Any) -> None:
        self.run = run
        self._world = run.context.group(run.context.grid.names)
        self.hook_states = HookStates(run.context, owner)
        self._buffers = persistent_names(run.model)
        #: the options of the optimizer's groups as it was made
        self._made = group_options(run.optimizer)
        #: what came with the weights that were loaded
        self._loaded = Companions()

    def about(self) -> About:
        run = self.run
        grid, zero = run.context.grid, describe_zero(run.config.parallel)
        text = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "one process"
        beside = self.companions
        tokenizer = getattr(run.loaders, "tokenizer", None)
        held = TOKENIZER_FILE if TOKENIZER_FILE in beside.files else None
        return About(
            run.completed_steps,
            {"axes": dict(grid.sizes), "text": f"{text}, {zero}" if zero else text, "num_ranks": grid.world_size},
            {**as_dict(run.config), **beside.config},
            held if tokenizer is None else tokenizer.name,
            beside.files,
        )

    @property
    def companions(self) -> Companions:
        """What goes with the weights, on the first rank: what came with those that were loaded, as far as it is of the
        tokenizer of the data; and that."""
        tokenizer = getattr(self.run.loaders, "tokenizer", None)
        if tokenizer is None:
            return self._loaded
        kept = self._loaded.for_tokenizer(tokenizer.content)
        return Companions(kept.config, {**kept.files, **tokenizer.files})

    def _beside(self, reader: CheckpointReader) -> Companions:
        """What lies beside the weights of a checkpoint. Collective; the first rank writes it."""
        first = self.run.context.is_logging_rank
        return on_all_ranks(
            self._world,
            lambda: read_companions(reader.folder, reader.manifest.config) if first else Companions(),
            tells_ranks=False,
        )

    # -- giving -------------------------------------------------------------------------------------------

    def collect(self) -> RankState:
        """What this rank adds to a checkpoint: views, no copies. Collective: one gather, of checksums.

        Raises:
            CheckpointError: for state that a checkpoint cannot hold; on all ranks where a hook gave it, or a buffer.
        """
        run, state, rank = self.run, RankState(), self.run.context.rank
        run.strategy.sync_point()
        is_alone = self._world.size == 1
        buffers: dict[str, Entry] = {}
        of_hooks: dict[str, EncodedState] = {}

        def prepare() -> tuple[dict[str, int], dict[str, int]]:
            self.hook_states.before_save()
            with as_shards(), torch.no_grad():
                require_no_late_buffers(run.model, self._buffers)
                buffers.update(buffers_of(run.model))
                of_hooks.update(self.hook_states.collect())
                if is_alone:  # nobody has others
                    return dict.fromkeys(buffers, 0), dict.fromkeys(of_hooks, 0)
                return checksums(buffers), {path: each.checksum() for path, each in of_hooks.items()}

        sums = gather_on_all_ranks(self._world, prepare)
        with as_shards(), torch.no_grad():
            prefix = AVERAGE if run.strategy.evaluates == "own" else ""
            of_ranks = [of_buffers for of_buffers, _ in sums]
            state.tensors += held_buffers(buffers, rank, of_ranks, self._buffer_means(), prefix)
            for box in add_parameters(state, run):
                state.aliases.update(dict.fromkeys(box.aliases, box.name))
            for name, entry in buffers.items():
                state.aliases.update({alias: name for alias in entry.names if alias != name})
        encoded = [EncodedState.of(value, path) for path, value in (self._groups() | run_values(run)).items()]
        (_, first), (_, mine) = sums[0], sums[rank]
        for path, each in of_hooks.items():
            if rank == 0:
                encoded.append(each)
            elif mine[path] != first.get(path):
                encoded.append(each.under(own_path(rank, path)))
        for each in encoded:
            state.values[each.path] = each.value
            state.tensors += [HeldTensor.whole(key, tensor) for key, tensor in each.tensors.items()]
        return state

    def _made_boxes(self) -> list[ParameterBox]:
        """The boxes of a model that has the buffers it was made with."""
        require_no_late_buffers(self.run.model, self._buffers)
        return boxes_of(self.run)

    def _buffer_means(self) -> dict[int, Tensor]:
        """Of buffers that differ between replicas, by id, their mean."""
        strategy = self.run.strategy
        if strategy.exact or self.run.context.size("data") == 1:
            return {}
        average = ReplicaAverage(strategy.parts, strategy.trained)
        return {id(buffer): mean.to(buffer.dtype) for buffer, mean in average.buffers()}

    def _groups(self) -> dict[str, Any]:
        """Of the optimizer of each pipeline stage: its kind, and the options of its groups."""
        run = self.run
        return {
            f"{replica}optimizer_groups/{run.context.index('pipeline')}": optimizer_values(run.optimizer, self._made)
            for replica in written_for(run, "pipeline")
        }

    # -- taking -------------------------------------------------------------------------------------------

    def restore(self, reader: CheckpointReader, on_progress: Callable[[], None] = lambda: None) -> None:
        """Go on where a checkpoint was saved, under any plan. Collective.

        Raises:
            CheckpointError: on all ranks, before anything is changed: a file is corrupted, or the model another.
        """
        run = self.run
        context, world = run.context, self._world
        run.strategy.sync_point()
        if reader.manifest.is_weights_only:
            raise CheckpointError(
                f"{reader.folder} has weights only, no optimizer and no place in the data: nothing can go on from it; "
                f"checkpoint.weights, or run.checkpoints.load_weights, begins a run with them"
            )
        reader.verify(world, on_progress)
        with as_shards(), torch.no_grad():
            boxes = on_all_ranks(world, self._made_boxes)
            match = require_same_model(reader, known_weights(run.model, boxes, context))
            # what can be found wrong is found before anything is changed
            on_all_ranks(world, lambda: self._check_values(reader))
            source = source_of(reader, run.strategy, context)
            require_same_optimizer(reader, saved_groups(reader), run.optimizer, world, source.optimizers[0])
            require_state_fits(source.sections, reader, boxes, world)
            beside = self._beside(reader)
            on_all_ranks(world, lambda: self._take(reader, match, boxes, source), _MIXED)
            self._loaded = beside
        torch.clear_autocast_cache()

    def _check_values(self, reader: CheckpointReader) -> None:
        """That everything which is no tensor can be decoded."""
        own = f"ranks/{self.run.context.rank}/"
        for path, value in reader.manifest.values.items():
            if path.startswith("ranks/") and not path.startswith(own):
                continue
            try:
                decode(value, reader.tensor)
            except CheckpointError as error:
                told = str(error).removeprefix(f"{reader.folder}: ")
                raise type(error)(f"{reader.folder}: {path}: {told}") from None
            except Exception as error:
                raise DamagedCheckpoint(
                    f"{reader.folder}: {path} cannot be understood ({type(error).__name__}: {error}): take another "
                    f"checkpoint"
                ) from error

    def _take(
        self, reader: CheckpointReader, match: WeightMatch, boxes: Sequence[ParameterBox], source: Source
    ) -> None:
        run, context = self.run, self.run.context
        is_same_plan = self._is_same_plan(reader)
        own_rank = context.rank if is_same_plan and not source.is_average else None
        load_matched(reader, match, run.model, boxes, own_rank, source.model)
        trained = {id(param) for group in run.optimizer.param_groups for param in group["params"]}
        of_trained = [box for box in boxes if id(box.parameter) in trained]
        sections = [f"{each}optimizer" for each in source.optimizers]
        state = read_state(sections, reader, of_trained, run.optimizer.state)
        saved = saved_groups(reader, source.own)
        options = options_to_go_on(self._made, saved, tells=context.is_logging_rank)
        restore(run.optimizer, state, options, saved.own if saved is not None else {})
        of_strategy = [] if source.strategy is None else [f"{source.strategy}strategy"]
        run.strategy.load_parameter_state(read_state(of_strategy, reader, boxes))
        run.strategy.parameters_loaded()
        restore_run(run, self.hook_states, reader, source, is_same_plan=is_same_plan)

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
        run = self.run
        run.strategy.sync_point()
        with as_shards(), torch.no_grad():
            boxes = on_all_ranks(self._world, self._made_boxes)
            known = known_weights(run.model, boxes, run.context)
            try:
                match = match_weights(
                    known, saved_weights(reader), reader.manifest.aliases, only=only, rename=rename, grow=grow,
                    shorten=getattr(getattr(run.model, "options", None), "positions_by_row", ()), strict=strict,
                )  # fmt: skip
            except CheckpointError as error:
                raise CheckpointError(f"{reader.folder}: {error}") from None
            reader.verify(self._world, on_progress)
            beside = self._beside(reader) if only is None else self._loaded  # a part may know other tokens
            on_all_ranks(self._world, lambda: load_matched(reader, match, run.model, boxes, None), _MIXED)
            if not run.strategy.exact:  # what is on its way, or an anchor, is of other weights
                run.strategy.load_parameter_state({})
                run.strategy.load_state_dict({})
            run.strategy.parameters_loaded()
            self._loaded = beside
        differ = other_functions(reader.manifest.config.get("model"), as_dict(run.config).get("model"))
        if differ and run.context.is_logging_rank:
            log.warning("%s: its weights are of a model that computes otherwise: %s", reader.folder, ", ".join(differ))
        torch.clear_autocast_cache()
        return match

    def _is_same_plan(self, reader: CheckpointReader) -> bool:
        """Whether each rank has the same place as then: sizes, and the order of axes."""
        saved = reader.manifest.plan.get("axes", {})
        return list(saved.items()) == list(self.run.context.grid.sizes.items())
