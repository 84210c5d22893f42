"""The section ``launch``: what the launcher does when a rank fails. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from colossus.arithmetic import parse_seconds
from colossus.config.section import Count, CountOrZero, Positive, Seconds, Section, ShortSection, is_number


class RestartsSection(ShortSection):
    """A bare number is ``max``."""

    #: restarts after which the next failure ends the run; 0: the first does
    max: CountOrZero
    #: the time in which these may be, "1h" or "30m", say; None: the whole run
    within: Annotated[Positive, BeforeValidator(parse_seconds)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"max": bare} if is_number(bare) else None


class Launch(Section):
    #: how often `colossus launch` starts the ranks again after one has failed, from the newest checkpoint: a number, or
    #: dict(max=3, within="1h"); None: a failure ends the run
    restarts: RestartsSection | None = None
    #: the fewest processes with which a run may go on; None: their number is fixed
    min_processes: Count | None = None
    #: of --nnodes MIN:MAX: how long a run waits for more nodes than the fewest before it goes on without them
    rejoin_seconds: Seconds = 30.0
