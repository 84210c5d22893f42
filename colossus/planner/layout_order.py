"""Which layouts a search looks at first, and which are next to a good one. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from colossus.arithmetic import divisors
from colossus.config import Config, model_options
from colossus.planner.model_layouts import ModelLayout, experts_fit
from colossus.registry import TENSOR_MODES

#: ranks that share a sequence, to begin with: rings are profiled in as many steps
_FEW = 4


def is_plain(layout: ModelLayout) -> bool:
    """Whether it is one of those that a search begins with.

    Of 1D tensor parallelism the layouts whose activations are split by tokens, which send as much and keep less; of
    other modes those that gather weights once in a step; sequences over few ranks, by ring or Ulysses; no or full
    checkpointing.
    """
    tensor, sequence = layout.tensor, layout.sequence
    if tensor.mode == "1d":
        is_plain_tensor = tensor.size == 1 or tensor.sequence_sharded
    else:
        is_plain_tensor = tensor.weights == "step"
    is_plain_sequence = sequence.mode != "hybrid" and sequence.size <= _FEW
    return is_plain_tensor and is_plain_sequence and layout.activation_checkpoint.type != "selective"


def first_of_each_kind(every: Sequence[ModelLayout], likely: Callable[[ModelLayout], float]) -> list[ModelLayout]:
    """Of each mode and size of tensor parallelism, and number of ranks that share experts, the likeliest plain layout:
    with nothing computed again, if any plan of it may fit. Of a model that has none of these, the first layouts."""
    found: dict[Any, tuple[tuple[bool, float], ModelLayout]] = {}
    for layout in filter(is_plain, every):
        kind = layout.tensor.mode, layout.tensor.size, layout.expert
        rank = layout.activation_checkpoint.type != "none", likely(layout)
        if rank[1] < float("inf") and (kind not in found or rank < found[kind][0]):
            found[kind] = rank, layout
    return [layout for _, layout in found.values()] or [*every[:_FEW]]


def recomputed(layout: ModelLayout, every: Sequence[ModelLayout]) -> list[ModelLayout]:
    """The same layout with full checkpointing."""
    return [
        other
        for other in every
        if (other.tensor, other.sequence, other.expert) == (layout.tensor, layout.sequence, layout.expert)
        and other.activation_checkpoint.type == "full"
    ]


def neighbours(layout: ModelLayout, every: Sequence[ModelLayout]) -> Iterator[ModelLayout]:
    """The layouts that differ in one thing: twice or half the ranks that share a sequence or experts, another mode or
    size of tensor parallelism, what is computed again."""
    for other in every:
        changed = [
            other.tensor != layout.tensor,
            other.sequence != layout.sequence,
            other.expert != layout.expert,
            other.activation_checkpoint != layout.activation_checkpoint,
        ]
        if sum(changed) == 1 and _is_near(layout, other):
            yield other


def _is_near(one: ModelLayout, other: ModelLayout) -> bool:
    pairs = [(one.tensor.size, other.tensor.size), (one.sequence.size, other.sequence.size), (one.expert, other.expert)]
    return all(a <= 2 * b and b <= 2 * a for a, b in pairs)


def representatives(config: Config, devices: int, layout: ModelLayout) -> list[Config]:
    """A plan of each size of pipeline, as far as sizes divide: with as small microbatches as can be, and ZeRO 1."""
    parallel, train, tensor = config.parallel, config.train, layout.tensor
    ways = 1
    if tensor.size > 1:
        mode = TENSOR_MODES.get(tensor.mode)
        ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
    of_train = train.model_copy(update={"activation_checkpoint": layout.activation_checkpoint})
    found = []
    most = getattr(model_options(config), "num_blocks", devices)
    for stages in divisors(devices // layout.ranks):
        if stages > most:
            break
        data = devices // layout.ranks // stages
        count, rest = divmod(train.global_batch_size, data * ways)
        if rest or not count:
            continue
        zero = parallel.zero.model_copy(update={"stage": 1 if data > 1 else 0, "shard": None})
        pipeline = parallel.pipeline.model_copy(update={"size": stages})
        expert = parallel.expert.model_copy(update={"size": layout.expert})
        update = {"data": data, "pipeline": pipeline, "tensor": tensor, "sequence": layout.sequence, "expert": expert}
        schedule = type(config.schedule)(microbatches=count)
        plan = parallel.model_copy(update={**update, "zero": zero})
        if experts_fit(data, layout.sequence.size, layout.expert):
            found.append(config.model_copy(update={"parallel": plan, "schedule": schedule, "train": of_train}))
    return found
