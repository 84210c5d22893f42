"""The collective in which ranks wait, and the ranks that did not come to it, by their ends. No torch.

The end of a rank that failed has the last collectives that it began, numbered in each group (`comm.log.progress`). The
ranks of a group whose last number is lowest did not come to the collective in which the others wait. This also holds
under NCCL, where the host runs ahead of the device. Files of torch's flight recorder, with the state of the device, lie
in the run folder.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from colossus.arithmetic import named_ranks
from colossus.context.grid import RankGrid
from colossus.launch.ends import RankEnd

#: the folder of torch's recordings in the run folder, and their names, which torch completes with the rank
FOLDER = "recordings"
RECORDING = "flight_recorder_rank_"

_MAX_GROUPS = 4


class _Begun(NamedTuple):
    """A collective that a rank has begun.

    Attributes:
        number: its number in the group.
        operation: its operation and tensor, as in ``all_reduce [3 float32]``.
        site: the line that called it.
        is_done: whether the host has seen its end.
    """

    number: int
    operation: str
    site: str
    is_done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.operation} at {self.site}"


def who_is_missing(folder: Path | None, ends: Iterable[RankEnd], grid: RankGrid) -> list[str]:
    """Return a line for each group in which ranks wait for others, and one on the files of torch's recorder.

    Args:
        folder: the run folder.
        ends: the ends of its ranks.
        grid: its ranks.
    """
    with_progress = [end for end in ends if end.progress]
    #: (axes, ranks of the group) -> rank -> number -> the collective that it has begun
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, _Begun]]] = defaultdict(dict)
    for end in with_progress:
        for axes, *begun in end.progress:
            with contextlib.suppress(ValueError):  # a subgroup with a label of its own
                members = tuple(grid.group(end.rank, axes.split("x")))
                groups[axes, members].setdefault(end.rank, {})[begun[0]] = _Begun(*begun)
    reporting = {end.rank for end in with_progress}
    waits = [_line(axes, members, reporting, begun) for (axes, members), begun in groups.items() if len(members) > 1]
    lines = [line for _, line in sorted(filter(None, waits), key=lambda wait: wait[0])][:_MAX_GROUPS]
    if folder is not None and any((folder / FOLDER).glob(f"{RECORDING}*")):
        lines.append(f"torch has recorded more, which `torchfrtrace` reads: {folder / FOLDER / RECORDING}*")
    return lines


def recording_of(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file of torch's flight recorder."""
    return folder / FOLDER / f"{RECORDING}{rank}"


def remove_recordings(folder: Path) -> None:
    """Remove the recordings of an earlier attempt in the same run folder."""
    for path in (folder / FOLDER).glob(f"{RECORDING}*"):
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # it is missing, or has files of the user
        (folder / FOLDER).rmdir()


def _line(
    axes: str, members: Sequence[int], reporting: set[int], begun: Mapping[int, Mapping[int, _Begun]]
) -> tuple[bool, str] | None:
    """Return the line of a group, and whether the host has seen the end of its collective; None where none is missing.

    Args:
        axes: the axes of the group.
        members: its ranks.
        reporting: the ranks whose collectives are known.
        begun: rank -> number -> the collective that it has begun in this group.
    """
    last = {rank: max(begun.get(rank, {0: None})) for rank in members if rank in reporting}
    low = min(last.values())
    later = [n for rank in last for n, one in begun.get(rank, {}).items() if n > low and (low or not one.is_done)]
    wanted = min(later, default=max(last.values()))
    absent = [rank for rank in last if last[rank] < wanted]
    inside = {rank: begun[rank][wanted] for rank in last if wanted in begun.get(rank, {})}
    if not absent or not low:  # all have come to it, or a rank's log is too short: only ranks that wait there count
        inside = {rank: one for rank, one in inside.items() if not one.is_done}
    first = next(iter(inside.values()), None)
    silent = [rank for rank in members if rank not in reporting]
    others = [rank for rank, one in inside.items() if first is not None and one.operation != first.operation]
    if first is None or not (absent or others or silent):
        return None
    waiting = [rank for rank in inside if rank not in others]
    line = f"{named_ranks(waiting)} wait{'s' * (len(waiting) == 1)} in {first}"
    if others:
        line += f", where {named_ranks(others)} run{'s' * (len(others) == 1)} {inside[others[0]]}"
    line += f", over {axes}"
    if absent:
        was = begun[absent[0]][last[absent[0]]] if last[absent[0]] else "none"
        line += f"; {named_ranks(absent)} did not come to it, the last there: {was}"
    if silent:
        line += f"; nothing is known of {named_ranks(silent)}"
    return first.is_done, line
