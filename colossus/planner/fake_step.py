"""Steps of some ranks of a plan by the real engine, in this process, on tensors without values.

The bytes that the ranks send and hold are counted.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import colossus
from colossus.comm.accounting import Counter, Tally, count
from colossus.config import Config, ConfigError
from colossus.config.plans import name_of
from colossus.context.grid import build_grid
from colossus.data.batch import batch_size_of, map_batch, slice_batch
from colossus.engine.engine import Engine
from colossus.layout.split_parameter import as_shards
from colossus.optim.adafactor import Adafactor
from colossus.optim.logical_tensors import Sums
from colossus.optim.whole import WholeParameters
from colossus.planner.candidates import samples_of
from colossus.planner.device_play import DeviceEvent, DeviceRecord
from colossus.planner.fake_engine import fake_engines
from colossus.planner.fake_rank import errors_of_model, fake_world
from colossus.planner.layout_profile import profile_layout
from colossus.planner.memory import COUNTED_STRATEGIES
from colossus.planner.plan_estimate import StoredBytes
from colossus.planner.plan_stages import layout_config, stages_of
from colossus.planner.sample_batch import repeated, sample_of
from colossus.random import GLOBAL_RNG
from colossus.schedule.transport import ValueSpec, batch_signature


def stored_by(engine: Engine) -> StoredBytes:
    """Count the bytes that an engine stores. A storage that several tensors share counts once."""
    stored, optimizer = engine.store.parameters(), engine.optimizer
    whole = [param for block in engine.store.blocks for param in block.params]
    state: list[Any] = list(optimizer.state.values())
    state += [value.counts for value in vars(optimizer).values() if isinstance(value, Sums)]
    if isinstance(optimizer, Adafactor):
        state.append(optimizer.tensor_state)
    if isinstance(optimizer, WholeParameters):  # owners also have whole values and gradients
        owned = [param for group in optimizer.inner.param_groups for param in group["params"]]
        state += [owned, [param.grad for param in owned], list(optimizer.inner.state.values())]
    gradients = sum(param.grad.nbytes for param in stored if param.grad is not None)
    return StoredBytes(bytes_of([*stored, *engine.model.buffers(), *whole]), gradients, bytes_of(tree_leaves(state)))


def bytes_of(values: Iterable[Any]) -> int:
    """Return the bytes of the storages of those values that are tensors."""
    with as_shards():  # `.data` of a fake tensor would take back freed memory
        storages = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in values if isinstance(x, Tensor)}
    return sum(storages.values())


@dataclass(frozen=True)
class RankStep:
    """The counts of one rank's step.

    Attributes:
        rank: rank in the world.
        pipeline_rank: index along the pipeline.
        moved: (operation, axes) -> calls and bytes sent, as `colossus.comm.accounting` counts them.
        stored: bytes that are stored after the step.
        peak: the most bytes that are alive in the step, stored ones and the batch included.
        events: what its device is given, in order.
        seconds: seconds that the engine and its steps took in this process.
    """

    rank: int
    pipeline_rank: int
    moved: Mapping[tuple[str, str], Tally]
    stored: StoredBytes
    peak: int
    events: Sequence[DeviceEvent]
    seconds: float


def fake_steps(config: Config, pipeline_ranks: Sequence[int] | None = None, *, on_cpu: bool = False) -> list[RankStep]:
    """Run the second step of some ranks of a plan, one rank after the other.

    Args:
        config: the resolved config, for a world of any size.
        pipeline_ranks: indices along the pipeline, by default all; the first rank of the world at each runs the step,
            as the others there do the same.
        on_cpu: whether ranks compute on CPU, where a flat tensor has to fit a slot of shared memory.

    Raises:
        ConfigError: the config has no model or data, the model or data cannot be built or read, sizes depend on a
            batch's values, or replicas of the strategy do not wait for each other.
    """
    kind = config.parallel.data_strategy["type"]
    if kind not in COUNTED_STRATEGIES:
        raise ConfigError(
            f"parallel.strategy = {name_of(kind)!r}: only a step of {', '.join(COUNTED_STRATEGIES)} can run without "
            f"the other ranks",
            config.source,
        )
    with errors_of_model(config):
        batch = repeated(sample_of(config), config.train.global_batch_size // (config.parallel.data or 1))
        outputs = _stage_outputs(config) if config.parallel.pipeline.size > 1 else {}
        grid = build_grid(config.parallel)
        first = {grid.index(rank, "pipeline"): rank for rank in reversed(range(grid.world_size))}
        places = range(len(first)) if pipeline_ranks is None else pipeline_ranks
        return [_run_rank(config, first[place], batch, outputs, on_cpu) for place in places]


def _stage_outputs(config: Config) -> dict[int, ValueSpec]:
    """Return the description of the value that each stage but the last passes on for a microbatch.

    It names the data axes over which samples are split, so that a layout of fewer data ranks will not do.
    """
    layout, data = layout_config(config, is_sharded=False), config.parallel.data or 1
    parallel = layout.parallel.model_copy(update={"data": data})
    train = layout.train.model_copy(update={"global_batch_size": data * samples_of(config)})
    profile = profile_layout(layout.model_copy(update={"parallel": parallel, "train": train}))
    stops = stages_of(config, profile.facts)[0].bounds[1:]
    outputs = {stage: profile.blocks[stop - 1].output for stage, stop in enumerate(stops)}
    return {stage: output for stage, output in outputs.items() if output is not None}


def _run_rank(config: Config, rank: int, batch: Any, outputs: Mapping[int, ValueSpec], on_cpu: bool) -> RankStep:
    began = time.perf_counter()
    grid = build_grid(config.parallel)
    environment = dict(RANK=str(rank), WORLD_SIZE=str(grid.world_size), LOCAL_RANK="0")
    with (
        GLOBAL_RNG.preserved(),
        patch.dict(os.environ, environment),
        fake_world(grid.world_size, rank),
        fake_engines(on_cpu=on_cpu) as fake,
    ):
        engine = colossus.initialize(_without_files(config))
        try:
            fake_batch = map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch)
            _expect(engine, outputs, fake_batch)
            _first_step(engine, fake_batch)
            gc.collect()
            fake.mark()
            record = DeviceRecord()
            with count() as counter, record.recording(fake):
                engine.train_step(fake_batch)
            peak = fake.peak
            stored = stored_by(engine)
        finally:
            engine.close()
            _drop_hooks(engine)
        del engine
        gc.collect()
    seconds = time.perf_counter() - began
    pipeline_rank = grid.index(rank, "pipeline")
    return RankStep(rank, pipeline_rank, by_operation(counter), stored, peak, record.events, seconds)


def _first_step(engine: Engine, batch: Any) -> None:
    """Run a first step, which allocates buckets and optimizer state.

    One microbatch is enough if the stages then end in the same order as with all.
    """
    pipeline = engine.pipeline
    number, ends = pipeline.num_microbatches, [action.stage for action in pipeline.actions if action.kind == "reduce"]
    pipeline.set_microbatches(1)
    if [action.stage for action in pipeline.actions if action.kind == "reduce"] == ends:
        batch = slice_batch(batch, 0, batch_size_of(batch) // number)
    else:
        pipeline.set_microbatches(number)
    engine.train_step(batch)
    pipeline.set_microbatches(number)


def _drop_hooks(engine: Engine) -> None:
    """Drop the hooks of parameters: a hook and its parameter refer to each other, unseen by the garbage collector."""
    whole = [param for block in engine.store.blocks for param in block.params]
    for param in (*engine.model.parameters(), *whole):
        hooks: Any = param._post_accumulate_grad_hooks
        if hooks:
            hooks.clear()


def by_operation(counter: Counter) -> dict[tuple[str, str], Tally]:
    """Return calls and bytes by (operation, axes), summed over dtypes."""
    totals: dict[tuple[str, str], Tally] = {}
    for (operation, axes, _), tally in sorted(counter.entries.items(), key=str):
        total = totals.setdefault((operation, axes), Tally())
        total.calls += tally.calls
        total.bytes += tally.bytes
    return totals


def _without_files(config: Config) -> Config:
    """Return the config for a new engine on the CPU without data and checkpoint, whose batches are whole."""
    train = config.train.model_copy(update={"batch_ramp": None, "check_replicas_every": 0})
    checkpoint = config.checkpoint.model_copy(update={"resume": None, "weights": None})
    comm = config.comm.model_copy(update={"backend": "auto"})
    changed = {"data": None, "device": "cpu", "train": train, "checkpoint": checkpoint, "comm": comm}
    return config.model_copy(update=changed)


def _expect(engine: Engine, values: Mapping[int, ValueSpec], batch: Any) -> None:
    transport = engine.executor.transport
    if transport is not None:
        transport.links.takes_early = False  # receives are posted as with NCCL, and between processes of one host
        first = engine.inputs.split(batch, engine.pipeline.num_microbatches).microbatches[0]
        transport.expect(values, batch_signature(first))
