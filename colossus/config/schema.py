"""What a config file may hold: every section, its keys, their defaults and their ranges. No torch.

Sections are frozen; a changed config is a copy. Keys that nobody reads are errors, except the options of a named
component (``dict(type="AdamW", weight_decay=0.1)``), which belong to the component.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, model_validator

from colossus.config.checkpoint import Checkpoint
from colossus.config.section import (
    Count,
    CountOrZero,
    Counts,
    Fraction,
    Named,
    Names,
    Positive,
    Seconds,
    Section,
    ShortSection,
    SizedSection,
    is_number,
    require_type,
)
from colossus.config.training import Train

#: options of ``data`` that the loader takes, whatever the dataset
READING_OPTIONS = (
    "num_workers", "collate_fn", "per_rank", "read_ahead", "seed_samples", "multiprocessing_context", "worker_timeout",
)  # fmt: skip

#: letters of the name of a run in a file name, to which a time is added
LONGEST_NAME = 200

AXES = ("pipeline", "data", "sequence", "tensor")


class StrategySection(Named):
    """The data-parallel strategy: what replicas exchange, and when."""

    type: Annotated[Any, AfterValidator(require_type)] = "all_reduce"


class TableOptimizer(Named):
    """Of tables with sparse gradients, where it is another than that of the other parameters."""

    type: str
    #: by default ``optimizer.lr``
    lr: Positive | None = None


class Optimizer(Named):
    type: Annotated[Any, AfterValidator(require_type)] = "AdamW"
    lr: Positive = 3e-4
    tables: TableOptimizer | None = None

    def spec(self) -> dict[str, Any]:
        """Without what is for tables."""
        return {key: value for key, value in super().spec().items() if key != "tables"}


class LRSchedule(Named):
    type: Annotated[Any, AfterValidator(require_type)] = "constant"
    #: steps over which the learning rate rises linearly to ``optimizer.lr``
    warmup_steps: CountOrZero = 0
    #: the learning rate at the end, as a fraction of ``optimizer.lr``
    min_ratio: Fraction = 0.0


class Schedule(Named):
    """The pipeline schedule; without a pipeline its microbatches are gradient accumulation."""

    type: Annotated[Any, AfterValidator(require_type)] = "1f1b"
    microbatches: Count = 1


def _mode(value: Any) -> Any:
    # "1D" is how papers write it; names of a user's own modes keep their case
    return value.lower() if isinstance(value, str) and value.lower() in ("1d", "2d", "2.5d", "3d") else value


def _split(value: Any) -> Any:
    if value == "parameters":
        return value
    is_list = isinstance(value, list | tuple) and bool(value)
    if is_list and all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in value):
        return tuple(value)
    raise ValueError(f"must be 'parameters' or the number of blocks of each stage, [3, 3], got {value!r}")


class PipelineSection(SizedSection):
    #: what stages are equal in, as far as they can be; or the numbers or names of blocks that say where they begin
    split: Annotated[str | tuple[int, ...], BeforeValidator(_split)] = "parameters"


class TensorSection(SizedSection):
    mode: Annotated[str, BeforeValidator(_mode)] = "1d"
    #: copies of the grid in 2.5D; None takes the fewest that leave a square
    depth: Count | None = None
    #: ranks along each axis of the mode, for rectangles; their product is ``size``
    shape: Counts | None = None
    #: activations between blocks are split by tokens over the tensor ranks
    sequence_sharded: bool = False
    #: inputs gathered in forward are gathered "again" in backward (less memory) or kept ("keep": less traffic)
    gathered: Literal["again", "keep"] = "again"
    #: a gathered weight is held for one "matmul", for a "microbatch", or for a "step" with all its microbatches
    weights: Literal["matmul", "microbatch", "step"] = "matmul"

    @model_validator(mode="before")
    @classmethod
    def _size_of_shape(cls, value: Any) -> Any:
        if isinstance(value, dict) and "size" not in value and isinstance(value.get("shape"), (list, tuple)):
            numbers = value["shape"]
            if all(isinstance(number, int) and number >= 1 for number in numbers):
                return {**value, "size": math.prod(numbers)}
        return value


class SequenceSection(SizedSection):
    #: "ring", "ulysses" or "hybrid"; None takes "ring", or for a GPT the one of the first two that sends fewer bytes
    mode: str | None = None
    #: ranks of the inner axis of "hybrid"; None is the largest divisor of the size up to its square root
    ulysses: Count | None = None
    #: sequences that do not divide are padded: inputs with 0, integer labels with -100
    pad: bool = False


class ZeroSection(ShortSection):
    """ZeRO (1910.02054): a bare number is the stage."""

    #: 1: optimizer state; 2: and gradients; 3: and parameters; 0: nothing
    stage: Annotated[int, Field(ge=0, le=3)] = 0
    #: data ranks that share one copy, replicated over the others (HSDP); None: all of them
    shard: Count | None = None
    #: on CUDA, keep what the optimizer updates and its state in the memory of the host; of stage 3 the shards, too
    offload: bool = False

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"stage": bare} if is_number(bare) else None

    @model_validator(mode="after")
    def _has_a_stage(self) -> ZeroSection:
        given = [key for key in ("shard", "offload") if getattr(self, key)]
        if given and not self.stage:
            raise ValueError(f"{' and '.join(given)}: nothing without a stage; zero = dict(stage=1, 2 or 3, ..)")
        return self


def _permutation(value: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(value) != sorted(AXES):
        given = ", ".join(value) or "nothing"
        raise ValueError(f"must name each of {', '.join(AXES)} once, outermost first, got {given}")
    return value


class Parallel(Section):
    #: replicas; None is derived from the number of processes
    data: Count | None = None
    pipeline: PipelineSection = PipelineSection()
    tensor: TensorSection = TensorSection()
    sequence: SequenceSection = SequenceSection()
    #: what data ranks shard; short for strategy = dict(type="zero", ..)
    zero: ZeroSection = ZeroSection()
    strategy: StrategySection = StrategySection()
    #: outermost first: the last axis has neighbouring ranks
    rank_order: Annotated[Names, AfterValidator(_permutation)] = AXES

    @model_validator(mode="after")
    def _one_strategy(self) -> Parallel:
        if not self.zero.stage or "strategy" not in self.model_fields_set or self.strategy.type == "hierarchical":
            return self
        if self.strategy.type == "hybrid":
            raise ValueError(
                f"zero = {self.zero.stage} and strategy = 'hybrid': a row of a table has one owner, who sums its "
                f"gradient and updates it, and ZeRO would cut the same table over the same data ranks once more. Leave "
                f"zero out (tables and their optimizer state are cut over data already), or take zero with dense "
                f"gradients: embeddings without sparse=True, and no strategy"
            )
        raise ValueError(
            f"zero = {self.zero.stage} and strategy = {self.strategy.type!r} both say what data ranks do: give one "
            f"of them. ZeRO wants replicas that are equal, and gathers itself what they exchange; with strategy = "
            f"'hierarchical' it shards inside of each host, and sums between hosts"
        )

    @property
    def data_strategy(self) -> dict[str, Any]:
        """The strategy as ``Registry.build`` takes it."""
        zero = self.zero
        return {"type": "zero", "stage": zero.stage, "offload": zero.offload} if zero.stage else self.strategy.spec()


class Comm(Section):
    #: write calls and bytes sent in each step, by axis, into the rows of metrics.jsonl
    accounting: bool = False
    #: collectives that each rank remembers for the report of a failure
    log_size: CountOrZero = 32
    timeout_seconds: Seconds = 120.0
    #: collectives between processes of one host go through shared memory (CPU); False: through gloo
    shared_memory: bool = True
    #: what joins the ranks: "auto" is nccl on CUDA, gloo on CPU; with "gloo" on CUDA several ranks may share a device,
    #: and what they send each other goes through the memory of the host
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    #: size of the buckets in which gradients are reduced
    bucket_mb: Positive = 25.0


def _name(value: str | None) -> str | None:
    if value is not None and (not value or "/" in value or value in (".", "..")):
        raise ValueError(f"names the run folder, so it must be a plain file name, got {value!r}")
    if value is not None and len(value.encode()) > LONGEST_NAME:
        raise ValueError(f"names the run folder, so it has at most {LONGEST_NAME} letters, got {len(value)}")
    return value


def _data(value: Any) -> Any:
    if isinstance(value, dict):
        if "type" not in value:
            raise ValueError('needs a type: data = dict(type="PythonStdlib", **options), or a dataset object')
        require_type(value["type"])
        return Named.model_validate(value)
    if isinstance(value, str):
        return Named.model_validate(value)
    if isinstance(value, (ModuleType, int, float)):
        raise ValueError(f"must be dict(type=..., **options), a dataset object or a callable, got {value!r}")
    return value


def _hook(value: Any) -> Any:
    if isinstance(value, (dict, str)):
        if not isinstance(value, str) and "type" not in value:
            raise ValueError("needs a type: dict(type=..., **options), or a callable")
        return Named.model_validate(value)
    if isinstance(value, Named) or callable(value):
        return value
    raise ValueError(f"must be dict(type=..., **options) or a callable, got {value!r}")


Hooks = Annotated[
    tuple[Annotated[Any, AfterValidator(_hook)], ...],
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


class Config(Section):
    """A whole config. ``load_config`` makes it; after that ``parallel.data`` is a number.

    ``model`` is None when the model is handed to ``colossus.initialize``; ``data`` is a `Named`, or whatever
    object or callable the file holds, or None.
    """

    name: Annotated[str | None, AfterValidator(_name)] = None
    parallel: Parallel = Parallel()
    model: Named | None = None
    data: Annotated[Any, AfterValidator(_data)] = None
    optimizer: Optimizer = Optimizer()
    lr_schedule: LRSchedule = LRSchedule()
    schedule: Schedule = Schedule()
    train: Train = Train()
    comm: Comm = Comm()
    checkpoint: Checkpoint = Checkpoint()
    hooks: Hooks = ()
    device: Literal["auto", "cpu", "cuda"] = "auto"

    _source: str | None = PrivateAttr(None)

    @property
    def source(self) -> str | None:
        """Name of the config file, for messages; None when the config was a dict."""
        return self._source
