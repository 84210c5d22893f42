"""The ``checkpoint`` section: when checkpoints are saved, which stay, where a run goes on. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from colossus.config.section import CountOrZero, Names, Seconds, Section, ShortSection


def _rename(value: Any) -> Any:
    if value is None or callable(value):
        return value
    if isinstance(value, dict) and all(
        isinstance(key, str) and (new is None or isinstance(new, str)) for key, new in value.items()
    ):
        return value
    raise ValueError(
        f"must be a dict of names or prefixes, {{'encoder': 'trunk', 'head.*': None}}, or a function of a name, got "
        f"{value!r}"
    )


class Weights(ShortSection):
    """Where a run that begins takes its parameters and buffers from, ``engine.checkpoints.load_weights`` tells more.

    A bare string is the path.
    """

    #: a checkpoint, a folder of them or a run folder; or a model folder of Hugging Face; by default that of
    #: ``model = dict(type="hf", path=...)``
    path: Annotated[str, Field(min_length=1)] = ""
    #: patterns of names in this model, ("blocks.*",); None loads all
    only: Annotated[Names, Field(min_length=1)] | None = None
    #: names of the checkpoint -> names in this model, by prefix or with stars; None leaves out; or a function
    rename: Annotated[Any, AfterValidator(_rename)] = None
    #: False loads what fits and says what did not
    strict: bool = True
    #: patterns of names in this model that may have more rows than were saved: a larger vocabulary, more positions
    grow: Names = ()

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"path": bare} if isinstance(bare, str) else None


class Checkpoint(Section):
    #: steps between checkpoints, one more follows the last step; 0 saves never
    every: CountOrZero = 0
    #: folder of the checkpoints; None is ``checkpoints`` in the run folder
    dir: Annotated[str, Field(min_length=1)] | None = None
    #: "auto": the latest checkpoint, if there is one, of --run-dir, else of ``dir``, else of the newest run of this
    #: ``name``, whatever its config; or a checkpoint, a folder of them, a run folder
    resume: Annotated[str, Field(min_length=1)] | None = None
    #: parameters and buffers that a run takes which does not resume: the path of a checkpoint, or dict(path=..., ..)
    weights: Weights | None = None
    #: how many of the newest stay; 0 keeps all
    keep_last: CountOrZero = 3
    #: those whose step is a multiple of this stay, too; 0: no others
    keep_every: CountOrZero = 0
    #: a step waits for a copy in memory only, which is written while training goes on
    background: bool = True
    #: after a stop signal: for the step to end and a save to begin, then as long as writing never pauses for so long
    grace_seconds: Seconds = 60.0
    #: what a save that fails (a full disk, say) does: "continue" says so and trains on, "stop" ends the run
    on_error: Literal["continue", "stop"] = "continue"
