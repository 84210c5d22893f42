"""The values that stages of a pipeline pass on, computed on one rank."""

from __future__ import annotations

from typing import Any

import torch

from colossus.config import Config
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch
from colossus.data.model_input import model_input
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.inputs import ForwardCall, Inputs
from colossus.engine.parameter_groups import make_groups
from colossus.layers.model_parallel import model_parallel_of
from colossus.planner.block_runs import runs_of
from colossus.planner.fake_engine import balanced_experts
from colossus.planner.fake_rank import fake_rank, give_sizes
from colossus.planner.fake_tensors import counted_fake_tensors
from colossus.registry import MODELS
from colossus.schedule.partition import make_partition
from colossus.schedule.pipeline import PipelineRuntime
from colossus.schedule.transport import ValueSpec, flatten_value, unflatten_value


def stage_values(config: Config, rank: int, batch: Any) -> dict[int, ValueSpec]:
    """Return the spec of each stage's output for a microbatch of this batch, on the pipeline of a rank.

    The forwards of all stages run in this process, with a few blocks of each run of equal ones.

    Raises:
        ValueError: see `make_partition`.
    """
    with fake_rank(config, rank) as context:
        return _values(config, context, batch)


def _values(config: Config, context: ParallelContext, batch: Any) -> dict[int, ValueSpec]:
    spec = config.model.spec()  # type: ignore[union-attr]
    factory = with_activation_checkpoint(lambda: MODELS.build(spec), config.train.activation_checkpoint)
    model = build(factory, context, materialize=False, prepare=lambda whole: _freeze(config, whole))
    pipeline, parallel = PipelineRuntime(config, context), model_parallel_of(context)
    partition = make_partition(model, pipeline.rank_of, config.parallel.pipeline.split)
    outputs: dict[int, ValueSpec] = {}
    with counted_fake_tensors(), balanced_experts():
        give_sizes(model, context.precision)
        model.train()
        context.rng.move_to(0, 0)
        inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
        step = inputs.split(map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch), pipeline.num_microbatches)
        with parallel.batch(step.infos[0]), context.precision.autocast(context.device):
            own, first = inputs.local(step.microbatches[0]), ForwardCall(model, is_partitioned=True)
            value = inputs.mark_tokens(model_input(own), step.microbatches[0])
            is_first = True
            for stage in range(pipeline.last_stage):
                for run in runs_of(model, partition.blocks_of(stage)):
                    for call in run.shown:
                        value = first(call, value, own) if is_first else call(value)
                        is_first = False
                outputs[stage], tensors = flatten_value(value, parallel, f"stage {stage}")
                value, _ = unflatten_value(outputs[stage], tensors, parallel)
    return outputs


def _freeze(config: Config, whole: torch.nn.Module) -> None:
    make_groups(config.optimizer, whole)
