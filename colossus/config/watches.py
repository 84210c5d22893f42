"""Of the section ``train``: what is looked at while a run goes on. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from colossus.config.section import Count, CountOrZero, Section, ShortSection


class LossSpikes(Section):
    """When a loss is a spike, and what follows."""

    #: a loss more than so many times the median of those before it
    factor: Annotated[float, Field(gt=1)]
    #: losses of which the median is; the first so many steps are not judged
    window: Count = 50
    #: "rollback": the launcher goes back to the newest save before it, by launch.restarts; "raise": the run ends
    action: Literal["rollback", "raise"] = "rollback"
    #: batches that are left out behind that save; None: all up to that of the spike
    skip_batches: CountOrZero | None = None


class StragglerSection(ShortSection):
    """Which rank is slow. A bare number is the factor."""

    #: of the time that the other ranks of its pipeline stage compute, in the median
    factor: Annotated[float, Field(gt=1)] = 1.5
    #: of the log, in which a step of each rank is timed: the median of so many counts
    rows: Count = 3

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"factor": float(bare)} if isinstance(bare, int | float) and not isinstance(bare, bool) else None
