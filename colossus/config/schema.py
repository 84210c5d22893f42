"""What a config file may hold: every section, its keys, their defaults and their ranges. No torch.

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
from colossus.config.launch_section import Launch
from colossus.config.optimizer_section import Optimizer
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
from colossus.config.training import Checkpoint, Train


class ReadingOptions(Section):
    """How data is read: keys of ``data`` beside the options of the dataset."""

    model_config = ConfigDict(extra="ignore")

    #: processes that read a dataset ahead of the step; 0: its rank reads it
    num_workers: CountOrZero = 0
    #: makes a batch of a list of samples; None: torch's `default_collate`
    collate_fn: Callable[[list[Any]], Any] | None = None
    #: data that is read from the front differs between data ranks: no rank takes a shard of what all read
    per_rank: bool = False
    #: whether global random generators are seeded for what is read; None: unless it says ``deterministic = True``
    seed_samples: bool | None = None
    #: how workers are started; None: as Python does
    multiprocessing_context: Literal["fork", "forkserver", "spawn"] | None = None
    #: seconds in which a batch must come from a worker; 0: any time
    worker_timeout: Annotated[float, Field(ge=0)] = 300.0

    def seeds(self, data: Any) -> bool:
        """Whether generators are seeded for what is read of ``data``."""
        return not getattr(data, "deterministic", False) if self.seed_samples is None else self.seed_samples

    @property
    def seeds_collate(self) -> bool:
        """Whether generators are seeded for the collating of a batch, by this data rank's place in the global batch."""
        return self.collate_fn is not None and self.seed_samples is not False


AXES = ("pipeline", "data", "sequence", "tensor")


class StrategySection(Named):
    """The data-parallel strategy: what replicas exchange, and when."""

    #: name of a strategy (all_reduce, hierarchical, hybrid, sgp, d-psgd, ad-psgd, local_sgd, ..); options follow
    type: Annotated[Any, AfterValidator(require_type)] = "all_reduce"


class LRSchedule(Named):
    #: a name (constant, cosine, wsd, ..), a class of torch.optim.lr_scheduler or its path, or
    #: f(progress, min_ratio, **options) -> the part of ``optimizer.lr``
    type: Annotated[Any, AfterValidator(require_type)] = "constant"
    #: steps over which the learning rate rises linearly to ``optimizer.lr``
    warmup_steps: CountOrZero = 0
    #: the learning rate at the end, as a fraction of ``optimizer.lr``
    min_ratio: Fraction = 0.0


class Schedule(Named):
    """The pipeline schedule; without a pipeline its microbatches are gradient accumulation."""

    #: gpipe, 1f1b, interleaved, zb-h1, zb-v
    type: Annotated[Any, AfterValidator(require_type)] = "1f1b"
    #: into how many a replica's batch is cut
    microbatches: Count = 1


def _split(value: Any) -> Any:
    if value in ("parameters", "time"):
        return value
    is_list = isinstance(value, list | tuple) and bool(value)
    if is_list and all(isinstance(item, int) and not isinstance(item, bool) and item >= 1 for item in value):
        return tuple(value)
    raise ValueError(f"must be 'parameters', 'time' or the number of blocks of each stage, [3, 3], got {value!r}")


class PipelineSection(SizedSection):
    #: what stages are equal in, as far as they can be: "parameters", or the predicted "time" of a microbatch; or the
    #: number of blocks of each stage
    split: Annotated[str | tuple[int, ...], BeforeValidator(_split)] = "parameters"


class TensorSection(SizedSection):
    #: 1d, 2d, 2.5d, 3d
    mode: str = "1d"
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


def _size_of_memory(value: str) -> str:
    parse_bytes(value)
    return value


