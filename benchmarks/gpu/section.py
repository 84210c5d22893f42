"""What a section is made of: cases, and the rows that they become. No torch.

A section is a module with one function:

    def cases(device: torch.device, budget: float) -> Iterable[Case]:

``device`` is ``cuda:0`` or ``cpu``, ``budget`` the seconds that all its cases may take together. It is called in a
forked process that has imported torch and has not used a device. A section whose cases start ranks
(`benchmarks.gpu.ranks`) must not use the device itself: what has used CUDA cannot be forked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Figures = Mapping[str, float | int | str | None]
Result = Literal["passed", "failed", "left out"]


class LeftOut(Exception):
    """Raised by a case that cannot be run here; the message says why, and what it would want."""


@dataclass(frozen=True)
class Case:
    """One row of the table.

    Attributes:
        name: unique in its section; a case that crashed is passed over by its name.
        run: returns what is worth a figure in the table (None: nothing), raises what is wrong, or `LeftOut`.
        seconds: after which it counts as hung, and is killed with its whole process group.
    """

    name: str
    run: Callable[[], Figures | None]
    seconds: float = 60.0


@dataclass(frozen=True)
class Row:
    """What became of a case.

    Attributes:
        seconds: that it took.
        figures: as the case returned them.
        detail: why it was left out, or what failed.
        log: of a failure, the file with its output, and the stacks of what hung.
    """

    section: str
    name: str
    result: Result
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    detail: str = ""
    log: str | None = None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Section:
    """Where the cases are, and what share of the budget they have.

    Attributes:
        module: under `benchmarks.gpu.sections`; imported in the section's own process.
        seconds: of a budget of 600. What a section leaves is shared by those after it.
        about: one line for ``--help``.
    """

    name: str
    module: str
    seconds: float
    about: str


def choose(sections: Iterable[Section], names: Iterable[str]) -> list[Section]:
    """Those of the given names, in the order of the table; all without any."""
    wanted = set(names)
    return [section for section in sections if not wanted or section.name in wanted]
