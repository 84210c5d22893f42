"""Which collective the ranks wait in, and who did not come to it: from what they have left behind. No torch.

Two sources say the same things: torch's flight recorder, of ranks that talk through NCCL, and our own log of
collectives (`comm/log.py`), which is right where the host waits for each of them.
"""

from __future__ import annotations

import contextlib
import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colossus.context.grid import RankGrid
from colossus.launch.failure import FOLDER, RECORDING, FailureRecord

_MOST = 4
_PACKAGE = str(Path(__file__).parents[1])
# frames of a recorded stack that do not say who wanted the collective
_BETWEEN = (
    f"{_PACKAGE}/comm/",
    f"{_PACKAGE}/layout/",
    f"{_PACKAGE}/tensor_parallel/",
    f"{_PACKAGE}/sequence_parallel/",
)
_OF_TORCH = re.compile(r"-packages/torch/|/torch/(distributed|autograd|nn|utils|_\w+)/|^<")


@dataclass(frozen=True)
class Begun:
    """A collective that a rank has begun.

    Attributes:
        axes: of its group.
        members: the ranks of the group.
        number: of the group's collectives, counted on this rank.
        what: ``all_reduce [3 float32]``.
        site: the line that wanted it, as far as known.
    """

    rank: int
    axes: str
    members: tuple[int, ...]
    number: int
    what: str
    site: str
    is_done: bool

    def __str__(self) -> str:
        return f"#{self.number} {self.what}{self.site and f' at {self.site}'}"


def path_of(folder: Path, rank: int) -> Path:
    """Where a rank's recording lies."""
    return folder / FOLDER / f"{RECORDING}{rank}"


def who_is_missing(folder: Path | None, records: Iterable[FailureRecord], grid: RankGrid) -> list[str]:
    """Lines on the collectives that ranks wait in: of the flight recorder where there is one, else of the log."""
    dumps = read_all(folder) if folder is not None else {}
    if dumps:
        begun = [each for rank, dump in dumps.items() for each in of_recording(dump, rank, grid)]
        lines = describe(begun, dumps.keys(), is_exact=True)
        return (
            [*lines, f"recorded by torch: {path_of(folder or Path(), min(dumps)).parent}/{RECORDING}*"] if lines else []
        )
    told = [record for record in records if record.progress]
    begun = [each for record in told for each in of_log(record, grid)]
    return describe(begun, {record.rank for record in told}, is_exact=False)


def describe(begun: Iterable[Begun], heard: Iterable[int], *, is_exact: bool) -> list[str]:
    """A line for each group in which ranks wait: for whom, or for what.

    Args:
        heard: the ranks that have left something; of others nothing is known.
        is_exact: what is not done has not ended; else perhaps nobody has looked yet.
    """
    heard = set(heard)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, dict[int, Begun]]] = defaultdict(lambda: defaultdict(dict))
    for each in begun:
        groups[each.axes, each.members][each.rank][each.number] = each
    lines = []
    for (axes, members), by_rank in groups.items():
        if len(members) < 2:
            continue
        silent = sorted(set(members) - heard)
        pending = sorted({n for of_rank in by_rank.values() for n, one in of_rank.items() if not one.is_done})
        found = [_Wait(number, by_rank, [rank for rank in members if rank in heard]) for number in pending]
        wait = next((each for each in found if each.absent or each.others), found[0] if found else None)
        if wait is None:
            continue
        line = f"{wait}, over {axes}"
        for rank in wait.absent[:_MOST]:
            last = by_rank[rank][max(by_rank[rank])] if by_rank.get(rank) else "none"
            line += f"; rank {rank} has not come to it, its last there: {last}"
        if len(wait.absent) > _MOST:
            line += f"; nor have {len(wait.absent) - _MOST} more ranks"
        if silent:
            line += f"; nothing is recorded here of {_ranks(silent)}"
        if wait.absent or wait.others or silent:
            lines.append((not (wait.absent or wait.others), line))
        elif is_exact:
            end = "all of its ranks have come to it, and it does not end (the network? see NCCL_DEBUG=INFO)"
            lines.append((True, f"{line}; {end}"))
    return [line for _, line in sorted(lines, key=lambda each: each[0])][:_MOST]