class AutoSection(ShortSection):
    """A plan that is chosen at launch, for the number of processes. Keys of ``parallel`` beside it stay as given."""

    #: more that stays: keys of ``parallel``, or dict(schedule=dict(..), train=dict(..)); dict(pipeline=2), say
    keep: dict[str, Any] = {}
    #: a data sheet (h100, a100, ..) or a file of `colossus doctor --measure`; None: by what the machine has
    hardware: Annotated[str, Field(min_length=1)] | None = None
    #: of a device, "80GB" say; None: that of the hardware
    memory: Annotated[str, AfterValidator(_size_of_memory)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {} if bare is True else None


class Parallel(ShortSection):
    """The bare word "auto" stands for dict(auto=True)."""

    #: True or dict(keep=, hardware=, memory=): all that is not given is chosen at launch
    auto: AutoSection | None = None
    #: replicas; None is derived from the number of processes
    data: Count | None = None
    #: stages of the pipeline; or dict(size=, split=)
    pipeline: PipelineSection = PipelineSection()
    #: ranks that split each weight; or dict(size=, mode=, ..)
    tensor: TensorSection = TensorSection()
    #: ranks that split each sequence; or dict(size=, mode=, ..)
    sequence: SequenceSection = SequenceSection()
    #: ranks that share the experts of `MoE` layers: the sequence size times a divisor of data, or a divisor of data
    expert: SizedSection = SizedSection()
    #: what data ranks shard; short for strategy = dict(type="zero", ..)
    zero: ZeroSection = ZeroSection()
    #: what replicas exchange, and when: a name, or dict(type=.., **options)
    strategy: StrategySection = StrategySection()
    #: outermost first: the last axis has neighbouring ranks
    rank_order: Annotated[Names, AfterValidator(_permutation)] = AXES

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"auto": {}} if bare == "auto" else None

    @model_validator(mode="after")
    def _one_strategy(self) -> Parallel:
        if not self.zero.stage or "strategy" not in self.model_fields_set or self.strategy.type == "hierarchical":
            return self
        raise ValueError(
            f"zero = {self.zero.stage} and strategy = {self.strategy.type!r} both say what data ranks do: give one "
            f"of them, or strategy = 'hierarchical', under which ZeRO shards inside of each host"
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
    #: after which a collective that not all ranks have joined ends the run
    timeout_seconds: Seconds = 120.0
    #: collectives between processes of one host go through shared memory (CPU); False: through gloo
    shared_memory: bool = True
    #: what joins the ranks: "auto" is nccl on CUDA, gloo on CPU; with "gloo" on CUDA several ranks may share a device,
    #: and what they send each other goes through the memory of the host
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    #: size of the buckets in which gradients are reduced
    bucket_mb: Positive = 25.0


def _component(value: Any) -> Any:
    """What is named becomes a `Named`; an object or a callable stays what it is."""
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

    ``model`` is None when the model is handed to ``colossus.initialize``; ``data`` is a `Named`, or whatever
    object or callable the file holds, or None.
    """

    #: of the run folder, runs/<name>-<time>; by default that of the file
    name: Annotated[str, Field(min_length=1, max_length=200, pattern="^[^/.][^/]*$")] | None = None
    #: sizes of the axes, and what replicas exchange
    parallel: Parallel = Parallel()
    #: dict(type="GPT" | "Llama" | "ViT" | "hf", **options), or any callable that returns an nn.Module
    model: Named | None = None
    #: dict(type="PythonStdlib" | "TextFolder" | "TokenFile" | .., **options), a dataset, a loader or a callable
    data: Annotated[Any, AfterValidator(_component)] = None
    #: a name, or dict(type=.., lr=.., **options)
    optimizer: Optimizer = Optimizer()
    #: a name, or dict(type=.., warmup_steps=.., **options)
    lr_schedule: LRSchedule = LRSchedule()
    #: of the pipeline, and the number of microbatches
    schedule: Schedule = Schedule()
    #: steps, batch, precision, gradients
    train: Train = Train()
    #: how ranks talk to each other
    comm: Comm = Comm()
    #: when checkpoints are saved, which stay, where a run goes on
    checkpoint: Checkpoint = Checkpoint()
    #: what the launcher does when a rank fails
    launch: Launch = Launch()
    #: called around steps, evaluations and checkpoints: dict(type=, **options), names or callables
    hooks: Annotated[tuple[Annotated[Any, AfterValidator(_component)], ...], FROM_LIST] = ()
    #: "auto" is cuda where there is one
    device: Literal["auto", "cpu", "cuda"] = "auto"

    _source: str | None = PrivateAttr(None)

    @property
    def source(self) -> str | None:
        """Name of the config file, for messages; None when the config was a dict."""
        return self._source
