"""All plans of a layout of a model on so many devices. No torch.

The space of plans, on top of that of layouts (`model_layouts`):

- pipelines of any size, by 1F1B, interleaved with 2, 4, 8, .. chunks, ZB-H1 and ZB-V (GPipe is never faster than 1F1B,
  and holds more);
- every number of microbatches of at most `MOST_TOKENS` tokens on a rank, or of the fewest samples that can be split;
- ZeRO of every stage, over all data ranks or over those of a host, and of stage 3 every scope of weights.

Other keys are those of the config, and so is a schedule or a data-parallel strategy of the config's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from colossus.arithmetic import divisors, expert_factor
from colossus.config import Config, model_options
from colossus.config.plans import plan_problems, strategy_options
from colossus.config.schema import Parallel, PipelineSection, Schedule
from colossus.config.training import ActivationCheckpoint
from colossus.planner.kept import Kept
from colossus.planner.model_layouts import SCOPES, ModelLayout, experts_fit
from colossus.registry import TENSOR_MODES

#: of a microbatch on a rank: products do not get faster with more
MOST_TOKENS = 16_384
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
#: of a sample of a model that does not say
_TOKENS = 256


def samples_of(config: Config) -> int:
    """Of a microbatch of a data rank."""
    return config.train.global_batch_size // (config.parallel.data or 1) // config.schedule.microbatches


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan that fits by arithmetic.

    Attributes:
        config: resolved.
        overrides: what a user types behind the file to have this plan.
    """

    config: Config
    overrides: tuple[str, ...]

    @property
    def samples(self) -> int:
        """Of a microbatch of a data rank."""
        return samples_of(self.config)

    @property
    def size(self) -> tuple[int, int]:
        """Stages, and samples of a microbatch."""
        return self.config.parallel.pipeline.size, self.samples

    @property
    def all_but_zero(self) -> tuple[Any, ...]:
        """What is the same for plans of a layout that differ in ZeRO only."""
        parallel, schedule = self.config.parallel, self.config.schedule
        of_schedule = schedule.type, tuple(sorted(schedule.options.items())), schedule.microbatches
        return parallel.data, parallel.pipeline.size, parallel.pipeline.split, *of_schedule


