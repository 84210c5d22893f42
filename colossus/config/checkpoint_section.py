"""The section of a config on checkpoints: when they are saved, and what a run begins with."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from colossus.config.section import CountOrZero, Names, Seconds, Section, ShortSection


def _rename(value: Any) -> Any:
    is_names = isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if value is None or callable(value) or (is_names and all(isinstance(new, str | None) for new in value.values())):
        return value
    names = "a dict of names or prefixes, {'encoder': 'trunk', 'head.*': None}, or a function of a name"
    raise ValueError(f"must be {names}, got {value!r}")


class Weights(ShortSection):
    """Source of the parameters and buffers of a new run, see ``engine.checkpoints.load_weights``.

    A bare string is the path.
    """

    #: a checkpoint, a folder of them or a run folder; or a model folder of Hugging Face; by default that of
    #: ``model = dict(type="hf", path=...)``
    path: Annotated[str, Field(min_length=1)] = ""
    #: patterns of names in this model, ("blocks.*",); None: all
    only: Annotated[Names, Field(min_length=1)] | None = None
    #: name in the checkpoint -> name in this model, by prefix or with stars, None to leave it out; or a function
    rename: Annotated[Any, AfterValidator(_rename)] = None
    #: whether all must fit; False loads what fits and logs the rest
    strict: bool = True
    #: patterns of names in this model that may have more rows than were saved: a larger vocabulary, more positions
    grow: Names = ()
    #: "ema" or "swa": loads the average of weights of that run's hook in place of its weights
    average: Annotated[str, Field(min_length=1)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"path": bare} if isinstance(bare, str) else None


class Checkpoint(Section):
    #: steps between checkpoints, one more follows the last step; 0: never
    every: CountOrZero = 0
    #: folder of the checkpoints; None: ``checkpoints`` in the run folder
    dir: Annotated[str, Field(min_length=1)] | None = None
    #: "auto": the latest checkpoint, if there is one, of --run-dir, else of ``dir``, else of the newest run of this
    #: ``name``, whatever its config; or a checkpoint, a folder of them, a run folder
    resume: Annotated[str, Field(min_length=1)] | None = None
    #: source of the parameters and buffers of a run that does not resume: path of a checkpoint, or dict(path=..., ..)
    weights: Weights | None = None
    #: number of newest checkpoints that stay; 0: all
    keep_last: CountOrZero = 3
    #: checkpoints whose step is a multiple of this stay, too; 0: no others
    keep_every: CountOrZero = 0
    #: whether training waits only for a copy in memory, which is written while it continues
    background: bool = True
    #: steps between checkpoints in the memory of the hosts, which only a restart by the launcher reads; 0: none
    memory_every: CountOrZero = 0
    #: 2: each host also stores those of another host's ranks, fetched while steps run
    memory_copies: Literal[1, 2] = 1
    #: seconds after a stop signal for the step to end and a save to begin, and then the longest pause in its writing
    grace_seconds: Seconds = 60.0
