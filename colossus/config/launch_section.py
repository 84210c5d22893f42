"""The section ``launch``: how the launcher reacts when a rank fails. No torch."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator

from colossus.arithmetic import parse_seconds
from colossus.config.section import Count, CountOrZero, Positive, Seconds, Section, ShortSection, is_number


class RestartsSection(ShortSection):
    """Limits of restarts. A bare number is ``max``."""

    #: restarts after which the next failure ends the run; 0: the first failure ends it
    max: CountOrZero
    #: time in which these restarts are counted, for example "1h" or "30m"; None: the whole run
    within: Annotated[Positive, BeforeValidator(parse_seconds)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"max": bare} if is_number(bare) else None


class Launch(Section):
    #: how often `colossus launch` restarts the ranks from the newest checkpoint after one has failed: a number, or
    #: dict(max=3, within="1h"); None: a failure ends the run
    restarts: RestartsSection | None = None
    #: fewest processes with which a run may continue; None: their number is fixed
    min_processes: Count | None = None
    #: with --nnodes MIN:MAX, seconds that a run with MIN nodes or more waits for others before it continues
    rejoin_seconds: Seconds = 30.0
