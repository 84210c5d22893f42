"""The memory of a plan, predicted: of the fullest rank of each pipeline rank, by kind, without a process or a device.

All ranks of one pipeline rank hold as much (shards are padded to equal sizes), so one of each is looked at.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from colossus.config import Config, ConfigError
from colossus.config.plans import name_of
from colossus.construct.build_model import build
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import batch_size_of, map_batch
from colossus.data.make_loaders import loaders_of
from colossus.engine.checkpointed_modules import with_activation_checkpoint
from colossus.engine.inputs import Inputs
from colossus.engine.loss_function import loss_of
from colossus.engine.parameter_groups import ParameterGroups, make_groups
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.pipeline_block import has_hooks, is_chain, pipeline_blocks
from colossus.planner.activations import MicrobatchRun, StageActivations, peak_of_step
from colossus.planner.balanced_experts import balanced_experts
from colossus.planner.block_runs import BlockRun, runs_of
from colossus.planner.fake_rank import fake_rank, give_sizes
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors
from colossus.planner.optimizer_memory import OptimizerMemory
from colossus.planner.parameter_facts import ModelFacts, facts_of
from colossus.planner.plan_axes import PlanAxes
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.rank_stages import RankStages
from colossus.planner.stored import stored_bytes
from colossus.registry import MODELS
from colossus.schedule.actions import in_flight, placement
from colossus.schedule.build import make_schedule
from colossus.schedule.partition import Partition, make_partition
from colossus.schedule.pipeline import PipelineRuntime
from colossus.tensor_parallel.dtypes import gradient_dtype

#: strategies that keep nothing of a model's size but buckets
_COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


def predict_memory(config: Config) -> PlanMemory:
    """The memory of a resolved config's plan.

    Raises:
        ConfigError: for a config without a model or data, and for what cannot be built or read, or has
            sizes that depend on a batch's values.
    """
    if config.model is None or config.data is None:
        missing = "model" if config.model is None else "data"
        raise ConfigError(f"{missing}: the config has none, and memory depends on it", config.source)
    try:
        batch = _batch_of(config)
        with fake_rank(config) as context:
            facts = layout_facts(config, context, batch)
        return _memory_of(config, facts)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error), config.source) from error
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"the memory of {name_of(config.model.type)} cannot be predicted: sizes of its tensors depend on the "
            f"values of a batch ({error})",
            config.source,
        ) from error


def _batch_of(config: Config) -> Any:
    """A batch of a data rank, by one sample: its numbers count for nothing."""
    train = config.train.model_copy(update={"global_batch_size": 1, "batch_ramp": None})
    one = config.model_copy(update={"train": train})
    batch = next(iter(loaders_of(one, config.data, data_rank=0, data_size=1, device="cpu").train))
    read, size = batch_size_of(batch), config.train.global_batch_size // (config.parallel.data or 1)
    return map_batch(lambda x: x[:1].expand(size, *x.shape[1:]) if x.dim() and len(x) == read else x, batch)


@dataclass(frozen=True)
class LayoutFacts:
    """What is found out by running a microbatch under the layout of a plan.

    Attributes:
        model: what is known of its parameters.
        groups: of the optimizer.
        activations: of a microbatch, by stage.
    """

    model: ModelFacts
    groups: ParameterGroups | None
    activations: Mapping[int, StageActivations]


def layout_facts(config: Config, context: ParallelContext, batch: Any) -> LayoutFacts:
    """Of a resolved config's plan.

    Args:
        context: of a rank of it, of fake groups.
        batch: of a data rank.
    """
    pipeline = PipelineRuntime(config, context)
    groups: list[ParameterGroups | None] = []
    spec = config.model.spec()  # type: ignore[union-attr]
    factory = with_activation_checkpoint(lambda: MODELS.build(spec), config.train.activation_checkpoint)

    def prepare(whole: nn.Module) -> None:
        groups.append(make_groups(config.optimizer, whole))  # freezes parameters

    model = build(factory, context, materialize=False, prepare=prepare)
    partition = None
    if pipeline.last_stage:
        partition = make_partition(model, pipeline.rank_of, config.parallel.pipeline.split)
    with counted_fake_tensors() as fake, balanced_experts():
        give_sizes(model, context.precision)
        axes, accumulates = PlanAxes(config), config.schedule.microbatches > 1
        in_buckets = not (axes.stage and config.parallel.zero.stage)
        for param in model.parameters():
            is_bucketed = in_buckets and not set(axes.summed).isdisjoint(gradient_sum_axes(param, context))
            if param.requires_grad and (accumulates or is_bucketed):
                param.grad = torch.empty(param.shape, dtype=gradient_dtype(param))
        activations = _activations(config, context, model, partition, batch, fake)
        chain = list(partition.blocks) if partition is not None else pipeline_blocks(model) if is_chain(model) else None
        facts = facts_of(model, context, chain, groups[0])
    return LayoutFacts(facts, groups[0], activations)


def stages_of(config: Config, model: ModelFacts) -> list[RankStages]:
    """Of each pipeline rank of a plan.

    Raises:
        ValueError: for a model that cannot be cut into the stages of the schedule.
    """
    schedule, pipeline = config.schedule, config.parallel.pipeline
    actions = make_schedule(schedule.type, pipeline.size, schedule.microbatches, **schedule.options)
    rank_of = placement(actions)
    bounds = model.bounds(pipeline.split, len(rank_of))
    return [RankStages(rank, bounds, rank_of, of_rank) for rank, of_rank in enumerate(actions)]


def _memory_of(config: Config, facts: LayoutFacts) -> PlanMemory:
    accumulates, size = config.schedule.microbatches > 1, config.parallel.pipeline.size
    optimizer = OptimizerMemory(config, facts.groups)
    ranks: list[RankMemory] = []
    for stages in stages_of(config, facts.model):
        counted = stored_bytes(facts.model, config, stages, optimizer)
        activations = peak_of_step(stages.actions, facts.activations)
        if not accumulates:
            activations = max(0, activations - counted.gradients)
        if size > 1:
            activations += 2 * max(facts.activations[stage].passed for stage in stages.stages)
        ranks.append(RankMemory(len(ranks), stages.stages, max(in_flight(stages.actions)), counted, activations))
    return PlanMemory(tuple(ranks), tuple(_notes(config)))


def _activations(
    config: Config,
    context: ParallelContext,
    model: nn.Module,
    partition: Partition | None,
    batch: Any,
    fake: CountedFakeTensors,
) -> dict[int, StageActivations]:
    inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
    given = map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch)
    step_batch = inputs.split(given, config.schedule.microbatches)
    model.train()
    run = MicrobatchRun(loss_of(model, None), step_batch, inputs, context, fake)
    return run.stages(_stages_of(model, partition))


def _stages_of(model: nn.Module, partition: Partition | None) -> dict[int, list[BlockRun]]:
    """Stage -> its blocks; of a model that is no chain, itself."""
    if partition is not None:
        return {stage: runs_of(model, partition.blocks_of(stage)) for stage in range(partition.num_stages)}
    if is_chain(model) and not has_hooks(model):
        return {0: runs_of(model, pipeline_blocks(model))}
    return {0: [BlockRun(None, [model], 0)]}


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in _COUNTED_STRATEGIES:
        return []
    return [f"what the strategy {name_of(kind)} keeps itself (copies of parameters, messages) is not counted"]
