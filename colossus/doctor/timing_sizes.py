"""The sizes at which a machine is measured."""

from __future__ import annotations

from dataclasses import dataclass

from colossus.comm import shared_memory

#: a timed case: ("matmul", dtype, a, b), ("forward", dtype, length), ("all_reduce", ranks, bytes), ("add",), ..
Case = tuple[str | int, ...]


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measured cases.

    Attributes:
        matmul: a and b of products [a, b] x [b, b].
        cold: bytes, more than caches hold, from which the operands of a case are taken in turn.
        operand: bytes of a tensor of activations.
        memory: bytes of a tensor that is too large for caches.
        messages: bytes of the whole tensor of a collective.
        seconds: approximate time for all blocks together; at least two blocks run.
        steps: training steps of one process that are timed behind the parts; 0: none.
    """

    dtypes: tuple[str, ...]
    matmul: tuple[int, ...]
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    cold: int
    operand: int
    memory: int
    messages: tuple[int, ...]
    seconds: float
    steps: int


_KB, _MB = 1 << 10, 1 << 20
#: shared memory carries at most 8 MB
_MESSAGES = (*(_KB << power for power in range(0, 14, 2)), shared_memory.piece_bytes(), 16 * _MB)
ON_CPU = Sizes(
    ("fp32",),
    (8, 32, 128, 512, 1024),
    4,
    64,
    (32, 128, 512, 1024),
    64 * _MB,
    2 * _MB,
    16 * _MB,
    _MESSAGES,
    24.0,
    12,
)
ON_CUDA = Sizes(
    ("bf16", "fp32"), (16, 64, 256, 1024, 4096), 32, 128, (512, 2048, 8192), 512 * _MB, 64 * _MB, 512 * _MB,
    (*_MESSAGES, 64 * _MB, 256 * _MB), 24.0, 0,
)  # fmt: skip
