"""The sections ``optimizer``, ``checkpoint`` and ``launch`` of a config. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, model_validator

from colossus.arithmetic import parse_seconds
from colossus.config.section import (
    FROM_LIST,
    Count,
    CountOrZero,
    Named,
    Names,
    Positive,
    Seconds,
    Section,
    ShortSection,
    is_number,
    require_type,
)


class TableOptimizer(Named):
    """The optimizer of tables with sparse gradients, if it differs from that of other parameters."""

    #: SparseAdam, Adagrad, RowWiseAdagrad, SGD
    type: str
    #: learning rate; by default ``optimizer.lr``
    lr: Positive | None = None


class GroupRule(Section):
    """Options of the optimizer for the parameters whose names match."""

    model_config = ConfigDict(extra="allow")

    #: one pattern with * and ?, or several, of the parameters' full names
    match: Annotated[
        Names, BeforeValidator(lambda value: (value,) if isinstance(value, str) else value), Field(min_length=1)
    ]
    #: factor of their learning rate; 2.0 doubles it
    lr_scale: Positive | None = None
    #: True: they are not trained; False: they are, even if an earlier rule has frozen them
    frozen: bool | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The optimizer's own options."""
        return dict(self.model_extra or {})

    @model_validator(mode="after")
    def _sets_something(self) -> GroupRule:
        if "lr" in self.options:
            raise ValueError("lr: a rule has a factor of optimizer.lr, which the schedule changes: lr_scale = 0.1")
        if not self.options and self.lr_scale is None and self.frozen is None:
            raise ValueError(f"sets nothing for {', '.join(self.match)}: add lr_scale, frozen or an option")
        return self


class Optimizer(Named):
    #: a name (AdamW, SGD, RMSprop, ..), "package.module:Class", or a callable of the parameters; options follow
    type: Annotated[Any, AfterValidator(require_type)] = "AdamW"
    #: peak of the learning rate
    lr: Positive = 3e-4
    #: [dict(match="*.bias", weight_decay=0.0), ..]: options by name of the parameter; if several rules match a
    #: parameter all apply, and a later one wins
    groups: Annotated[tuple[GroupRule, ...], FROM_LIST] = ()
    #: factor of each block's learning rate relative to the next block's; None: all have the same
    layer_decay: Annotated[float, Field(gt=0, le=1)] | None = None
    #: whether the class needs whole parameters (norms of layers, SOAP): each is updated at a rank that owns it
    whole: bool = False
    #: another optimizer for tables with sparse gradients, dict(type=.., **options)
    tables: TableOptimizer | None = None

    @property
    def has_groups(self) -> bool:
        """Return whether some parameters have other options than others, or are frozen."""
        return bool(self.groups) or self.layer_decay is not None

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the class beside the parameters."""
        return {"lr": self.lr, **self.options}


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
