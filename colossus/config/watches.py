"""Parts of the section ``train``: watches on a run. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from colossus.config.section import Count, CountOrZero, Section, ShortSection


class LossSpikes(Section):
    """Spikes of the loss: which loss is one, and the reaction."""

    #: a loss above this factor times the median of the losses before it is a spike
    factor: Annotated[float, Field(gt=1)]
    #: number of losses in the median; as many first steps are not judged
    window: Count = 50
    #: "rollback": the launcher goes back to the newest save before the spike, by launch.restarts; "raise": the run ends
    action: Literal["rollback", "raise"] = "rollback"
    #: batches after that save that are left out; None: all up to that of the spike
    skip_batches: CountOrZero | None = None


class StragglerSection(ShortSection):
    """The watch for slow ranks. A bare number is the factor."""

    #: a rank is slow above this factor times the median compute time of the other ranks of its pipeline stage
    factor: Annotated[float, Field(gt=1)] = 1.5
    #: rows of the log whose median counts; one step of each rank is timed for a row
    rows: Count = 3

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"factor": float(bare)} if isinstance(bare, int | float) and not isinstance(bare, bool) else None
