"""What a plan says to the layers built under it, beside the sizes of its axes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LayerOptions:
    """How layers compute and communicate. None of it changes what they compute.

    Attributes:
        tensor_mode: name of a tensor mode (``1d``, ``2d``, ``2.5d``, ``3d``, or a registered one).
        sequence_mode: name of the way in which attention is split over the sequence axis.
        sequence_sharded: whether 1D shards activations between blocks by tokens.
        keep_gathered: whether inputs gathered in forward are kept for backward, instead of gathered again.
        weight_scope: for how long a gathered weight is held: ``matmul``, ``microbatch`` or ``step``.
    """

    tensor_mode: str = "1d"
    sequence_mode: str = "ring"
    sequence_sharded: bool = False
    keep_gathered: bool = False
    weight_scope: str = "matmul"

    @classmethod
    def from_config(cls, parallel: Any) -> LayerOptions:
        """The options of a resolved ``ParallelConfig``."""
        tensor = parallel.tensor
        return cls(
            tensor_mode=tensor.mode,
            sequence_mode=parallel.sequence.mode or "ring",
            sequence_sharded=tensor.sequence_sharded,
            keep_gathered=tensor.gathered == "keep",
            weight_scope=tensor.weights,
        )
