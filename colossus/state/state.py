"""All state of a run, to and from a checkpoint."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from colossus.arithmetic import factors
from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.manifest import TOKENIZER_FILE
from colossus.checkpoint.matching import Rename, WeightMatch, match_weights
from colossus.checkpoint.part import Part
from colossus.checkpoint.rank_errors import gather_on_all_ranks, on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.saved_averages import HOOK_STATE
from colossus.checkpoint.tensor_file import host_bytes
from colossus.checkpoint.values import encode
from colossus.checkpoint.weight_sources import Assets, assets_of_model, read_assets
from colossus.checkpoint.writer import About, RankState
from colossus.comm.host_staging import all_to_host
from colossus.config import as_dict
from colossus.config.plans import describe_zero
from colossus.layout.split_parameter import as_shards
from colossus.state.changed_training import NextRate, require_same_reference, warn_of_changes
from colossus.state.model_parts import buffer_parts
from colossus.state.model_state_dict import whole_tensors
from colossus.state.optimizer import (
    ParameterState,
    group_options,
    optimizer_values,
    options_to_go_on,
    read_state,
    require_same_optimizer,
    restore_optimizer,
    saved_optimizer,
    state_parts,
)
from colossus.state.parameters import load_matched, require_same_model, saved_buffers, warn_of_own_buffers
from colossus.state.replicas import (
    ReplicaSource,
    buffer_means,
    has_own_parameters,
    has_own_state,
    parts_of,
    replica_prefix,
    replica_source,
    saved_parameters,
)
from colossus.state.run import Run
from colossus.state.run_values import (
    SavedHook,
    decoded_values,
    hook_values,
    named_hooks,
    restore_run,
    run_values,
    written_prefixes,
)
from colossus.state.whole_state import load_whole, whole_state_parts

#: added to an error of reading, although every byte had been read for the checksums
_MIXED = "; parts of it are loaded already: load a checkpoint before this engine trains"


class State:
    """The state of a run that a checkpoint saves, and how it is restored.

    It has parameters, buffers, optimizer, strategy, loss scale, place in the data, random generators and hooks.

    Args:
        run: the run.
        owner: the engine, with which hooks are called.

    Attributes:
        run: the run whose state it is.
        hooks: hooks whose ``state_dict`` belongs to the run.
    """

    def __init__(self, run: Run, owner: Any) -> None:
        self.run, self._owner = run, owner
        self._world = run.context.group(run.context.grid.names)
        self.hooks: Sequence[SavedHook] = ()
        #: the options of the optimizer's groups as it was made
        self._made = group_options(run.optimizer)
        self._next_rate = NextRate(run.config)
        #: files and settings that came with the loaded weights, or with the model
        self._loaded = assets_of_model(run.model) if run.context.is_logging_rank else Assets()

    def about(self) -> About:
        run, assets = self.run, self.assets
        grid, zero = run.context.grid, describe_zero(run.config.parallel)
        text = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "one process"
        tokenizer = getattr(run.loaders, "tokenizer", None)
        tokenizer_file = TOKENIZER_FILE if TOKENIZER_FILE in assets.files else None
        return About(
            run.completed_steps,
            {"axes": dict(grid.sizes), "text": f"{text}, {zero}" if zero else text, "num_ranks": grid.world_size},
            {**as_dict(run.config), **assets.config},
            tokenizer_file if tokenizer is None else tokenizer.name,
            assets.files,
        )

    @property
    def assets(self) -> Assets:
        """Assets of the weights, on the first rank.

        They are those of the loaded weights, as far as they fit the tokenizer of the data, and that tokenizer.
        """
        tokenizer = getattr(self.run.loaders, "tokenizer", None)
        if tokenizer is None:
            return self._loaded
        fitting = self._loaded.for_tokenizer(tokenizer.content)
        return Assets(fitting.config, {**fitting.files, **tokenizer.files})

    def _read_assets(self, reader: CheckpointReader) -> Assets:
        """Return the assets beside the weights of a checkpoint, on the first rank, which writes them. Collective."""
        first = self.run.context.is_logging_rank
        return on_all_ranks(
            self._world,
            lambda: read_assets(reader.folder, reader.manifest.config) if first else Assets(),
            names_ranks=False,
        )

    # -- saving -------------------------------------------------------------------------------------------

    def collect(self) -> RankState:
        """Return what this rank adds to a checkpoint: parts of tensors (views, no copies), and values. Collective.

        Raises:
            CheckpointError: if a checkpoint cannot hold some state; on all ranks if a hook or a buffer has it.
        """
        run, rank = self.run, self.run.context.rank
        run.strategy.sync_point()
        buffers = buffer_parts(run.model)
        values: dict[str, Any] = {}
        tensors: dict[str, Tensor] = {}
        hook_states: dict[str, ParameterState] = {}

        def prepare() -> dict[str, int]:
            with as_shards(), torch.no_grad():
                hook_dicts = hook_values(self.hooks, self._owner)
                hook_states.update({name: hook.parameter_state() for name, hook in named_hooks(self.hooks)})
                if rank == 0:
                    values.update({path: encode(value, path, tensors) for path, value in hook_dicts.items()})
                if self._world.size == 1:  # no rank to compare with, and no device to wait for
                    return dict.fromkeys((part.key for part in buffers), 0)
                on_host = zip(buffers, all_to_host([part.memory for part in buffers]), strict=True)
                return {part.key: zlib.crc32(host_bytes(buffer)) for part, buffer in on_host}

        checksums = gather_on_all_ranks(self._world, prepare)
        if run.strategy.exact and run.context.is_logging_rank:
            warn_of_own_buffers(checksums)
        with as_shards(), torch.no_grad():
            of_model = parts_of(run)
            parts = [*saved_buffers(buffers, rank, checksums, buffer_means(run)), *saved_parameters(run, of_model)]
            parts += self._per_parameter(of_model, hook_states, values)
            # the class and the group options of each pipeline stage's optimizer
            stage = f"optimizer_groups/{run.context.index('pipeline')}"
            of_optimizer = optimizer_values(run.optimizer, self._made)
            of_run = {f"{replica}{stage}": of_optimizer for replica in written_prefixes(run, "pipeline")}
            of_run |= run_values(run, self._next_rate)
            values.update({path: encode(value, path, tensors) for path, value in of_run.items()})
        return [*parts, *(Part.whole(key, tensor) for key, tensor in tensors.items())], values

    def _per_parameter(
        self, parts: list[Part], hooks: Mapping[str, ParameterState], values: dict[str, Any]
    ) -> Iterator[Part]:
        """Yield the state that is kept for each parameter by optimizer, strategy and hooks; add plain ``values``."""
        run, own = self.run, replica_prefix(self.run.context.index("data"))
        sections = {
            "optimizer": (run.strategy.optimizer_state(run.optimizer), has_own_parameters(run)),
            "strategy": (run.strategy.parameter_state(), has_own_state(run)),
            **{f"{HOOK_STATE}/{name}": (params, has_own_parameters(run)) for name, params in hooks.items() if params},
        }
        for section, (params, is_own) in sections.items():
            where, by = (own + section, parts_of(run, replicas_differ=True)) if is_own else (section, parts)
            yield from state_parts(where, params, by, values)
        elsewhere = {id(run.store.stored(param)) for param in run.strategy.parts.counted_elsewhere}
        where = (own if has_own_parameters(run) else "") + "optimizer"
        yield from whole_state_parts(where, run.optimizer, elsewhere, values)

    # -- loading ------------------------------------------------------------------------------------------

    def restore(self, reader: CheckpointReader, on_progress: Callable[[], None] = lambda: None) -> None:
        """Resume from a checkpoint, saved under any plan. Collective.

        Raises:
            CheckpointError: on all ranks, before anything is changed, if a file is corrupted or the model is another.
        """
        run, world = self.run, self._world
        run.strategy.sync_point()
        if reader.manifest.is_weights_only:
            raise CheckpointError(
                f"{reader.folder} has weights only, no optimizer and no place in the data: no run can resume from it; "
                f"checkpoint.weights, or run.checkpoints.load_weights, begins a run with them"
            )
        require_same_reference(run, reader)
        reader.verify(world, on_progress)
        with as_shards(), torch.no_grad():
            parts = parts_of(run)
            match = require_same_model(reader, whole_tensors(run.model, run.context))

            def check() -> tuple[dict[str, Any], ReplicaSource]:
                """Find whatever can be wrong before anything is changed."""
                values = decoded_values(reader, run.context.rank)
                source = replica_source(values, run)
                section = f"{source.optimizer}optimizer"
                require_same_optimizer(reader, saved_optimizer(values), run.optimizer, section)
                return values, source

            values, source = on_all_ranks(world, check)
            assets = self._read_assets(reader)
            on_all_ranks(world, lambda: self._take(reader, match, parts, values, source), _MIXED)
            self._loaded = assets
            warn_of_changes(run, self._next_rate, reader, values)
        torch.clear_autocast_cache()

    def _take(
        self,
        reader: CheckpointReader,
        match: WeightMatch,
        parts: Sequence[Part],
        values: dict[str, Any],
        source: ReplicaSource,
    ) -> None:
        run, context = self.run, self.run.context
        # ranks have the coordinates that they had: sizes and order of axes are the same
        same_plan = list(reader.manifest.plan.get("axes", {}).items()) == list(context.grid.sizes.items())
        own_rank = context.rank if same_plan and not source.is_average else None
        trained = {id(param) for group in run.optimizer.param_groups for param in group["params"]}
        trained_parts = [part for part in parts if id(part.memory) in trained]
        state = read_state(f"{source.optimizer}optimizer", reader, values, trained_parts, run.optimizer.state)
        load_matched(reader, match, [*parts, *buffer_parts(run.model)], own_rank, source.own)
        saved = saved_optimizer(values, source.own)
        options = options_to_go_on(self._made, saved, is_logged=context.is_logging_rank)
        restore_optimizer(run.optimizer, state, options)
        load_whole(f"{source.optimizer}optimizer", reader, run.optimizer)
        has_strategy = source.strategy is not None
        strategy_state = read_state(f"{source.strategy}strategy", reader, values, parts) if has_strategy else {}
        run.strategy.load_parameter_state(strategy_state)
        run.strategy.parameters_loaded()
        for name, hook in named_hooks(self.hooks):
            section = f"{source.own}{HOOK_STATE}/{name}"
            hook.load_parameter_state(read_state(section, reader, values, parts, keeps_dtypes=True))
        restore_run(run, self.hooks, reader.manifest.step, values, source, same_plan=same_plan)

    def load_weights(
        self,
        reader: CheckpointReader,
        *,
        only: Sequence[str] | None = None,
        rename: Rename | None = None,
        strict: bool = True,
        grow: Sequence[str] = (),
        on_progress: Callable[[], None] = lambda: None,
        reference: nn.Module | None = None,
    ) -> WeightMatch:
        """Load parameters and buffers alone (`match_weights`). Collective.

        Args:
            reference: the frozen model inside the run's that gets them; None: the run's model.

        Raises:
            CheckpointError: on all ranks, before anything is changed, if a file is corrupted or a name or shape does
                not fit.
        """
        run, model = self.run, self.run.model if reference is None else reference
        run.strategy.sync_point()
        with as_shards(), torch.no_grad():
            parts = [*parts_of(run, reference), *buffer_parts(model)]
            weights = whole_tensors(model, run.context)
            try:
                match = match_weights(
                    {name: part.shape for name, part in weights.items()},
                    {name: part.names for name, part in weights.items()},
                    reader.manifest.shapes("model"), reader.manifest.aliases, only=only, rename=rename, grow=grow,
                    shorten=getattr(getattr(model, "options", None), "positions_by_row", ()),
                    strict=strict,
                )  # fmt: skip
            except CheckpointError as error:
                raise CheckpointError(f"{reader.folder}: {error}") from None
            reader.verify(self._world, on_progress)
            is_whole = only is None and reference is None  # a part may know other tokens
            assets = self._read_assets(reader) if is_whole else self._loaded
            on_all_ranks(self._world, lambda: load_matched(reader, match, parts, None), _MIXED)
            if not run.strategy.exact and reference is None:  # messages under way and anchors belong to other weights
                run.strategy.load_parameter_state({})
                run.strategy.load_state_dict({})
            run.strategy.parameters_loaded()
            self._loaded = assets
        torch.clear_autocast_cache()
        return match
