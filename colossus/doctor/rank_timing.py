"""What one rank times while all others do the same: products, attention, memory, collectives."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor, nn
from torch import distributed as dist

from colossus.arithmetic import round_up
from colossus.comm import collectives, shared_memory
from colossus.comm.links import Links
from colossus.context.groups import AxisGroup, new_process_group
from colossus.progress import progress

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: a case's calls run this long, unless one call takes longer
CASE_SECONDS = 0.02
FEWEST_BLOCKS, MOST_BLOCKS = 2, 7
TIMEOUT = timedelta(seconds=60)

#: what is timed: ("matmul", dtype, a, b), ("forward", dtype, length), ("all_reduce", ranks, bytes held), ("add",), ..
Case = tuple[str | int, ...]
Seconds = dict[Case, float]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        matmul: a and b of products [a, b] x [b, b].
        memory: bytes of a tensor that is too large for caches.
        messages: bytes of the whole tensor of a collective.
        seconds: for all blocks together, roughly; at least two are taken.
    """

    dtypes: tuple[str, ...]
    matmul: tuple[int, ...]
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    memory: int
    messages: tuple[int, ...]
    seconds: float


_KB, _MB = 1 << 10, 1 << 20
#: 8 MB is the most that goes through shared memory
_MESSAGES = (*(_KB << power for power in range(0, 14, 2)), shared_memory.SLOT_BYTES, 16 * _MB)
ON_CPU = Sizes(("fp32",), (8, 32, 128, 512, 1024), 4, 64, (128, 512, 1024), 16 * _MB, _MESSAGES, 24.0)
ON_CUDA = Sizes(
    ("bf16", "fp32"), (16, 64, 256, 1024, 4096), 32, 128, (512, 2048, 8192), 512 * _MB,
    (*_MESSAGES, 64 * _MB, 256 * _MB), 24.0,
)  # fmt: skip


def group_sizes(world: int) -> list[int]:
    """Numbers of ranks whose collectives are measured: powers of two, and all."""
    return sorted({1 << power for power in range(1, world.bit_length()) if 1 << power <= world} | {world} - {1})


def time_cases(world: int, threads: int, device: str, sizes: Sizes, rank: int) -> Seconds:
    """Median seconds of each case over blocks, each of which runs all cases, in turned order from block to block.

    All ranks call; they start each case together, and groups of fewer ranks than all run side by side.
    """
    torch.set_num_threads(threads)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    everyone = AxisGroup(("ranks",), tuple(range(world)), rank, dist.group.WORLD if world > 1 else None)
    cases = _compute_cases(sizes, here) | _collective_cases(sizes, here, everyone)
    # a rank that is in no group of this size runs nothing, but comes to the start of the case as all do
    names: list[Case] = [*cases, *(name for name in _all_collectives(sizes, world) if name not in cases)]
    names.sort(key=str)
    series: dict[Case, list[float]] = {name: [] for name in cases}
    began, num_blocks = time.monotonic(), 1
    block = 0
    while block <= num_blocks:  # the first one warms up, and tells how many there is time for
        if rank == 0:
            progress("warming up" if block == 0 else f"block {block} of {num_blocks}")
        for name in names if block % 2 == 0 else reversed(names):
            collectives.barrier(everyone, here)
            if name in cases:
                taken = cases[name]()
                if block > 0:
                    series[name].append(taken)
        if block == 0:
            num_blocks = _agree(_blocks_in(sizes.seconds, time.monotonic() - began), everyone, here)
        block += 1
    if rank == 0:
        progress("")
    return {name: statistics.median(taken) for name, taken in series.items()}


def _blocks_in(seconds: float, one: float) -> int:
    return max(FEWEST_BLOCKS, min(MOST_BLOCKS, int(seconds / one) - 1))


def _agree(number: int, group: AxisGroup, device: torch.device) -> int:
    """The largest of all ranks' numbers."""
    return int(collectives.all_reduce(torch.tensor(number, device=device), group, op="max").wait())


# -- one device -----------------------------------------------------------------------------------------------


