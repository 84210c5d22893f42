"""Times of one device: products, attention, memory, and the overhead of an operator."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from colossus.construct.build_model import build
from colossus.context.grid import ONE_RANK
from colossus.context.parallel_context import ParallelContext
from colossus.doctor.timing_sizes import Case, Sizes
from colossus.layers.block import TransformerBlock

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
#: the calls of a case run this long, unless one call takes longer
CASE_SECONDS = 0.02
#: the most sets of operands of one case: so many small products do fit into a cache, as a small model does
MOST_OPERANDS = 256
#: calls of the block whose operators are counted
OPERATOR_CALLS = 9

Timed = Callable[[], float]
#: returns random numbers of a dtype
Pool = Callable[[str], Tensor]


def device_cases(sizes: Sizes, device: torch.device) -> dict[Case, Timed]:
    """Return the cases that are timed without other ranks."""
    cases: dict[Case, Timed] = {}

    @cache
    def pool(dtype: str) -> Tensor:
        return torch.randn(sizes.cold // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=device)

    for dtype in sizes.dtypes:
        for index, a in enumerate(sizes.matmul):
            for b in sizes.matmul[index:]:
                cases["matmul", dtype, a, b] = partial(_time_linear, pool, dtype, a, b)
        for length in sizes.lengths:
            shape = sizes.heads, length, sizes.head_dim
            for name in ("forward", "backward"):
                cases[name, dtype, length] = partial(_time_attention, shape, DTYPES[dtype], device, name == "backward")
    for name, call in OPERATORS.items():
        cases["bytes", name] = partial(_time_bytes, pool, sizes.operand, call)
    cases["add",] = partial(_time_memory, sizes.memory, device, torch.add)
    cases["copy",] = partial(_time_memory, sizes.memory, device, Tensor.copy_)
    cases["operator",] = partial(_time_operator, pool)
    return cases


def operands(pool: Tensor, *shapes: tuple[int, int]) -> list[list[Tensor]]:
    """Return sets of tensors of these shapes, consecutive in the pool, as many as it holds.

    In a training step other operators come between two that read the same tensor, and caches have lost it.
    """
    numbers = [rows * features for rows, features in shapes]
    size = sum(numbers)
    count = max(1, min(MOST_OPERANDS, len(pool) // size))
    if len(pool) < size:
        pool = pool.repeat(-(-size // len(pool)))
    return [
        [part.view(shape) for part, shape in zip(elements.split(numbers), shapes, strict=True)]
        for elements in pool[: count * size].split(size)
    ]


def _time_linear(pool: Pool, dtype: str, a: int, b: int) -> float:
    """Return the mean seconds of the three products of a linear layer of b x b features and a tokens.

    Each product writes a new tensor.
    """
    sets = itertools.cycle(operands(pool(dtype), (a, b), (a, b), (b, b)))

    def all_three() -> None:
        x, dy, w = next(sets)
        nn.functional.linear(x, w)
        dy @ w
        dy.t() @ x

    return seconds_of(all_three, pool(dtype).device) / 3


def _time_attention(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backward: bool) -> float:
    q, k, v = (torch.randn(1, *shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return seconds_of(forward, device)
    out = forward()
    gradient = torch.ones_like(out)
    return seconds_of(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)


def _time_memory(size: int, device: torch.device, call: Callable[[Tensor, Tensor], Tensor]) -> float:
    x, y = (torch.ones(size // 4, device=device) for _ in range(2))
    return seconds_of(lambda: call(x, y), device)


# -- operators other than products ----------------------------------------------------------------------------

#: returns the tensors that it reads, and its results
Operator = Callable[[Tensor, Tensor], tuple[Sequence[Tensor], Any]]

_aten = torch.ops.aten
#: the operators of a step that arithmetic bounds on a CPU, on x and y [tokens, features]
OPERATORS: dict[str, Operator] = {
    "gelu": lambda x, y: ([x], _aten.gelu(x)),
    "gelu_backward": lambda x, y: ([x, y], _aten.gelu_backward(y, x)),
    "silu": lambda x, y: ([x], _aten.silu(x)),
    "silu_backward": lambda x, y: ([x, y], _aten.silu_backward(y, x)),
    "native_layer_norm": lambda x, y: ([x], _aten.native_layer_norm(x, x.shape[-1:], y[0], y[1], 1e-5)),
    "native_layer_norm_backward": lambda x, y: (
        [x, y],
        _aten.native_layer_norm_backward(y, x, x.shape[-1:], x[:, :1], x[:, :1], y[0], y[1], [True] * 3),
    ),
    "_log_softmax": lambda x, y: ([x], _aten._log_softmax(x, -1, False)),
    "_log_softmax_backward_data": lambda x, y: ([x, y], _aten._log_softmax_backward_data(y, x, -1, x.dtype)),
    "sum": lambda x, y: ([x], _aten.sum(x, [0], True)),
}


def _time_bytes(pool: Pool, size: int, call: Operator) -> float:
    """Return the seconds for each byte that is read or written."""
    features = 512
    shape = max(2, size // 4 // features), features
    sets = itertools.cycle(operands(pool("fp32"), shape, shape))
    read, result = call(*next(sets))
    moved = sum(x.nbytes for x in (*read, *tree_leaves(result)))
    return seconds_of(lambda: call(*next(sets)), read[0].device) / moved


class _Count(TorchDispatchMode):
    """A mode that counts ATen operators."""

    operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        return func(*args, **(kwargs or {}))


def _time_operator(pool: Pool) -> float:
    """Return the seconds of forward and backward of a tiny transformer block over the number of its operators.

    The block is so small that the arithmetic takes no time. Before each run other operators fill the caches, as those
    of the next block do in a step.
    """
    others = pool("fp32")
    context = ParallelContext(ONE_RANK, device=others.device)
    block = build(lambda: TransformerBlock(16, 2), context)
    x = torch.randn(1, 4, 16, device=others.device, requires_grad=True)

    def step() -> None:
        block(x).sum().backward()

    with _Count() as count:
        step()
    times = []
    for _ in range(OPERATOR_CALLS):
        others.sum()
        times.append(seconds_of_calls(step, 1, others.device))
    return statistics.median(times) / count.operators


# -- clocks ---------------------------------------------------------------------------------------------------


def seconds_of(call: Callable[[], object], device: torch.device) -> float:
    """Return the mean over consecutive calls, after a warm-up; their number doubles until they take long enough."""
    call()
    calls = 1
    while True:
        taken = seconds_of_calls(call, calls, device)
        if taken > CASE_SECONDS / 2:
            return taken / calls
        calls *= 2


def seconds_of_calls(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
