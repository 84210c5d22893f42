"""The schema of a config file: every section, its keys, their defaults and their ranges. No torch.

Sections are frozen; a changed config is a copy. Keys that nobody reads are errors, except the options of a named
component (``dict(type="AdamW", weight_decay=0.1)``), which belong to the component.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import ModuleType
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

from colossus.arithmetic import parse_bytes
from colossus.config.section import (
    FROM_LIST,
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
from colossus.config.sections import Checkpoint, Launch, Optimizer
from colossus.config.training import Train


class ReadingOptions(Section):
    """Options of reading data: keys of ``data`` beside the options of the dataset."""

    model_config = ConfigDict(extra="ignore")

    #: processes that read a dataset ahead of the step; 0: the rank itself reads it
    num_workers: CountOrZero = 0
    #: function that makes a batch of a list of samples; None: torch's `default_collate`
    collate_fn: Callable[[list[Any]], Any] | None = None
    #: whether an iterable differs between data ranks, so that no rank takes a shard of it
    per_rank: bool = False
    #: whether global random generators are seeded for each sample; None: unless data has ``deterministic = True``
    seed_samples: bool | None = None
    #: start method of workers; None: Python's default
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None
    #: seconds that a rank waits for a worker's batch; 0: forever
    worker_timeout: Annotated[float, Field(ge=0)] = 300.0

    def seeds(self, data: Any) -> bool:
        """Return whether generators are seeded for the samples of ``data``."""
        return not getattr(data, "deterministic", False) if self.seed_samples is None else self.seed_samples

    @property
    def seeds_collate(self) -> bool:
        """Return whether generators are seeded before a batch is collated, by its position in the global batch."""
        return self.collate_fn is not None and self.seed_samples is not False


AXES = ("pipeline", "data", "sequence", "tensor")


class StrategySection(Named):
    """The data-parallel strategy: what replicas exchange, and when."""

    #: name of a strategy (all_reduce, hierarchical, hybrid, sgp, d-psgd, ad-psgd, local_sgd, ..); options follow
    type: Annotated[Any, AfterValidator(require_type)] = "all_reduce"


class LRSchedule(Named):
    #: a name (constant, cosine, wsd, ..), a class of torch.optim.lr_scheduler or its path, or
    #: f(progress, min_ratio, **options) -> factor of ``optimizer.lr``
    type: Annotated[Any, AfterValidator(require_type)] = "constant"
    #: steps over which the learning rate rises linearly to ``optimizer.lr``
    warmup_steps: CountOrZero = 0
    #: learning rate at the end, as a fraction of ``optimizer.lr``
    min_ratio: Fraction = 0.0


class Schedule(Named):
    """The pipeline schedule. Without a pipeline, its microbatches are gradient accumulation."""

    #: gpipe, 1f1b, interleaved, zb-h1, zb-v
    type: Annotated[Any, AfterValidator(require_type)] = "1f1b"
    #: number of microbatches in a replica's batch
    microbatches: Count = 1


def _split(value: Any) -> Any:
    if value in ("parameters", "time"):
        return value
    is_list = isinstance(value, list | tuple) and bool(value)
    if is_list and all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in value):
        return tuple(value)
    raise ValueError(f"must be 'parameters', 'time' or the number of blocks of each stage, [3, 3], got {value!r}")


class PipelineSection(SizedSection):
    #: quantity that is balanced over stages: "parameters", or the predicted "time" of a microbatch; or the number of
    #: blocks of each stage
    split: Annotated[str | tuple[int, ...], BeforeValidator(_split)] = "parameters"


class TensorSection(SizedSection):
    #: 1d, 2d, 2.5d, 3d
    mode: str = "1d"
    #: copies of the grid in 2.5D; None: the fewest with which the grid is square
    depth: Count | None = None
    #: ranks along each axis of the mode, for rectangles; their product is ``size``
    shape: Counts | None = None
    #: whether activations between blocks are split by tokens over the tensor ranks
    sequence_sharded: bool = False
    #: inputs gathered in forward are gathered "again" in backward (less memory) or kept ("keep": less traffic)
    gathered: Literal["again", "keep"] = "again"
    #: a gathered weight is kept for one "matmul", for a "microbatch", or for a "step" with all its microbatches
    weights: Literal["matmul", "microbatch", "step"] = "matmul"
    #: panels of rows in which a product gathers its input and reduces its result, while others are multiplied; for GPUs
    panels: Count = 1

    @model_validator(mode="before")
    @classmethod
    def _size_of_shape(cls, value: Any) -> Any:
        if isinstance(value, dict) and "size" not in value and isinstance(value.get("shape"), (list, tuple)):
            numbers = value["shape"]
            if all(isinstance(number, int) and number >= 1 for number in numbers):
                return {**value, "size": math.prod(numbers)}
        return value


class SequenceSection(SizedSection):
    #: "ring", "ulysses" or "hybrid"; None: "ring", or for a GPT the one of the first two that sends fewer bytes
    mode: str | None = None
    #: ranks of the inner axis of "hybrid"; None: the largest divisor of the size up to its square root
    ulysses: Count | None = None
    #: chunks of a sequence on each rank of a ring, an even number; more than 2 spread packed documents more evenly
    chunks: Annotated[int, Field(ge=2, multiple_of=2)] = 2
    #: whether sequences that do not divide are padded: inputs with 0, integer labels with -100
    pad: bool = False


class ZeroSection(ShortSection):
    """ZeRO (1910.02054): a bare number is the stage."""

    #: 1: optimizer state; 2: and gradients; 3: and parameters; 0: nothing
    stage: Annotated[int, Field(ge=0, le=3)] = 0
    #: data ranks that share one copy, replicated over the others (HSDP); None: all of them
    shard: Count | None = None
    #: on CUDA, whether the optimizer's parameters and state are in the memory of the host; in stage 3 the shards, too
    offload: bool = False

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"stage": bare} if is_number(bare) else None

    @model_validator(mode="after")
    def _has_a_stage(self) -> ZeroSection:
        keys = [key for key in ("shard", "offload") if getattr(self, key)]
        if keys and not self.stage:
            raise ValueError(f"{' and '.join(keys)}: no effect without a stage; zero = dict(stage=1, 2 or 3, ..)")
        return self


def _permutation(value: tuple[str, ...]) -> tuple[str, ...]:
    if sorted(value) != sorted(AXES):
        names = ", ".join(value) or "nothing"
        raise ValueError(f"must name each of {', '.join(AXES)} once, outermost first, got {names}")
    return value


def _size_of_memory(value: str) -> str:
    parse_bytes(value)
    return value


class AutoSection(ShortSection):
    """A plan that is chosen at launch, for the number of processes. Other keys of ``parallel`` keep their values."""

    #: further values that stay: of ``parallel``, dict(pipeline=2), or dict(schedule=dict(..), train=dict(..))
    keep: dict[str, Any] = {}
    #: a data sheet (h100, a100, ..) or a file of `colossus doctor --measure`; None: this machine's
    hardware: Annotated[str, Field(min_length=1)] | None = None
    #: memory of a device, for example "80GB"; None: that of the hardware
    memory: Annotated[str, AfterValidator(_size_of_memory)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {} if bare is True else None


class Parallel(ShortSection):
    """The parallel plan. The bare word "auto" is short for dict(auto=True)."""

    #: True or dict(keep=, hardware=, memory=): every key that is not set is chosen at launch
    auto: AutoSection | None = None
    #: replicas; None: derived from the number of processes
    data: Count | None = None
    #: stages of the pipeline; or dict(size=, split=)
    pipeline: PipelineSection = PipelineSection()
    #: ranks that split each weight; or dict(size=, mode=, ..)
    tensor: TensorSection = TensorSection()
    #: ranks that split each sequence; or dict(size=, mode=, ..)
    sequence: SequenceSection = SequenceSection()
    #: ranks that share the experts of `MoE` layers: the sequence size times a divisor of data, or a divisor of data
    expert: SizedSection = SizedSection()
    #: state that data ranks shard; short for strategy = dict(type="zero", ..)
    zero: ZeroSection = ZeroSection()
    #: exchanges between replicas: a name, or dict(type=.., **options)
    strategy: StrategySection = StrategySection()
    #: axes, outermost first: ranks along the last axis are neighbours
    rank_order: Annotated[Names, AfterValidator(_permutation)] = AXES

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"auto": {}} if bare == "auto" else None

    @model_validator(mode="after")
    def _one_strategy(self) -> Parallel:
        if not self.zero.stage or "strategy" not in self.model_fields_set or self.strategy.type == "hierarchical":
            return self
        raise ValueError(
            f"zero = {self.zero.stage} and strategy = {self.strategy.type!r} both define what data ranks do: set one "
            f"of them, or strategy = 'hierarchical', under which ZeRO shards inside of each host"
        )

    @property
    def data_strategy(self) -> dict[str, Any]:
        """The strategy as an argument of ``Registry.build``."""
        zero = self.zero
        return {"type": "zero", "stage": zero.stage, "offload": zero.offload} if zero.stage else self.strategy.spec()


class Comm(Section):
    #: whether rows of metrics.jsonl have calls and bytes sent in each step, by axis
    accounting: bool = False
    #: collectives that each rank remembers for the report of a failure
    log_size: CountOrZero = 32
    #: seconds after which a collective that not all ranks have joined ends the run
    timeout_seconds: Seconds = 120.0
    #: whether processes of one host use shared memory for collectives (CPU), in place of gloo
    shared_memory: bool = True
    #: library of collectives: "auto" is nccl on CUDA, gloo on CPU; with "gloo" on CUDA several ranks may share a
    #: device, and messages go through the memory of the host
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    #: size of the buckets in which gradients are reduced
    bucket_mb: Positive = 25.0


def _component(value: Any) -> Any:
    """Return a `Named` for a name or a dict; an object or a callable stays as it is."""
    if isinstance(value, ModuleType | int | float):
        raise ValueError(f"must be dict(type=..., **options), an object or a callable, got {value!r}")
    if isinstance(value, dict) and "type" not in value:
        raise ValueError('needs a type: dict(type="...", **options), or an object')
    if isinstance(value, dict | str):
        require_type(value["type"] if isinstance(value, dict) else value)
        return Named.model_validate(value)
    return value


class Config(Section):
    """A whole config. ``load_config`` makes it; after that ``parallel.data`` is a number.

    ``model`` is None if the model is passed to ``colossus.initialize``. ``data`` is a `Named`, or an object or callable
    of the file, or None.
    """

    #: name of the run folder, runs/<name>-<time>; by default that of the file
    name: Annotated[str, Field(min_length=1, max_length=200, pattern="^[^/.][^/]*$")] | None = None
    #: sizes of the axes, and exchanges between replicas
    parallel: Parallel = Parallel()
    #: dict(type="GPT" | "Llama" | "ViT" | "hf", **options), or any callable that returns an nn.Module
    model: Named | None = None
    #: dict(type="PythonStdlib" | "TextFolder" | "TokenFile" | .., **options), a dataset, a loader or a callable
    data: Annotated[Any, AfterValidator(_component)] = None
    #: a name, or dict(type=.., lr=.., **options)
    optimizer: Optimizer = Optimizer()
    #: a name, or dict(type=.., warmup_steps=.., **options)
    lr_schedule: LRSchedule = LRSchedule()
    #: schedule of the pipeline, and the number of microbatches
    schedule: Schedule = Schedule()
    #: steps, batch, precision, gradients
    train: Train = Train()
    #: communication between ranks
    comm: Comm = Comm()
    #: saving of checkpoints, and the one from which a run resumes
    checkpoint: Checkpoint = Checkpoint()
    #: reaction of the launcher when a rank fails
    launch: Launch = Launch()
    #: hooks around steps, evaluations and checkpoints: dict(type=, **options), names or callables
    hooks: Annotated[tuple[Annotated[Any, AfterValidator(_component)], ...], FROM_LIST] = ()
    #: "auto": cuda if there is a device
    device: Literal["auto", "cpu", "cuda"] = "auto"

    _source: str | None = PrivateAttr(None)

    @property
    def source(self) -> str | None:
        """Name of the config file, for messages; None when the config was a dict."""
        return self._source
