"""The layouts of a model on so many devices: each needs a profile of the model of its own. No torch.

A layout is how tensors and tokens are split, over how many ranks experts are spread, what backward computes again. All
else of a plan is arithmetic on top of the profile (`candidates`). The space of layouts:

- tensor: 1D of any size, with activations split by tokens or not; 2D, 2.5D and 3D on squares, cubes and boxes whose
  sides are within a factor of two of each other, in 2.5D no deeper than wide, each with every scope of weights;
- sequence: ring and Ulysses of any size and their hybrids, beside 1D or no tensor parallelism;
- experts over every divisor of their number that divides data and sequence;
- activation checkpointing of no, of selected and of full blocks.

Other keys are those of the config. A model that declares no options may be able to do none of this: it has tensor,
sequence and expert parallelism only where the config has them already.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from colossus.arithmetic import divisors, expert_factor
from colossus.config import Config, model_options
from colossus.config.schema import SequenceSection, TensorSection
from colossus.config.training import ActivationCheckpoint
from colossus.planner.kept import Kept
from colossus.registry import TENSOR_MODES

#: for how long a gathered weight is held
SCOPES = ("matmul", "microbatch", "step")
_MODES = ("1d", "2d", "2.5d", "3d")
_KINDS = ("none", "selective", "full")


@dataclass(frozen=True)
class ModelLayout:
    """What needs a profile of the model of its own.

    Attributes:
        tensor: with any scope of weights where the mode is 1d: there it is of ZeRO 3, and belongs to the plan.
        sequence: its mode is known where its size is above one.
        expert: ranks that share experts.
    """

    tensor: TensorSection
    sequence: SequenceSection
    expert: int
    activation_checkpoint: ActivationCheckpoint

    @property
    def ranks(self) -> int:
        """Of one copy of the model, pipelines aside."""
        return self.tensor.size * self.sequence.size


def layouts(
    config: Config, devices: int, *, hosts: int = 1, keep: Mapping[str, Any] | None = None
) -> list[ModelLayout]:
    """Every layout of the space, the likely ones first: on one host, of few ranks, with little computed again.

    Args:
        hosts: over which the devices are spread equally.
        keep: what stays as given, see `Kept`; precision and whatever else is no part of a plan always does.

    Raises:
        ConfigError: for options of the model, and for ``keep``.
    """
    kept = Kept.of(config, keep)
    options = model_options(kept.config)
    found = [
        ModelLayout(tensor, sequence, expert, again)
        for tensor, sequence in _splits(kept, options, devices)
        for expert in _experts(kept, options, devices, tensor, sequence)
        for again in _checkpoints(kept, options)
    ]

    def unlikely(layout: ModelLayout) -> tuple[Any, ...]:
        kind = layout.activation_checkpoint.type
        return layout.ranks * hosts > devices, layout.ranks, _MODES.index(layout.tensor.mode), _KINDS.index(kind)

    return sorted(found, key=unlikely)


def _checkpoints(kept: Kept, options: Any) -> list[ActivationCheckpoint]:
    """Of kinds; which blocks or modules is as given."""
    own = kept.config.train.activation_checkpoint
    if getattr(options, "activation_checkpoint", "none") != "none":
        return [own]
    found = [ActivationCheckpoint(), *(own.model_copy(update={"type": kind}) for kind in _KINDS[1:])]
    return [again for again in found if kept.allows("train.activation_checkpoint", again)]


def _experts(kept: Kept, options: Any, devices: int, tensor: TensorSection, sequence: SequenceSection) -> list[int]:
    """Numbers of ranks that may share experts in some plan of these sizes: of no pipeline, say."""
    own, experts = kept.config.parallel.expert.size, getattr(options, "experts", None)
    if "parallel.expert.size" in kept.keys:
        sizes = [own]
    else:
        sizes = divisors(own if options is None else 1 if experts is None else experts.num)
    return [size for size in sizes if experts_fit(devices // tensor.size // sequence.size, sequence.size, size)]


def experts_fit(data: int, sequence: int, expert: int) -> bool:
    """Whether so many ranks that share experts are a part of those of data and sequence."""
    try:
        return expert_factor(data, sequence, expert) > 0
    except ValueError:
        return False


# -- tensor and sequence --------------------------------------------------------------------------------------


def _splits(kept: Kept, options: Any, devices: int) -> Iterator[tuple[TensorSection, SequenceSection]]:
    """Those of both together that fit devices, model and batch."""
    own, batch = kept.config.parallel, kept.config.train.global_batch_size
    for tensor in _tensors(kept, options, devices):
        mode = TENSOR_MODES.get(tensor.mode)
        try:
            ways = mode.batch_ways(mode.axis_sizes(tensor.size, tensor.depth, tensor.shape))
        except ValueError:
            continue
        if batch % ways:
            continue
        for sequence in _sequences(kept, options, devices // tensor.size):
            if sequence.size > 1 and tensor.mode != "1d" and (tensor, sequence) != (own.tensor, own.sequence):
                continue
            update = {"tensor": tensor, "sequence": sequence, "pipeline": own.pipeline.model_copy(update={"size": 1})}
            if options is None or not options.check(own.model_copy(update=update)):
                yield tensor, sequence


def _tensors(kept: Kept, options: Any, devices: int) -> list[TensorSection]:
    own = kept.config.parallel.tensor
    found = [own.model_copy(update={"size": 1, "mode": "1d", "shape": None, "depth": None, "sequence_sharded": False})]
    if options is not None or own.size > 1:
        for size in divisors(devices)[1:]:
            for mode in _MODES:
                for sides in _sides(mode, size):
                    found += _with_flags(_of_sides(own, mode, sides))
    if "parallel.tensor.shape" in kept.keys:
        found = _with_flags(own) if devices % own.size == 0 else []
    return [tensor for tensor in dict.fromkeys(found) if kept.allows("parallel.tensor", tensor)]


def _sides(mode: str, size: int) -> Iterator[tuple[int, ...]]:
    """Ranks along each axis of a mode."""
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


def _of_sides(own: TensorSection, mode: str, sides: tuple[int, ...]) -> TensorSection:
    """The shape is said only where the mode would not choose it by itself."""
    size, depth = math.prod(sides), sides[0] if mode == "2.5d" else None
    shape, chosen = None, TENSOR_MODES.get(mode)
    try:
        if tuple(chosen.axis_sizes(size, depth).values()) != sides:
            shape = sides
    except ValueError:
        shape = sides
    return own.model_copy(
        update={"mode": mode, "size": size, "shape": shape, "depth": depth if shape is None else None}
    )


def _with_flags(tensor: TensorSection) -> list[TensorSection]:
    """With activations split by tokens or not, or with every scope of weights, whichever the mode knows."""
    if tensor.mode == "1d":
        return [tensor.model_copy(update={"sequence_sharded": is_split}) for is_split in (False, True)]
    return [tensor.model_copy(update={"sequence_sharded": False, "weights": scope}) for scope in SCOPES]


def _sequences(kept: Kept, options: Any, ranks: int) -> list[SequenceSection]:
    own = kept.config.parallel.sequence
    found = [own.model_copy(update={"size": 1, "mode": None, "ulysses": None})]
    if options is not None or own.size > 1:
        for size in divisors(ranks)[1:]:
            ways = [("ring", None), ("ulysses", None), *(("hybrid", inner) for inner in divisors(size)[1:-1])]
            found += [own.model_copy(update={"size": size, "mode": mode, "ulysses": inner}) for mode, inner in ways]
    return [sequence for sequence in dict.fromkeys(found) if kept.allows("parallel.sequence", sequence)]
