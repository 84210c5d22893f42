"""The memory of a plan, predicted: of the fullest rank of each pipeline rank, by kind, without a process or a device.

All ranks of one pipeline rank hold as much (shards are padded to equal sizes), so one of each is looked at.
"""

from __future__ import annotations

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
from colossus.layers.pipeline_block import NamedBlock, has_hooks, is_chain, pipeline_blocks
from colossus.planner.activations import MicrobatchRun, peak_of_step
from colossus.planner.balanced_experts import balanced_experts
from colossus.planner.block_runs import BlockRun, runs_of
from colossus.planner.fake_rank import fake_rank, give_sizes
from colossus.planner.fake_tensors import CountedFakeTensors, counted_fake_tensors
from colossus.planner.rank_memory import PlanMemory, RankMemory
from colossus.planner.stored import StoredParameters
from colossus.registry import MODELS
from colossus.schedule.actions import in_flight
from colossus.schedule.build import make_schedule
from colossus.schedule.partition import Partition, make_partition
from colossus.schedule.pipeline import PipelineRuntime
from colossus.tensor_parallel.dtypes import gradient_dtype

#: strategies that keep nothing of a model's size but buckets
COUNTED_STRATEGIES = ("all_reduce", "zero", "hierarchical")


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
        batch = sample_batch(config)
        with fake_rank(config) as context:
            return _of_rank(config, context, batch)
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


def sample_batch(config: Config) -> Any:
    """A batch of a data rank, by one sample: its numbers count for nothing."""
    train = config.train.model_copy(update={"global_batch_size": 1, "batch_ramp": None})
    one = config.model_copy(update={"train": train})
    batch = next(iter(loaders_of(one, config.data, data_rank=0, data_size=1, device="cpu").train))
    read, size = batch_size_of(batch), config.train.global_batch_size // (config.parallel.data or 1)
    return map_batch(lambda x: x[:1].expand(size, *x.shape[1:]) if x.dim() and len(x) == read else x, batch)


def model_on_meta(
    config: Config, context: ParallelContext
) -> tuple[nn.Module, Partition | None, ParameterGroups | None]:
    """The config's model with all stages of a rank's pipeline, its partition, the groups of its parameters."""
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
    return model, partition, groups[0]


def _of_rank(config: Config, context: ParallelContext, batch: Any) -> PlanMemory:
    model, partition, groups = model_on_meta(config, context)
    schedule = config.schedule
    size = context.size("pipeline")
    actions = make_schedule(schedule.type, size, schedule.microbatches, **schedule.options)
    accumulates = schedule.microbatches > 1
    with counted_fake_tensors() as fake, balanced_experts():
        give_sizes(model, context.precision)
        of_ranks = []
        for rank in range(size):
            own = [0] if partition is None else partition.stages_on(rank)
            names, chain = _names_on(model, partition, own), _chain_of(model, partition, own)
            buffers = _buffer_bytes(model, partition, own)
            of_ranks.append((own, StoredParameters(config, context, model, names, chain, buffers)))
        for _, stored in of_ranks:
            for param in stored.params:
                if param.requires_grad and (accumulates or stored.is_bucketed(param)):
                    param.grad = torch.empty(param.shape, dtype=gradient_dtype(param))
        stages = first_microbatch(config, context, model, batch, fake).stages(stages_of(model, partition))
        ranks: list[RankMemory] = []
        for (own, stored), of_rank in zip(of_ranks, actions, strict=True):
            counted = stored.count(groups, fake, accumulates=accumulates)
            activations = peak_of_step(of_rank, stages)
            if not accumulates:
                activations = max(0, activations - counted.gradients)
            if size > 1:
                activations += 2 * max(stages[stage].passed for stage in own)
            ranks.append(RankMemory(len(ranks), tuple(own), max(in_flight(of_rank)), counted, activations))
    return PlanMemory(tuple(ranks), tuple(_notes(config)))


def first_microbatch(
    config: Config, context: ParallelContext, model: nn.Module, batch: Any, fake: CountedFakeTensors
) -> MicrobatchRun:
    """The run of a step's first microbatch: ``model`` has sizes, ``batch`` is a data rank's."""
    inputs = Inputs(context, context.precision.data, pad=config.parallel.sequence.pad)
    given = map_batch(lambda x: torch.empty(x.shape, dtype=x.dtype), batch)
    step_batch = inputs.split(given, config.schedule.microbatches)
    model.train()
    return MicrobatchRun(loss_of(model, None), step_batch, inputs, context, fake)


def stages_of(model: nn.Module, partition: Partition | None) -> dict[int, list[BlockRun]]:
    """Stage -> its blocks; of a model that is no chain, itself."""
    if partition is not None:
        return {stage: runs_of(model, partition.blocks_of(stage)) for stage in range(partition.num_stages)}
    if is_chain(model) and not has_hooks(model):
        return {0: runs_of(model, pipeline_blocks(model))}
    return {0: [BlockRun(None, [model], 0)]}


def _names_on(model: nn.Module, partition: Partition | None, stages: list[int]) -> dict[str, bool]:
    """The parameters of a pipeline rank's stages, and whether other ranks have them, too."""
    if partition is None:
        return {name: False for name, _ in model.named_parameters()}
    here = set(stages)
    return {name: len(partition.ranks_of(name)) > 1 for name, used in partition.stages_of.items() if here & set(used)}


def _buffer_bytes(model: nn.Module, partition: Partition | None, stages: list[int]) -> int:
    """Of the buffers of a pipeline rank's stages, and of those that no block owns."""
    buffers = dict(model.named_buffers())
    if partition is not None:
        here = {name for stage in stages for block in partition.blocks_of(stage) for name in block.buffers}
        for name in {name for block in partition.blocks for name in block.buffers} - here:
            del buffers[name]
    return sum(buffer.nbytes for buffer in buffers.values())


def _chain_of(model: nn.Module, partition: Partition | None, stages: list[int]) -> list[NamedBlock] | None:
    if partition is not None:
        return [block for stage in stages for block in partition.blocks_of(stage)]
    return pipeline_blocks(model) if is_chain(model) else None


def _notes(config: Config) -> list[str]:
    kind = config.parallel.data_strategy["type"]
    if kind in COUNTED_STRATEGIES:
        return []
    return [f"what the strategy {name_of(kind)} keeps itself (copies of parameters, messages) is not counted"]
