"""Which collective the ranks wait in, and who did not come to it. No torch.

Each failure record has the last collectives that its rank began, numbered in each group (`comm.log.progress`): of a
group's ranks those with the lowest last number did not come to what the others wait in. That is true under NCCL, too,
where the host runs ahead of the device. What torch's flight recorder knows of the device lies beside the records.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colossus.context.grid import RankGrid
from colossus.launch.failures import FOLDER, RECORDING, FailureRecord

_MOST_GROUPS = 4


class _Begun(NamedTuple):
    """A collective that a rank has begun: its number in the group, ``all_reduce [3 float32]``, the line that wanted it,
    and whether the host has seen its end.
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
        for axes, *begun in record.progress:
            with contextlib.suppress(ValueError):  # a subgroup with a label of its own
                members = tuple(grid.group(record.rank, axes.split("x")))
                groups[axes, members].setdefault(record.rank, {})[begun[0]] = _Begun(*begun)
    heard = {record.rank for record in known}
    found = [_line(axes, members, heard, begun) for (axes, members), begun in groups.items() if len(members) > 1]
    lines = [line for _, line in sorted(filter(None, found), key=lambda each: each[0])][:_MOST_GROUPS]
    if folder is not None and any((folder / FOLDER).glob(f"{RECORDING}*")):
        lines.append(f"torch has recorded more, which `torchfrtrace` reads: {folder / FOLDER / RECORDING}*")
    return lines


def _line(
    axes: str, members: Sequence[int], heard: set[int], begun: Mapping[int, Mapping[int, _Begun]]
) -> tuple[bool, str] | None:
    """(whether the host has seen the end of what is waited for, the line); None where nobody is missing."""
    last = {rank: max(begun.get(rank, {0: None})) for rank in members if rank in heard}
    low = min(last.values())
    later = [n for rank in last for n, one in begun.get(rank, {}).items() if n > low and (low or not one.is_done)]
    wanted = min(later, default=max(last.values()))
    absent = [rank for rank in last if last[rank] < wanted]
    inside = {rank: begun[rank][wanted] for rank in last if wanted in begun.get(rank, {})}
    if not absent or not low:  # all have come to it, or a rank's log goes not back so far: unless somebody waits there
        inside = {rank: one for rank, one in inside.items() if not one.is_done}
    first = next(iter(inside.values()), None)
    silent = [rank for rank in members if rank not in heard]
    others = [rank for rank, one in inside.items() if first is not None and one.what != first.what]
    if first is None or not (absent or others or silent):
        return None
    waiting = [rank for rank in inside if rank not in others]
    line = f"{ranks_in_words(waiting)} wait{'s' * (len(waiting) == 1)} in {first}"
    if others:
        line += f", where {ranks_in_words(others)} run{'s' * (len(others) == 1)} {inside[others[0]]}"
    line += f", over {axes}"
    if absent:
        was = begun[absent[0]][last[absent[0]]] if last[absent[0]] else "none"
        line += f"; {ranks_in_words(absent)} did not come to it, the last there: {was}"
    if silent:
        line += f"; nothing is known of {ranks_in_words(silent)}"
    return first.is_done, line


def ranks_in_words(ranks: Sequence[int]) -> str:
    """``rank 0``, ``ranks 0, 2, 3``, ``ranks 0, 1, 2, 3, 4, 5, .. 63``."""
    shown = [*map(str, ranks)] if len(ranks) <= 8 else [*map(str, ranks[:6]), f".. {ranks[-1]}"]
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(shown)}"
