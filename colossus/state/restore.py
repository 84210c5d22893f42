"""The return of a run's state, or of its weights alone, from a checkpoint that was saved under any plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.matching import Rename, WeightMatch, match_weights
from colossus.checkpoint.part import Part
from colossus.checkpoint.rank_errors import on_all_ranks
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.saved_averages import HOOK_STATE
from colossus.checkpoint.weight_sources import Assets, read_assets
from colossus.layout.split_parameter import as_shards
from colossus.state.changed_training import require_same_reference, warn_of_changes
from colossus.state.model_parts import buffer_parts, parts_of
from colossus.state.model_state_dict import whole_tensors
from colossus.state.optimizer import (
    options_to_go_on,
    read_state,
    require_same_optimizer,
    restore_optimizer,
    saved_optimizer,
)
from colossus.state.parameters import load_matched, require_same_model
from colossus.state.replicas import ReplicaSource, replica_source
from colossus.state.run import Run
from colossus.state.run_values import decoded_values, named_hooks, restore_run
from colossus.state.whole_state import load_whole

#: added to an error of reading, although every byte had been read for the checksums
_MIXED = "; parts of it are loaded already: load a checkpoint before this engine trains"


def restore(run: Run, reader: CheckpointReader) -> None:
    """Resume from a checkpoint, saved under any plan. Collective.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if a file is corrupted or the model is another.
    """
    run.strategy.sync_point()
    if reader.manifest.is_weights_only:
        raise CheckpointError(
            f"{reader.folder} has weights only, no optimizer and no place in the data: no run can resume from it; "
            f"checkpoint.weights, or engine.checkpoints.load_weights, begins a run with them"
        )
    require_same_reference(run, reader)
    reader.verify(run.world, run.on_progress)
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

        values, source = on_all_ranks(run.world, check)
        assets = _read_assets(run, reader)
        on_all_ranks(run.world, lambda: _take(run, reader, match, parts, values, source), _MIXED)
        run.assets = assets
        warn_of_changes(run, reader, values)
    torch.clear_autocast_cache()


def _take(
    run: Run,
    reader: CheckpointReader,
    match: WeightMatch,
    parts: Sequence[Part],
    values: dict[str, Any],
    source: ReplicaSource,
) -> None:
    context = run.context
    # ranks have the coordinates that they had: sizes and order of axes are the same
    same_plan = list(reader.manifest.plan.get("axes", {}).items()) == list(context.grid.sizes.items())
    own_rank = context.rank if same_plan and not source.is_average else None
    trained = {id(param) for group in run.optimizer.param_groups for param in group["params"]}
    trained_parts = [part for part in parts if id(part.memory) in trained]
    state = read_state(f"{source.optimizer}optimizer", reader, values, trained_parts, run.optimizer.state)
    load_matched(reader, match, [*parts, *buffer_parts(run.model)], own_rank, source.own)
    saved = saved_optimizer(values, source.own)
    options = options_to_go_on(run.made_options, saved, is_logged=context.is_logging_rank)
    restore_optimizer(run.optimizer, state, options)
    load_whole(f"{source.optimizer}optimizer", reader, run.optimizer)
    has_strategy = source.strategy is not None
    strategy_state = read_state(f"{source.strategy}strategy", reader, values, parts) if has_strategy else {}
    run.strategy.load_parameter_state(strategy_state)
    run.strategy.parameters_loaded()
    for name, hook in named_hooks(run.hooks):
        section = f"{source.own}{HOOK_STATE}/{name}"
        hook.load_parameter_state(read_state(section, reader, values, parts, keeps_dtypes=True))
    restore_run(run, reader.manifest.step, values, source, same_plan=same_plan)


def load_weights(
    run: Run,
    reader: CheckpointReader,
    *,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    strict: bool = True,
    grow: Sequence[str] = (),
    reference: nn.Module | None = None,
) -> WeightMatch:
    """Load parameters and buffers alone (`match_weights`). Collective.

    Args:
        reference: the frozen model inside the run's that gets them; None: the run's model.

    Raises:
        CheckpointError: on all ranks, before anything is changed, if a file is corrupted or a name or shape does not
            fit.
    """
    model = run.model if reference is None else reference
    run.strategy.sync_point()
    with as_shards(), torch.no_grad():
        parts = [*parts_of(run, reference), *buffer_parts(model)]
        weights = whole_tensors(model, run.context)
        try:
            match = match_weights(
                {name: part.shape for name, part in weights.items()},
                {name: part.names for name, part in weights.items()},
                reader.manifest.shapes("model"), reader.manifest.aliases, only=only, rename=rename, grow=grow,
                shorten=getattr(getattr(model, "options", None), "positions_by_row", ()), strict=strict,
            )  # fmt: skip
        except CheckpointError as error:
            raise CheckpointError(f"{reader.folder}: {error}") from None
        reader.verify(run.world, run.on_progress)
        is_whole = only is None and reference is None  # a part may know other tokens
        assets = _read_assets(run, reader) if is_whole else run.assets
        on_all_ranks(run.world, lambda: load_matched(reader, match, parts, None), _MIXED)
        if not run.strategy.exact and reference is None:  # messages under way and anchors belong to other weights
            run.strategy.load_parameter_state({})
            run.strategy.load_state_dict({})
        run.strategy.parameters_loaded()
        run.assets = assets
    torch.clear_autocast_cache()
    return match


def _read_assets(run: Run, reader: CheckpointReader) -> Assets:
    """Return the assets beside the weights of a checkpoint, on the first rank, which writes them. Collective."""
    first = run.context.is_logging_rank
    return on_all_ranks(
        run.world,
        lambda: read_assets(reader.folder, reader.manifest.config) if first else Assets(),
        names_ranks=False,
    )