def _compute_cases(sizes: Sizes, device: torch.device) -> dict[Case, Callable[[], float]]:
    cases: dict[Case, Callable[[], float]] = {}
    for dtype in sizes.dtypes:
        for at, a in enumerate(sizes.matmul):
            for b in sizes.matmul[at:]:
                cases["matmul", dtype, a, b] = partial(_time_linear, a, b, DTYPES[dtype], device)
        for length in sizes.lengths:
            shape = sizes.heads, length, sizes.head_dim
            for name in ("forward", "backward"):
                cases[name, dtype, length] = partial(_time_attention, shape, DTYPES[dtype], device, name == "backward")
    x, y = (torch.ones(sizes.memory // 4, device=device) for _ in range(2))
    one = torch.zeros(1, device=device)
    cases["add",] = lambda: _seconds(lambda: torch.add(x, y), device)
    cases["copy",] = lambda: _seconds(lambda: y.copy_(x), device)
    cases["operator",] = lambda: _seconds(lambda: one.add_(1.0), device)
    return cases


def _time_linear(a: int, b: int, dtype: torch.dtype, device: torch.device) -> float:
    """Mean of the three products of a linear layer of b x b features and a tokens, each into a new tensor."""
    x, dy, w = (torch.randn(shape, dtype=dtype, device=device) for shape in ((a, b), (a, b), (b, b)))

    def all_three() -> None:
        nn.functional.linear(x, w)
        dy @ w
        dy.t() @ x

    return _seconds(all_three, device) / 3


def _time_attention(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device, backward: bool) -> float:
    q, k, v = (torch.randn(1, *shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))

    def forward() -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    if not backward:
        return _seconds(forward, device)
    out = forward()
    gradient = torch.ones_like(out)
    return _seconds(lambda: torch.autograd.grad(out, (q, k, v), gradient, retain_graph=True), device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Mean over calls behind each other, after one to warm up: twice as many until they take long enough."""
    call()
    calls = 1
    while True:
        taken = _seconds_of(call, calls, device)
        if taken > CASE_SECONDS / 2:
            return taken / calls
        calls *= 2


def _seconds_of(call: Callable[[], object], calls: int, device: torch.device) -> float:
    _synchronize(device)
    began = time.perf_counter()
    for _ in range(calls):
        call()
    _synchronize(device)
    return time.perf_counter() - began


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- between ranks --------------------------------------------------------------------------------------------

#: a collective of `colossus.comm`, and its result
CALLS: dict[str, Callable[[Tensor, AxisGroup], object]] = {
    "all_reduce": lambda x, group: collectives.all_reduce(x, group, owned=True).wait(),
    "all_gather": lambda x, group: collectives.all_gather(x, group).wait(),
    "reduce_scatter": lambda x, group: collectives.reduce_scatter(x, group).wait(),
    "all_to_all": lambda x, group: collectives.all_to_all(x, group, 0, 0).wait(),
}


def _held(operation: str, ranks: int, whole: int) -> int:
    """Bytes of the tensor that a rank has before, of float32 that divide over the ranks."""
    divided = round_up(whole, 4 * ranks)
    return divided // ranks if operation == "all_gather" else divided


def _all_collectives(sizes: Sizes, world: int) -> list[tuple[str, int, int]]:
    return [
        (operation, ranks, _held(operation, ranks, whole))
        for ranks in group_sizes(world)
        for operation in (*CALLS, *(["send"] if ranks == 2 else []))
        for whole in sizes.messages
    ]


def _collective_cases(sizes: Sizes, device: torch.device, everyone: AxisGroup) -> dict[Case, Callable[[], float]]:
    """Those of the groups that this rank is in: of neighbours, as many side by side as there are."""
    groups: dict[int, AxisGroup] = {}
    for ranks in group_sizes(everyone.size):
        first = everyone.index // ranks * ranks
        if first + ranks <= everyone.size:
            members, index = tuple(range(first, first + ranks)), everyone.index - first
            made = new_process_group(members, index, f"measured {ranks} from {first}", TIMEOUT)
            groups[ranks] = AxisGroup(("ranks",), members, index, made)
    links = Links(groups[2], [(0, 1), (1, 0)], device) if 2 in groups else None
    cases: dict[Case, Callable[[], float]] = {}
    for operation, ranks, held in _all_collectives(sizes, everyone.size):
        if ranks not in groups:
            continue
        x = torch.zeros(held // 4, device=device)
        group = groups[ranks]
        if operation == "send":
            assert links is not None
            call: Callable[[], object] = partial(there_and_back, links, x, group.index)
        else:
            call = partial(CALLS[operation], x, group)
        calls, messages = max(2, min(20, _MB // held)), 2 if operation == "send" else 1
        cases[operation, ranks, held] = partial(_seconds_of_one, call, calls, device, messages)
    return cases


def _seconds_of_one(call: Callable[[], object], calls: int, device: torch.device, messages: int) -> float:
    return seconds_together(call, calls, device) / messages


def seconds_together(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Mean over as many calls on all ranks, after one that brings them together."""
    call()
    return _seconds_of(call, calls, device) / calls


def there_and_back(links: Links, x: Tensor, index: int) -> None:
    """A message from rank 0 to rank 1, and one of the same size back; other ranks do nothing."""
    other = 1 - index
    if other not in (0, 1):
        return
    incoming = links.receive(other, [x], "measured") if links.takes_early else None
    if index == 0:
        links.send(other, [x], "measured")()
    (incoming or links.receive(other, [x], "measured")).wait()
    if index == 1:
        links.send(other, [x], "measured")()
