"""What a rank holds under ZeRO, in bytes: a formula over sizes, no torch.

Of the parameters of a rank (its stages, its tensor-parallel shards), W bytes whole, over which n ranks share rows:

| bytes, at most | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| whole parameters between steps | W | W | 0 |
| whole parameters in a step | W | W | root and two blocks; ``microbatch``, ``step``: W |
| stored rows beside them | 0 | 0 | W/n |
| gradients between steps | W/n | W/n | W/n |
| whole gradients in a step | W | W | root and one block; ``step``: W |
| optimizer, k states | k W/n | k W/n | k W/n |

Rows are cut in dim 0, and each rank has as many: W/n is rounded up to whole rows. Stages 1 and 2 have stored rows
beside the whole parameters, too, for what is cast, offloaded, or holds several logical parameters (fused query, key
and value). The root block is what belongs to no block of the model, or to several; it stays for the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class ParameterSize:
    """A parameter as a rank computes with it.

    Attributes:
        shape: whole, on this rank.
        rows: of each logical parameter in it, in dim 0.
        ranks: that share its rows.
        computed, stored, gradient: bytes of an element.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    ranks: int
    computed: int = 4
    stored: int = 4
    gradient: int = 4
    is_trainable: bool = True

    @cached_property
    def elements(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def elements_per_rank(self) -> int:
        """Of the rows that one rank stores, with the padding of the last ones."""
        return sum(-(-rows // self.ranks) for rows in self.rows) * math.prod(self.shape[1:])

    def is_view(self, stage: int, offload: bool) -> bool:
        """Whether the stored rows are a view of the whole parameter."""
        return stage < 3 and not offload and len(self.rows) == 1 and self.computed == self.stored


@dataclass(frozen=True)
class ZeroMemory:
    """Bytes of one rank; see the table.

    Attributes:
        stored: rows that are no views of whole parameters; on the host where they are offloaded.
        whole: parameters between steps.
        whole_peak: parameters at most during a step.
        gradients: between steps.
        gradients_peak: whole ones at most during a step of several microbatches. Their sums come beside them, and,
            where they do not travel through shared memory, up to two buffers that are being reduced.
        optimizer: its states.
    """

    stored: int
    whole: int
    whole_peak: int
    gradients: int
    gradients_peak: int
    optimizer: int


def zero_memory(
    blocks: Sequence[Sequence[ParameterSize]],
    root: Sequence[ParameterSize],
    *,
    stage: int,
    scope: str = "matmul",
    states: int = 2,
    offload: bool = False,
) -> ZeroMemory:
    """The memory of a rank.

    Args:
        blocks, root: the parameters of each block, in the order in which they run, and of the root block. Parameters
            without dims are not cut and not counted; under stages 1 and 2 the same holds for those that get no
            gradient.
        scope: ``parallel.tensor.weights``.
        states: tensors of a parameter's size that the optimizer keeps: AdamW 2, SGD with momentum 1.
    """
    held = [[one for one in block if one.shape and (stage == 3 or one.is_trainable)] for block in (*blocks, root)]
    every = [one for block in held for one in block]

    def whole(params: Sequence[ParameterSize]) -> int:
        return sum(
            (one.ranks * one.elements_per_rank if one.is_view(stage, offload) else one.elements) * one.computed
            for one in params
        )

    def gradients(params: Sequence[ParameterSize]) -> int:
        return sum(one.elements * one.gradient for one in params if one.is_trainable)

    trainable = [one for one in every if one.is_trainable]
    frees = stage == 3 and scope == "matmul"
    return ZeroMemory(
        stored=sum(one.elements_per_rank * one.stored for one in every if not one.is_view(stage, offload)),
        whole=whole(every) if stage < 3 else 0,
        whole_peak=_root_and_two(held, whole) if frees else whole(every),
        gradients=sum(one.elements_per_rank * one.stored for one in trainable),
        gradients_peak=gradients(root) + max(map(gradients, held[:-1]), default=0)
        if stage == 3 and scope != "step"
        else gradients(every),
        optimizer=states * sum(one.elements_per_rank * one.stored for one in trainable),
    )


def _root_and_two(held: Sequence[Sequence[ParameterSize]], size: Callable[[Sequence[ParameterSize]], int]) -> int:
    """Of the root block and the largest two that follow each other."""
    *blocks, root = [size(block) for block in held]
    pairs = [one + other for one, other in pairwise(blocks)] or blocks or [0]
    return root + max(pairs)
