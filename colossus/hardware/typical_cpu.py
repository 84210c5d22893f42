"""A CPU that nobody has measured: round numbers, to choose between plans until there are better ones."""

from __future__ import annotations

from colossus.hardware.hardware import Hardware, Link, bytes_sent, ranks_at_once, steps

#: FLOP/s of large products and of attention on one core, in fp32
PRODUCTS, ATTENTION = 50e9, 25e9
#: bytes per second of a core: of operators that read and write memory, and of messages through shared memory
MEMORY, SHARED = 5e9, 2e9
#: seconds of a product beside its operations, of an operator's start, and of a step between two ranks
PRODUCT, OPERATOR, STEP = 5e-6, 10e-6, 50e-6
#: 10 Gb/s for each rank
NETWORK = Link(50e-6, 1.25e9)
#: time in a dtype over the time in fp32
_SLOWER = {"fp64": 2.0, "fp32": 1.0, "bf16": 1.0, "fp16": 1.0}


class TypicalCPU(Hardware):
    """A server's CPU, a core for each thread of a rank; none of its figures is measured.

    Args:
        cores: cores of a host.
        threads: threads of a rank.
        memory: bytes of memory for each rank.
    """

    is_measured, overlaps = False, False
    name, operator_seconds, network = "a typical CPU (round numbers)", OPERATOR, NETWORK

    def __init__(self, cores: int, threads: int, memory: float) -> None:
        self.at_once, self.memory_bytes, self._threads = ranks_at_once(cores, threads), memory, threads

    def matmul_seconds(self, m: int, n: int, k: int, dtype: str) -> float:
        return PRODUCT + 2.0 * m * n * k * _slower(dtype) / (PRODUCTS * self._threads)

    def attention_seconds(self, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> float:
        flops = 2.0 * heads * length**2 * head_dim * (2.5 if backward else 1)
        return PRODUCT + flops * _slower(dtype) / (ATTENTION * self._threads)

    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        return num_bytes / MEMORY

    def on_one_host(self, operation: str, ranks: int, input_bytes: float) -> float:
        return steps(operation, ranks) * STEP + bytes_sent(operation, ranks, input_bytes) / SHARED


def _slower(dtype: str) -> float:
    if dtype not in _SLOWER:
        raise ValueError(f"a typical CPU has no figure for products in {dtype}; it has {', '.join(_SLOWER)}")
    return _SLOWER[dtype]
