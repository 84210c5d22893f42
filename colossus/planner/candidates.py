"""The plans of a layout of a model on a number of devices. No torch.

The space of plans, on top of the space of layouts (`model_layouts`):

- pipelines of any size, by 1F1B, interleaved with 2, 4, 8, .. chunks, ZB-H1 and ZB-V (GPipe is never faster than 1F1B,
  and holds more);
- every number of microbatches of at most `MOST_TOKENS` tokens on a rank, or of the fewest samples that can be split;
- ZeRO of every stage, over all data ranks, those of a host, or without a pipeline half of them, and with stage 3 every
  scope of weights.

Other keys stay as in the config. So does a schedule class or a data-parallel strategy that the config names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from colossus.arithmetic import divisors, expert_factor
from colossus.config import Config, model_options
from colossus.config.plan_space import microbatch_counts, overrides_between, resized_plans
from colossus.config.plans import plan_problems, strategy_options
from colossus.config.schema import Parallel, PipelineSection, Schedule
from colossus.config.training import ActivationCheckpoint
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.model_layouts import SCOPES, ModelLayout, experts_fit

#: the most tokens of a microbatch on a rank: products do not get faster with more
MOST_TOKENS = 16_384
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-v")
#: tokens of a sample, for a model whose options do not say
_TOKENS = 256


def samples_of(config: Config) -> int:
    """Return the samples of a microbatch on a data rank."""
    return config.train.global_batch_size // (config.parallel.data or 1) // config.schedule.microbatches


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan whose sizes divide the model, the batch and the devices.

    Attributes:
        config: the resolved config of the plan.
        overrides: overrides of the user's file that give this plan.
    """

    config: Config
    overrides: tuple[str, ...]

    @property
    def samples(self) -> int:
        """Return the samples of a microbatch on a data rank."""
        return samples_of(self.config)

    @property
    def size(self) -> tuple[int, int]:
        """Return the pipeline ranks, and the samples of a microbatch."""
        return self.config.parallel.pipeline.size, self.samples

    @property
    def all_but_zero(self) -> tuple[Any, ...]:
        """Return a key that is equal for the plans of a layout that differ only in ZeRO."""
        parallel, schedule = self.config.parallel, self.config.schedule
        schedule_key = schedule.type, tuple(sorted(schedule.options.items())), schedule.microbatches
        return parallel.data, parallel.pipeline.size, parallel.pipeline.split, *schedule_key


