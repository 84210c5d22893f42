"""The layouts of a model on a number of devices. Each layout needs a profile of its own. No torch.

A layout says how tensors and tokens are split, over how many ranks experts are spread, and what backward recomputes.
The rest of a plan is arithmetic on top of the profile (`candidates`). The space of layouts:

- tensor: 1D of any size, with activations split by tokens or not; 2D, 2.5D and 3D on squares, cubes and boxes whose
  sides are within a factor of two of each other, in 2.5D no deeper than wide, each with every scope of weights;
- sequence: ring and Ulysses of any size and their hybrids, beside 1D or no tensor parallelism;
- experts over every divisor of their number that divides data and sequence;
- activation checkpointing of type none, selective or full.

Other keys stay as in the config. A model without declared options may support none of this: it has tensor, sequence and
expert parallelism only if the config has them already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from colossus.arithmetic import divisors, expert_factor
from colossus.config import model_options
from colossus.config.plan_space import microbatch_counts
from colossus.config.schema import Parallel, SequenceSection, TensorSection
from colossus.config.training import ActivationCheckpoint
from colossus.planner.fixed_keys import FixedKeys
from colossus.registry import TENSOR_MODES

#: how long a gathered weight stays whole
SCOPES = ("matmul", "microbatch", "step")
_MODES = ("1d", "2d", "2.5d", "3d")
_KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelLayout:
    """A layout of a model.

    Attributes:
        tensor: the section; in mode 1d its scope of weights is that of ZeRO-3, which the plan chooses.
        sequence: the section; it has a mode if its size is above one.
        expert: ranks that share experts.
        activation_checkpoint: the section.
    """

    tensor: TensorSection
    sequence: SequenceSection
    expert: int
    activation_checkpoint: ActivationCheckpoint

    @property
    def ranks(self) -> int:
        """Return the ranks of one copy of a stage: those of tensor and sequence parallelism."""
        return self.tensor.size * self.sequence.size


def layouts(fixed: FixedKeys, devices: int, *, hosts: int = 1) -> list[ModelLayout]:
    """Return every layout of the space, the likely ones first: on one host, of few ranks, with little recomputation.

    Args:
        fixed: the config and the keys that every plan has; keys that are no part of a plan never change.
        devices: ranks of a plan.
        hosts: hosts over which the devices are spread evenly.

    Raises:
        ConfigError: the options of the model are wrong.
    """
    options = model_options(fixed.config)
    every = [
        ModelLayout(tensor, sequence, expert, checkpointing)
        for tensor, sequence in _splits(fixed, options, devices)
        for expert in _experts(fixed, options, devices, tensor, sequence)
        for checkpointing in _checkpoints(fixed, options)
    ]

    def unlikely(layout: ModelLayout) -> tuple[Any, ...]:
        kind = layout.activation_checkpoint.type
        return layout.ranks * hosts > devices, layout.ranks, _MODES.index(layout.tensor.mode), _KINDS.index(kind)

    return sorted(every, key=unlikely)


def _checkpoints(fixed: FixedKeys, options: Any) -> list[ActivationCheckpoint]:
    """Return a section for each type of activation checkpointing; its blocks or modules stay as in the config.

    A model whose own options set it has no choice.
    """
    own = fixed.config.train.activation_checkpoint
    if getattr(options, "activation_checkpoint", "none") != "none":
        return [own]
    sections = [ActivationCheckpoint(), *(own.model_copy(update={"type": kind}) for kind in _KINDS[1:])]
    return [section for section in sections if fixed.allows("train.activation_checkpoint", section)]


def _experts(
    fixed: FixedKeys, options: Any, devices: int, tensor: TensorSection, sequence: SequenceSection
) -> list[int]:
    """Return the numbers of ranks that can share experts in some plan with these sizes, at least without a pipeline."""
    own, experts = fixed.config.parallel.expert.size, getattr(options, "experts", None)
    if "parallel.expert.size" in fixed.keys:
        sizes = [own]
    else:
        sizes = divisors(own if options is None else 1 if experts is None else experts.num)
    return [size for size in sizes if experts_fit(devices // tensor.size // sequence.size, sequence.size, size)]


def experts_fit(data: int, sequence: int, expert: int) -> bool:
    """Return whether ``expert`` ranks that share experts divide the data and sequence ranks."""
    try:
        return expert_factor(data, sequence, expert) > 0
    except ValueError:
        return False


# -- tensor and sequence --------------------------------------------------------------------------------------


def _splits(fixed: FixedKeys, options: Any, devices: int) -> Iterator[tuple[TensorSection, SequenceSection]]:
    """Yield the tensor and sequence sections that together fit devices, model and batch."""
    own = fixed.config.parallel
    for tensor in _tensors(fixed, options, devices):
        if not microbatch_counts(fixed.config, own.model_copy(update={"data": 1, "tensor": tensor})):
            continue
        for sequence in _sequences(fixed, options, devices // tensor.size):
            if sequence.size > 1 and tensor.mode != "1d" and (tensor, sequence) != (own.tensor, own.sequence):
                continue
            update = {"tensor": tensor, "sequence": sequence, "pipeline": own.pipeline.model_copy(update={"size": 1})}
            if options is None or not options.check(own.model_copy(update=update)):
                yield tensor, sequence


def _tensors(fixed: FixedKeys, options: Any, devices: int) -> list[TensorSection]:
    own = fixed.config.parallel.tensor
    single = {"size": 1, "mode": "1d", "shape": None, "depth": None, "sequence_sharded": False}
    sections = [own.model_copy(update=single)]
    if options is not None or own.size > 1:
        for size in divisors(devices)[1:]:
            for mode in _MODES:
                for sides in _sides(mode, size):
                    sections += _with_flags(_with_sides(own, mode, sides))
    if "parallel.tensor.shape" in fixed.keys:
        sections = _with_flags(own) if devices % own.size == 0 else []
    return [tensor for tensor in dict.fromkeys(sections) if fixed.allows("parallel.tensor", tensor)]


def _sides(mode: str, size: int) -> Iterator[tuple[int, ...]]:
    """Yield the ranks along each axis of a mode."""
    if mode == "1d":
        yield (size,)
        return
    for depth in divisors(size) if mode != "2d" else [1]:
        for row in divisors(size // depth):
            box = (depth, row, size // depth // row)
            near = box if mode == "3d" else box[1:]
            is_even = min(near) > 1 and max(near) <= 2 * min(near)
            if is_even and (mode != "2.5d" or 1 < depth <= min(near)):
                yield near if mode == "2d" else box


def _with_sides(own: TensorSection, mode: str, sides: tuple[int, ...]) -> TensorSection:
    """Return the section with these sides; it names the shape only if the mode would choose another one."""
    size, depth = math.prod(sides), sides[0] if mode == "2.5d" else None
    by_depth, by_shape = {"shape": None, "depth": depth}, {"shape": sides, "depth": None}
    try:
        is_chosen = tuple(TENSOR_MODES.get(mode).axis_sizes(size, depth).values()) == sides
    except ValueError:
        is_chosen = False
    return own.model_copy(update={"mode": mode, "size": size, **(by_depth if is_chosen else by_shape)})


def _with_flags(tensor: TensorSection) -> list[TensorSection]:
    """Return the section in each variant of its mode: activations split by tokens or not, or each scope of weights."""
    if tensor.mode == "1d":
        return [tensor.model_copy(update={"sequence_sharded": is_split}) for is_split in (False, True)]
    return [tensor.model_copy(update={"sequence_sharded": False, "weights": scope}) for scope in SCOPES]


def _sequences(fixed: FixedKeys, options: Any, ranks: int) -> list[SequenceSection]:
    own = fixed.config.parallel.sequence
    sections = [own.model_copy(update={"size": 1, "mode": None, "ulysses": None})]
    if options is not None or own.size > 1:
        for size in divisors(ranks)[1:]:
            modes = [("ring", None), ("ulysses", None), *(("hybrid", inner) for inner in divisors(size)[1:-1])]
            sections += [own.model_copy(update={"size": size, "mode": mode, "ulysses": inner}) for mode, inner in modes]
    return [sequence for sequence in dict.fromkeys(sections) if fixed.allows("parallel.sequence", sequence)]


# -- usual plans ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UsualPlan:
    """A kind of plan that people run: FSDP, HSDP, and 1D in a host beside FSDP or a pipeline.

    Attributes:
        name: its name.
        tensor: ranks of 1D tensor parallelism.
        is_split: whether these split activations by tokens.
        has_pipeline: whether it has a pipeline, and ZeRO 1 at most, or ZeRO 3.
        by_host: whether copies of the weights are shared by the ranks of a host, not by all.
    """

    name: str
    tensor: int = 1
    is_split: bool = False
    has_pipeline: bool = False
    by_host: bool = False

    def layouts(self, every: Sequence[ModelLayout], per_host: int) -> Iterator[ModelLayout]:
        """Yield its layouts, those with little recomputation first, with experts over the most ranks of a host."""
        own = [layout for layout in every if self._has(layout)]
        experts = max((layout.expert for layout in own if layout.expert <= per_host), default=1)
        yield from (layout for layout in own if layout.expert == experts)

    def _has(self, layout: ModelLayout) -> bool:
        tensor, is_alone = layout.tensor, layout.sequence.size == 1
        return is_alone and (tensor.mode, tensor.size, tensor.sequence_sharded) == ("1d", self.tensor, self.is_split)

    def allows(self, parallel: Parallel) -> bool:
        """Return whether a plan of one of its layouts is of this kind."""
        zero, pipeline = parallel.zero, parallel.pipeline.size
        if self.has_pipeline:
            return pipeline > 1 and zero.stage < 2 and zero.shard is None
        return pipeline == 1 and zero.stage == 3 and (zero.shard is not None) == self.by_host


def usual_plans(per_host: int) -> list[UsualPlan]:
    """Return the kinds of plans for hosts of ``per_host`` devices."""
    kinds = [UsualPlan("FSDP"), UsualPlan("HSDP", by_host=True)]
    if per_host > 1:
        for is_split in (False, True):
            name = f"1D{' split' * is_split}"
            kinds += [
                UsualPlan(f"{name} x FSDP", per_host, is_split),
                UsualPlan(f"{name} x pipeline", per_host, is_split, has_pipeline=True),
            ]
    return kinds