def plans(
    config: Config,
    devices: int,
    layout: ModelLayout,
    *,
    hosts: int = 1,
    keep: Mapping[str, Any] | None = None,
    blocks: int | None = None,
) -> list[Candidate]:
    """Every plan of a layout, of few pipeline ranks first.

    Args:
        config: its own plan counts for nothing but for what is kept.
        blocks: into how many stages the model can be cut at most; None: what its options say, else any number.
    """
    kept = Kept.of(config, keep)
    base, options, of_strategy = kept.config, model_options(kept.config), strategy_options(kept.config)
    blocks = getattr(options, "num_blocks", None) if blocks is None else blocks
    again = layout.activation_checkpoint
    base = base.model_copy(update={"train": base.train.model_copy(update={"activation_checkpoint": again})})
    of_train = _checkpoint_changes(config.train.activation_checkpoint, again)
    found = []
    for parallel in _with_pipelines(kept, devices, layout):
        if options is not None and options.check(parallel):
            continue
        counts = _microbatches(kept, parallel, options)
        schedules = _schedules(kept, parallel.pipeline, blocks)
        if not counts or not schedules or not experts_fit(parallel.data or 1, parallel.sequence.size, layout.expert):
            continue
        for plan in _with_zero(kept, parallel, of_strategy, devices // hosts):
            of_parallel = _parallel_changes(config.parallel, plan)
            for count in counts:
                each = [kind.model_copy(update={"microbatches": count}) for kind in schedules]
                one = base.model_copy(update={"parallel": plan, "schedule": each[0]})
                if plan_problems(one, plan, None) or (of_strategy is not None and of_strategy.check(one)):
                    continue
                for schedule in each:
                    overrides = (*of_parallel, *_schedule_changes(config.schedule, schedule), *of_train)
                    found.append(Candidate(one.model_copy(update={"schedule": schedule}), overrides))
    return found


def _with_pipelines(kept: Kept, devices: int, layout: ModelLayout) -> Iterator[Parallel]:
    """With data and pipeline that fit the devices and what is kept."""
    own, ranks = kept.config.parallel, devices // layout.ranks
    expert = own.expert.model_copy(update={"size": layout.expert})
    sections = {"tensor": layout.tensor, "sequence": layout.sequence, "expert": expert}
    for size in divisors(ranks):
        pipeline = own.pipeline.model_copy(update={"size": size})
        if isinstance(pipeline.split, tuple) and "parallel.pipeline.split" not in kept.keys:
            pipeline = pipeline.model_copy(update={"split": "parameters"})
        parallel = own.model_copy(update={"data": ranks // size, "pipeline": pipeline, **sections})
        if kept.allows("parallel", parallel) and kept.allows("parallel.pipeline", pipeline):
            yield parallel


def _schedules(kept: Kept, pipeline: PipelineSection, blocks: int | None) -> list[Schedule]:
    """Those whose stages the model has blocks for, with any number of microbatches."""
    own, size = kept.config.schedule, pipeline.size
    if own.type not in (*SCHEDULES, "gpipe") or ("schedule.type" in kept.keys and own.type == "gpipe"):
        return [own] if blocks is None or size <= blocks else []
    found: list[tuple[int, Schedule]] = [(size, Schedule(type="1f1b"))]
    if size > 1:
        chunks, most = 2, 2 if blocks is None else blocks // size
        while chunks <= most:
            found.append((size * chunks, Schedule.model_validate({"type": "interleaved", "chunks": chunks})))
            chunks *= 2
        found += [(size, Schedule(type="zb-h1")), (2 * size, Schedule(type="zb-v"))]
    elif "schedule.type" in kept.keys:  # without a pipeline all are one
        found = [(size, own)]
    return [
        kind
        for stages, kind in found
        if (blocks is None or stages <= blocks)
        and (isinstance(pipeline.split, str) or stages == len(pipeline.split))
        and kept.allows("schedule", kind.model_copy(update={"microbatches": own.microbatches}))
    ]


def _microbatches(kept: Kept, parallel: Parallel, options: Any) -> list[int]:
    """Numbers of them into which the batch of a data rank can be cut."""
    train, tensor, sequence = kept.config.train, parallel.tensor, parallel.sequence.size
    batch, rest = divmod(train.global_batch_size, parallel.data or 1)
    mode = TENSOR_MODES.get(tensor.mode)
    ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    if rest or batch % ways:
        return []
    if "schedule.microbatches" in kept.keys:
        return [kept.config.schedule.microbatches]
    tokens = getattr(options, "seq_len", None) or getattr(options, "num_tokens", None) or _TOKENS
    # of each of `ways` ranks
    samples = [each for each in divisors(batch // ways) if each == 1 or each * tokens <= MOST_TOKENS * sequence]
    return [batch // ways // each for each in reversed(samples)]


def _with_zero(kept: Kept, parallel: Parallel, options: Any, per_host: int) -> Iterator[Parallel]:
    """With every form of ZeRO; as given beside a strategy that is given, which is of the data ranks, too."""
    zero, data = parallel.zero, parallel.data or 1
    if "strategy" in parallel.model_fields_set:
        found = [options.zero_of(parallel) if zero.stage and options is not None else zero]
    else:
        stages = range(4) if data * parallel.sequence.size > 1 or "parallel.zero.stage" in kept.keys else range(1)
        shards = [zero.shard] if "parallel.zero.shard" in kept.keys else [None, _shard_of_host(parallel, per_host)]
        found = [
            zero.model_copy(update={"stage": stage, "shard": shard if stage else None})
            for stage in stages
            for shard in dict.fromkeys(shards if stage else [None])
        ]
    for each in found:
        if not kept.allows("parallel.zero", each) or (zero.offload and not each.stage):
            continue
        is_free = each.stage == 3 and parallel.tensor.mode == "1d" and "parallel.tensor.weights" not in kept.keys
        for scope in SCOPES if is_free else [parallel.tensor.weights]:
            tensor = parallel.tensor.model_copy(update={"weights": scope})
            yield parallel.model_copy(update={"zero": each, "tensor": tensor})


def _shard_of_host(parallel: Parallel, per_host: int) -> int | None:
    """The most data ranks of one host that can share a copy; None where these are all, or one."""
    order, data = parallel.rank_order, parallel.data or 1
    inner = order[order.index("data") + 1 :]
    between = math.prod(getattr(parallel, axis).size for axis in inner)
    experts = expert_factor(data, parallel.sequence.size, parallel.expert.size)
    fits = [each for each in divisors(data) if each * between <= per_host and each % experts == 0]
    return fits[-1] if fits and 1 < fits[-1] < data else None


# -- overrides ------------------------------------------------------------------------------------------------


def _changes(before: BaseModel, after: BaseModel, path: str) -> list[str]:
    """The overrides that make one section of the other."""
    found = []
    for key in type(after).model_fields:
        old, new = getattr(before, key), getattr(after, key)
        if old == new:
            continue
        if isinstance(old, BaseModel) and isinstance(new, BaseModel):
            found += _changes(old, new, f"{path}.{key}")
        else:
            found.append(f"{path}.{key}={new if isinstance(new, str) else repr(new).replace(' ', '')}")
    return found


def _parallel_changes(before: Parallel, after: Parallel) -> list[str]:
    """The number of data ranks and the mode of sequence parallelism are always said: a file may leave them open."""
    found = [f"parallel.data={after.data}"]
    if after.sequence.size > 1:
        found.append(f"parallel.sequence.mode={after.sequence.mode}")
    return list(dict.fromkeys([*found, *_changes(before, after, "parallel")]))


def _schedule_changes(before: Schedule, after: Schedule) -> list[str]:
    if before.options == after.options:
        return _changes(before, after, "schedule")
    options = [f"schedule.{key}={value!r}" for key, value in after.options.items()]
    return [f"schedule={after.type}", *options, f"schedule.microbatches={after.microbatches}"]


def _checkpoint_changes(before: ActivationCheckpoint, after: ActivationCheckpoint) -> list[str]:
    if before == after:
        return []
    own = ".type" if after.type != "none" and before.type != "none" else ""
    return [f"train.activation_checkpoint{own}={after.type}"]