class _Wait:
    """A collective of a group that has not ended on some rank.

    Attributes:
        absent: ranks that have not come to it.
        others: ranks that run another in its place.
    """

    def __init__(self, number: int, by_rank: Mapping[int, Mapping[int, Begun]], heard: Sequence[int]) -> None:
        self._inside = {rank: by_rank[rank][number] for rank in sorted(by_rank) if number in by_rank[rank]}
        self._waiting = [rank for rank, one in self._inside.items() if not one.is_done]
        wanted = self._inside[self._waiting[0]]
        self.others = [rank for rank, one in self._inside.items() if one.what != wanted.what]
        self.absent = [rank for rank in sorted(heard) if max(by_rank.get(rank, {0: None})) < number]

    def __str__(self) -> str:
        waiting = [rank for rank in self._waiting if rank not in self.others]
        text = f"{_ranks(waiting)} wait{'s' * (len(waiting) == 1)} in {self._inside[waiting[0]]}"
        if self.others:
            other = self._inside[self.others[0]]
            text += f", where {_ranks(self.others)} run{'s' * (len(self.others) == 1)} {other}"
        return text


def _ranks(ranks: Sequence[int]) -> str:
    listed = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank{'s' * (len(ranks) > 1)} {listed}"


# -- our own log ----------------------------------------------------------------------------------------------


def of_log(record: FailureRecord, grid: RankGrid) -> list[Begun]:
    """What a failure record holds of our log (`comm.log.progress`)."""
    found = []
    for axes, number, what, site, is_done in record.progress:
        with contextlib.suppress(ValueError):  # a subgroup with a label of its own
            members = tuple(grid.group(record.rank, axes.split("x")))
            found.append(Begun(record.rank, axes, members, number, what, site, is_done))
    return found


# -- torch's flight recorder ----------------------------------------------------------------------------------


def read_all(folder: Path) -> dict[int, Mapping[str, Any]]:
    """Every readable recording below the run folder, by rank."""
    found = {}
    for path in (folder / FOLDER).glob(f"{RECORDING}*"):
        number = path.name.removeprefix(RECORDING)
        if number.isdecimal():
            with contextlib.suppress(OSError, pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError):
                dump = _Plain(io.BytesIO(path.read_bytes())).load()
                if isinstance(dump, dict) and isinstance(dump.get("entries"), list):
                    found[int(number)] = dump
    return dict(sorted(found.items()))


class _Plain(pickle.Unpickler):
    """Numbers, strings, lists and dicts: what a recording consists of. Anything else is not ours to run."""

    def find_class(self, module: str, name: str) -> Any:
        raise pickle.UnpicklingError(f"a recording holds {module}.{name}")


def of_recording(dump: Mapping[str, Any], rank: int, grid: RankGrid) -> list[Begun]:
    """The collectives of a recording; messages between two ranks are numbered by no group, and left out."""
    found = []
    for entry in dump["entries"]:
        if entry.get("is_p2p"):
            continue
        name, label = entry["process_group"]
        axes = axes_of(label)
        members = _members(dump.get("pg_config", {}).get(name), label, axes, rank, grid)
        what = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
        what = f"{what} [{_sizes(entry['input_sizes'])} {_dtype(entry.get('input_dtypes'))}]"
        is_done = entry["state"] == "completed" or bool(entry.get("retired"))
        number, site = int(entry["collective_seq_id"]), _site(entry.get("frames", ()))
        found.append(Begun(rank, axes, members, number, what, site, is_done))
    return found


def axes_of(label: str) -> str:
    """Axes of a group by what it is described as: ``colossus/1/dataxtensor/0_1_2_3``, ``mesh_data``, ``default_pg``."""
    if label.startswith("colossus/"):
        return label.split("/")[2]
    return label.removeprefix("mesh_") if label.startswith("mesh_") else "all ranks"


def _members(config: Mapping[str, str] | None, label: str, axes: str, rank: int, grid: RankGrid) -> tuple[int, ...]:
    if label.startswith("colossus/"):
        return tuple(map(int, label.split("/")[3].split("_")))
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return tuple(json.loads((config or {})["ranks"]))
    with contextlib.suppress(ValueError):
        return tuple(grid.group(rank, axes))
    return tuple(range(grid.world_size))


def _sizes(sizes: Sequence[Sequence[int]]) -> str:
    return ", ".join("x".join(map(str, size)) or "scalar" for size in sizes)


def _dtype(names: Sequence[str] | None) -> str:
    known = {"Float": "float32", "Double": "float64", "Half": "float16", "BFloat16": "bfloat16", "Long": "int64"}
    return " ".join(dict.fromkeys(known.get(name, name.lower()) for name in names or ()))


def _site(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost frame that says who wanted the collective."""
    for frame in frames:
        name = frame["filename"]
        if not name.startswith(_BETWEEN) and not _OF_TORCH.search(name):
            return f"{name.replace(_PACKAGE, 'colossus', 1)}:{frame['line']}"
    return ""