def plans(fixed: FixedKeys, devices: int, layout: ModelLayout, *, hosts: int = 1) -> list[Candidate]:
    """Return every plan of a layout, those with few pipeline ranks first.

    Args:
        fixed: the config and the keys that every plan has.
        devices: ranks of a plan.
        layout: the layout.
        hosts: hosts that share the devices evenly.
    """
    stated, base = fixed.stated, fixed.config
    options, strategy = model_options(base), strategy_options(base)
    checkpointing = layout.activation_checkpoint
    base = base.model_copy(update={"train": base.train.model_copy(update={"activation_checkpoint": checkpointing})})
    train_changes = _checkpoint_changes(stated.train.activation_checkpoint, checkpointing)
    candidates = []
    for parallel, schedules, counts in _with_pipelines(fixed, devices, layout, options):
        if options is not None and options.check(parallel):
            continue
        for plan in _with_zero(fixed, parallel, strategy, devices // hosts):
            parallel_changes = _parallel_changes(stated.parallel, plan)
            for count in counts:
                own_schedules = [kind.model_copy(update={"microbatches": count}) for kind in schedules]
                planned = base.model_copy(update={"parallel": plan, "schedule": own_schedules[0]})
                if plan_problems(planned, plan, None) or (strategy is not None and strategy.check(planned)):
                    continue
                for schedule in own_schedules:
                    overrides = (*parallel_changes, *_schedule_changes(stated.schedule, schedule), *train_changes)
                    candidates.append(Candidate(planned.model_copy(update={"schedule": schedule}), overrides))
    return candidates


def representatives(fixed: FixedKeys, devices: int, layout: ModelLayout, *, hosts: int = 1) -> list[Config]:
    """Return a plan of a layout for each pipeline size, with the smallest microbatches, and ZeRO 1 if it is free.

    It takes the arguments of `plans`.
    """
    options, strategy = model_options(fixed.config), strategy_options(fixed.config)
    train = fixed.config.train.model_copy(update={"activation_checkpoint": layout.activation_checkpoint})
    configs = []
    for parallel, schedules, counts in _with_pipelines(fixed, devices, layout, options):
        forms = itertools.islice(_with_zero(fixed, parallel, strategy, devices // hosts), 2)
        plan = min(forms, key=lambda form: abs(form.zero.stage - 1), default=None)
        if plan is not None:
            schedule = schedules[0].model_copy(update={"microbatches": counts[-1]})
            update = {"parallel": plan, "schedule": schedule, "train": train}
            configs.append(fixed.config.model_copy(update=update))
    return configs


def fully_sharded(fixed: FixedKeys, config: Config) -> Config:
    """Return the plan with ZeRO 3 over all data ranks where it may: none of its size needs less."""
    parallel = config.parallel
    zero = parallel.zero.model_copy(update={"stage": 3, "shard": None})
    if (parallel.data or 1) * parallel.sequence.size == 1 or not fixed.allows("parallel.zero", zero):
        return config
    return config.model_copy(update={"parallel": parallel.model_copy(update={"zero": zero})})


def _with_pipelines(
    fixed: FixedKeys, devices: int, layout: ModelLayout, options: Any
) -> Iterator[tuple[Parallel, list[Schedule], list[int]]]:
    """Yield the layout's sections with each data and pipeline size that fits, its schedules and microbatches."""
    own = fixed.config.parallel
    expert = own.expert.model_copy(update={"size": layout.expert})
    sections = {"tensor": layout.tensor, "sequence": layout.sequence, "expert": expert}
    unsized = own.model_copy(update=sections)
    for parallel in resized_plans(unsized, devices, ["pipeline"]):
        pipeline = parallel.pipeline
        if isinstance(pipeline.split, tuple) and "parallel.pipeline.split" not in fixed.keys:
            pipeline = pipeline.model_copy(update={"split": "parameters"})
            parallel = parallel.model_copy(update={"pipeline": pipeline})
        if fixed.allows("parallel", parallel) and fixed.allows("parallel.pipeline", pipeline):
            schedules = _schedules(fixed, pipeline, getattr(options, "num_blocks", None))
            counts = _microbatches(fixed, parallel, options)
            if schedules and counts and experts_fit(parallel.data or 1, parallel.sequence.size, layout.expert):
                yield parallel, schedules, counts


def _schedules(fixed: FixedKeys, pipeline: PipelineSection, blocks: int | None) -> list[Schedule]:
    """Return the schedules for whose stages the model has enough blocks; their microbatches are to be set."""
    own, size = fixed.config.schedule, pipeline.size
    if own.type not in (*SCHEDULES, "gpipe") or ("schedule.type" in fixed.keys and own.type == "gpipe"):
        return [own] if blocks is None or size <= blocks else []
    schedules: list[tuple[int, Schedule]] = [(size, Schedule(type="1f1b"))]
    if size > 1:
        chunks, most = 2, 2 if blocks is None else blocks // size
        while chunks <= most:
            schedules.append((size * chunks, Schedule.model_validate({"type": "interleaved", "chunks": chunks})))
            chunks *= 2
        schedules += [(size, Schedule(type="zb-h1")), (2 * size, Schedule(type="zb-v"))]
    elif "schedule.type" in fixed.keys:  # without a pipeline all schedules are the same
        schedules = [(size, own)]
    return [
        kind
        for stages, kind in schedules
        if (blocks is None or stages <= blocks)
        and (isinstance(pipeline.split, str) or stages == len(pipeline.split))
        and fixed.allows("schedule", kind.model_copy(update={"microbatches": own.microbatches}))
    ]


def _microbatches(fixed: FixedKeys, parallel: Parallel, options: Any) -> list[int]:
    """Return the numbers of microbatches into which the batch of a data rank can be cut."""
    counts = microbatch_counts(fixed.config, parallel)
    if counts and "schedule.microbatches" in fixed.keys:
        return [fixed.config.schedule.microbatches]
    tokens = getattr(options, "seq_len", None) or getattr(options, "num_tokens", None) or _TOKENS
    most = max(1, MOST_TOKENS * parallel.sequence.size // tokens)
    # the last is of the fewest samples, one on each of the ranks into which the tensor mode splits a batch
    return [count for count in counts if counts[-1] <= most * count]


def _with_zero(fixed: FixedKeys, parallel: Parallel, options: Any, per_host: int) -> Iterator[Parallel]:
    """Yield a plan with every form of ZeRO.

    If the config names a strategy, which owns the data ranks as ZeRO does, the only form is the config's own.
    """
    zero, data = parallel.zero, parallel.data or 1
    if "strategy" in parallel.model_fields_set:
        forms = [options.zero_of(parallel) if zero.stage and options is not None else zero]
    else:
        stages = range(4) if data * parallel.sequence.size > 1 or "parallel.zero.stage" in fixed.keys else range(1)
        shards = [zero.shard] if "parallel.zero.shard" in fixed.keys else [None, *_shards(parallel, per_host)]
        forms = [
            zero.model_copy(update={"stage": stage, "shard": shard if stage else None})
            for stage in stages
            for shard in dict.fromkeys(shards if stage else [None])
        ]
    for form in forms:
        if not fixed.allows("parallel.zero", form) or (zero.offload and not form.stage):
            continue
        is_free = form.stage == 3 and parallel.tensor.mode == "1d" and "parallel.tensor.weights" not in fixed.keys
        for scope in SCOPES if is_free else [parallel.tensor.weights]:
            tensor = parallel.tensor.model_copy(update={"weights": scope})
            yield parallel.model_copy(update={"zero": form, "tensor": tensor})


def _shards(parallel: Parallel, per_host: int) -> list[int]:
    """Return the data ranks that share a copy: the most of one host, and without a pipeline half of all, too."""
    order, data = parallel.rank_order, parallel.data or 1
    inner = order[order.index("data") + 1 :]
    between = math.prod(getattr(parallel, axis).size for axis in inner)
    experts = expert_factor(data, parallel.sequence.size, parallel.expert.size)
    fits = [size for size in divisors(data)[1:] if size % experts == 0]
    of_host = [size for size in fits if size * between <= per_host][-1:]
    halves = [size for size in fits if size * between > per_host and 2 * size == data and parallel.pipeline.size == 1]
    return [size for size in (*of_host, *halves) if size < data]


# -- overrides ------------------------------------------------------------------------------------------------


def _parallel_changes(before: Parallel, after: Parallel) -> list[str]:
    """Return the overrides of ``parallel``, with data ranks and sequence mode, which a file may leave open."""
    changes = [f"parallel.data={after.data}"]
    if after.sequence.size > 1:
        changes.append(f"parallel.sequence.mode={after.sequence.mode}")
    return list(dict.fromkeys([*changes, *overrides_between(before, after, "parallel")]))


def _schedule_changes(before: Schedule, after: Schedule) -> list[str]:
    if before.options == after.options:
        return overrides_between(before, after, "schedule")
    options = [f"schedule.{key}={value!r}" for key, value in after.options.items()]
    return [f"schedule={after.type}", *options, f"schedule.microbatches={after.microbatches}"]


def _checkpoint_changes(before: ActivationCheckpoint, after: ActivationCheckpoint) -> list[str]:
    if before == after:
        return []
    own = ".type" if after.type != "none" and before.type != "none" else ""
    return [f"train.activation_checkpoint{own}={after.type}"]
