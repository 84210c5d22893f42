"""Times of one rank while all others run the same cases: products, attention, memory, collectives."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import torch
from torch import Tensor
from torch import distributed as dist

from colossus.arithmetic import round_up
from colossus.comm import collectives
from colossus.comm.links import Links
from colossus.context.groups import AxisGroup, new_process_group
from colossus.doctor.device_timing import Timed, device_cases, operands, seconds_of_calls
from colossus.doctor.timing_sizes import Case, Sizes
from colossus.progress import progress

FEWEST_BLOCKS, MOST_BLOCKS = 2, 7
TIMEOUT = timedelta(seconds=60)

Seconds = dict[Case, float]
_MB = 1 << 20


def group_sizes(world: int) -> list[int]:
    """Return the sizes of the groups whose collectives are measured: powers of two, and all ranks."""
    return sorted({1 << power for power in range(1, world.bit_length()) if 1 << power <= world} | {world} - {1})


def time_cases(world: int, threads: int, at_once: int | None, device: str, sizes: Sizes, rank: int) -> Seconds:
    """Return the seconds of each case over blocks; each block runs all cases, in alternating order.

    A rank's own work has its minimum, since disturbances only make it longer; a collective has its median.

    All ranks call; they start each case together, and groups of fewer ranks than all run side by side.

    Args:
        at_once: so many ranks compute at the same time, and the others wait; None: all.
    """
    torch.set_num_threads(threads)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    everyone = AxisGroup(("ranks",), tuple(range(world)), rank, dist.group.WORLD if world > 1 else None)
    of_device = device_cases(sizes, here)
    between = _collective_cases(sizes, here, everyone)
    cases = between if at_once is not None and rank >= at_once else of_device | between
    # ranks that do not run a case still take part in the barrier at its start
    names = sorted({*of_device, *_all_collectives(sizes, world)}, key=str)
    series: dict[Case, list[float]] = {name: [] for name in cases}
    began, num_blocks = time.monotonic(), 1
    block = 0
    while block <= num_blocks:  # the first block warms up, and its time determines the number of blocks
        if rank == 0:
            progress("warming up" if block == 0 else f"block {block} of {num_blocks}")
        for name in names if block % 2 == 0 else reversed(names):
            collectives.barrier(everyone, here)
            if name in cases:
                seconds = cases[name]()
                if block > 0:
                    series[name].append(seconds)
        if block == 0:
            num_blocks = _agree(_blocks_in(sizes.seconds, time.monotonic() - began), everyone, here)
        block += 1
    if rank == 0:
        progress("")
    return {name: min(times) if name in of_device else statistics.median(times) for name, times in series.items()}


def _blocks_in(seconds: float, one: float) -> int:
    return max(FEWEST_BLOCKS, min(MOST_BLOCKS, int(seconds / one) - 1))


def _agree(number: int, group: AxisGroup, device: torch.device) -> int:
    """Return the largest of all ranks' numbers."""
    return int(collectives.all_reduce(torch.tensor(number, device=device), group, op="max").wait())


# -- between ranks --------------------------------------------------------------------------------------------

#: a collective of `colossus.comm`, and its result
CALLS: dict[str, Callable[[Tensor, AxisGroup], object]] = {
    "all_reduce": lambda x, group: collectives.all_reduce(x, group, owned=True).wait(),
    "all_gather": lambda x, group: collectives.all_gather(x, group).wait(),
    "reduce_scatter": lambda x, group: collectives.reduce_scatter(x, group).wait(),
    "all_to_all": lambda x, group: collectives.all_to_all(x, group, 0, 0).wait(),
}


def _operand_bytes(operation: str, ranks: int, whole: int) -> int:
    """Return the bytes of a rank's operand: float32 that divide over the ranks."""
    divided = round_up(whole, 4 * ranks)
    return divided // ranks if operation == "all_gather" else divided


def _all_collectives(sizes: Sizes, world: int) -> list[tuple[str, int, int]]:
    return [
        (operation, ranks, _operand_bytes(operation, ranks, whole))
        for ranks in group_sizes(world)
        for operation in (*CALLS, *(["send"] if ranks == 2 else []))
        for whole in sizes.messages
    ]


def _collective_cases(sizes: Sizes, device: torch.device, everyone: AxisGroup) -> dict[Case, Timed]:
    """Return the collectives of the groups with this rank; groups of neighbours run side by side."""
    groups: dict[int, AxisGroup] = {}
    for ranks in group_sizes(everyone.size):
        first = everyone.index // ranks * ranks
        if first + ranks <= everyone.size:
            members, index = tuple(range(first, first + ranks)), everyone.index - first
            process_group = new_process_group(members, index, f"measured {ranks} from {first}", TIMEOUT)
            groups[ranks] = AxisGroup(("ranks",), members, index, process_group)
    links = Links(groups[2], [(0, 1), (1, 0)], device) if 2 in groups else None
    pool = torch.empty(sizes.cold // 4, device=device).fill_(0)  # zeros would share one page until they are written
    cases: dict[Case, Timed] = {}
    for operation, ranks, size in _all_collectives(sizes, everyone.size):
        if ranks not in groups:
            continue
        tensors = itertools.cycle(x.view(-1) for (x,) in operands(pool, (1, size // 4)))
        group = groups[ranks]
        if operation == "send":
            assert links is not None
            call: Callable[[Tensor], object] = partial(there_and_back, links, index=group.index)
        else:
            call = partial(_collective, operation, group)
        calls, messages = max(2, min(20, _MB // size)), 2 if operation == "send" else 1
        cases[operation, ranks, size] = partial(_seconds_of_one, call, tensors, calls, device, messages)
    return cases


def _collective(operation: str, group: AxisGroup, x: Tensor) -> object:
    return CALLS[operation](x, group)


def _seconds_of_one(
    call: Callable[[Tensor], object], tensors: Iterator[Tensor], calls: int, device: torch.device, messages: int
) -> float:
    return seconds_together(lambda: call(next(tensors)), calls, device) / messages


def seconds_together(call: Callable[[], object], calls: int, device: torch.device) -> float:
    """Return the mean over as many calls on all ranks, after one that synchronizes them."""
    call()
    return seconds_of_calls(call, calls, device) / calls


def there_and_back(links: Links, x: Tensor, *, index: int) -> None:
    """Send a message from rank 0 to rank 1, and one of the same size back; other ranks do nothing."""
    other = 1 - index
    if other not in (0, 1):
        return
    incoming = links.receive(other, [x], "measured") if links.takes_early else None
    if index == 0:
        links.send(other, [x], "measured")()
    (incoming or links.receive(other, [x], "measured")).wait()
    if index == 1:
        links.send(other, [x], "measured")()
