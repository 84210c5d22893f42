"""The bytes that a rank stores under ZeRO, as a formula over sizes. No torch.

The parameters of a rank (its stages, its tensor-parallel shards) have W bytes; n ranks share their rows:

| bytes, at most | stage 1 | stage 2 | stage 3 |
|---|---|---|---|
| whole parameters between steps | W | W | 0 |
| whole parameters in a step | W | W | root and two blocks; ``microbatch``, ``step``: W |
| stored rows beside them | 0 | 0 | W/n |
| gradients between steps | W/n | W/n | W/n |
| whole gradients in a step | W | W | root and one block; ``step``: W |
| optimizer, k states | k W/n | k W/n | k W/n |

Rows are cut in dim 0, equally many for each rank, so W/n is rounded up to whole rows. Stages 1 and 2, too, have stored
rows beside the whole parameters where these are cast, offloaded, or consist of several logical parameters (fused query,
key and value). The root block has the parameters of no block, or of several; it stays whole for the step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class ParameterSize:
    """The size of a parameter as a rank computes with it.

    Attributes:
        shape: its whole shape on this rank.
        rows: the rows, in dim 0, of each logical parameter in it.
        ranks: the number of ranks that share its rows.
        computed: bytes of an element in compute.
        stored: bytes of a stored element.
        gradient: bytes of an element of its gradient.
        is_trainable: whether it gets a gradient.
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
        """The elements of the rows that one rank stores, with padding."""
        return sum(-(-rows // self.ranks) for rows in self.rows) * math.prod(self.shape[1:])

    def is_view(self, stage: int, offload: bool) -> bool:
        """Return whether the stored rows are a view of the whole parameter."""
        return stage < 3 and not offload and len(self.rows) == 1 and self.computed == self.stored


@dataclass(frozen=True)
class ZeroMemory:
    """The bytes of one rank; see the table.

    Attributes:
        stored: rows that are no views of whole parameters; on the host where they are offloaded.
        whole: whole parameters between steps.
        whole_peak: the peak of whole parameters in a step.
        gradients: gradients between steps.
        gradients_peak: the peak of whole gradients in a step of several microbatches. Their sums come on top, and up to
            two buffers that are being reduced, unless they travel through shared memory.
        optimizer: the optimizer's states.
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
    """Return the memory of a rank.

    Args:
        blocks: the parameters of each block, in the order in which the blocks run. Scalars are not cut and not counted,
            nor are frozen parameters under stages 1 and 2.
        root: the parameters of the root block.
        stage: 1, 2 or 3.
        scope: ``parallel.tensor.weights``.
        states: the number of tensors of a parameter's size in the optimizer: AdamW 2, SGD with momentum 1.
        offload: whether the stored rows are on the host.
    """
    cut = [
        [param for param in block if param.shape and (stage == 3 or param.is_trainable)] for block in (*blocks, root)
    ]
    all_params = [param for block in cut for param in block]

    def whole(params: Sequence[ParameterSize]) -> int:
        return sum(
            (param.ranks * param.elements_per_rank if param.is_view(stage, offload) else param.elements)
            * param.computed
            for param in params
        )

    def gradients(params: Sequence[ParameterSize]) -> int:
        return sum(param.elements * param.gradient for param in params if param.is_trainable)

    trainable = [param for param in all_params if param.is_trainable]
    frees = stage == 3 and scope == "matmul"
    return ZeroMemory(
        stored=sum(param.elements_per_rank * param.stored for param in all_params if not param.is_view(stage, offload)),
        whole=whole(all_params) if stage < 3 else 0,
        whole_peak=_root_and_two(cut, whole) if frees else whole(all_params),
        gradients=sum(param.elements_per_rank * param.stored for param in trainable),
        gradients_peak=gradients(root) + max(map(gradients, cut[:-1]), default=0)
        if stage == 3 and scope != "step"
        else gradients(all_params),
        optimizer=states * sum(param.elements_per_rank * param.stored for param in trainable),
    )


def _root_and_two(cut: Sequence[Sequence[ParameterSize]], size: Callable[[Sequence[ParameterSize]], int]) -> int:
    """Return the size of the root block and of the largest two consecutive blocks."""
    *blocks, root = [size(block) for block in cut]
    pairs = [first + second for first, second in pairwise(blocks)] or blocks or [0]
    return root + max(pairs)
