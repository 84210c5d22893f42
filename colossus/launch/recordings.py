"""Which collective the ranks wait in, and who did not come to it. No torch.

Each failure record has the last collectives that its rank began, numbered in each group (`comm.log.progress`): of a
group's ranks those with the lowest last number did not come to what the others wait in. That is true under NCCL, too,
where the host runs ahead of the device. What torch's flight recorder knows of the device lies beside the records.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from colossus.context.grid import RankGrid
from colossus.launch.failure import FOLDER, RECORDING, FailureRecord

_MOST = 4


@dataclass(frozen=True)
class _Begun:
    """A collective that a rank has begun.

    Attributes:
        number: of the group's collectives, counted on this rank.
        what: ``all_reduce [3 float32]``.
        site: the line that wanted it.
    """

    number: int
    what: str
    site: str
    is_done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.what} at {self.site}"


def who_is_missing(folder: Path | None, records: Iterable[FailureRecord], grid: RankGrid) -> list[str]:
    """A line for each group in which ranks wait for others, and one on what torch has recorded.

    Args:
        folder: the run folder.
    """
    known = [record for record in records if record.progress]
    #: (axes, ranks of the group) -> rank -> number -> what it has begun
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, _Begun]]] = defaultdict(dict)
    for record in known:
        for axes, number, what, site, is_done in record.progress:
            with contextlib.suppress(ValueError):  # a subgroup with a label of its own
                members = tuple(grid.group(record.rank, axes.split("x")))
                of_rank = groups[axes, members].setdefault(record.rank, {})
                of_rank[number] = _Begun(number, what, site, is_done)
    heard = {record.rank for record in known}
    found = [_line(axes, members, heard, begun) for (axes, members), begun in groups.items() if len(members) > 1]
    lines = [line for _, line in sorted(filter(None, found), key=lambda each: each[0])][:_MOST]
    if folder is not None and any((folder / FOLDER).glob(f"{RECORDING}*")):
        lines.append(f"torch has recorded more, which `torchfrtrace` reads: {folder / FOLDER / RECORDING}*")
    return lines


def _line(
    axes: str, members: Sequence[int], heard: set[int], begun: Mapping[int, Mapping[int, _Begun]]
) -> tuple[bool, str] | None:
    """(whether the host has seen the end of what is waited for, the line); None where nobody is missing."""
    last = {rank: max(begun.get(rank, {0: None})) for rank in members if rank in heard}
    silent = [rank for rank in members if rank not in heard]
    low = min(last.values())
    later = [n for rank in last for n, one in begun.get(rank, {}).items() if n > low and (low or not one.is_done)]
    wanted = min(later, default=max(last.values()))
    absent = [rank for rank in last if last[rank] < wanted]
    inside = {rank: begun[rank][wanted] for rank in last if wanted in begun.get(rank, {})}
    if not absent or not low:  # all have come to it, or a rank's log goes not back so far: unless somebody waits there
        inside = {rank: one for rank, one in inside.items() if not one.is_done}
    if not inside:
        return None
    first = next(iter(inside.values()))
    waiting = [rank for rank, one in inside.items() if one.what == first.what]
    others = [rank for rank in inside if rank not in waiting]
    if not (absent or others or silent):
        return None
    line = f"{ranges_of(waiting)} wait{'s' * (len(waiting) == 1)} in {first}"
    if others:
        line += f", where {ranges_of(others)} run{'s' * (len(others) == 1)} {inside[others[0]]}"
    line += f", over {axes}"
    for rank in absent[:_MOST]:
        line += f"; rank {rank} has not come to it, its last there: {begun[rank][last[rank]] if last[rank] else 'none'}"
    if len(absent) > _MOST:
        line += f"; nor have {len(absent) - _MOST} more ranks"
    if silent:
        line += f"; nothing is known of {ranges_of(silent)}"
    return first.is_done, line


def ranges_of(ranks: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0, 2, 3``, and ranges when there are many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    ranges = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return "ranks " + ", ".join(ranges)
