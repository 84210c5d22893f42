"""The section ``train`` of a config: steps, batch, precision, gradients."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from colossus.config.batch_sizes import BatchRamp, BatchSizes
from colossus.config.section import (
    FROM_LIST,
    Count,
    CountOrZero,
    Names,
    Positive,
    Section,
    ShortSection,
    is_number,
)

DType = Literal["fp32", "fp64", "bf16", "fp16"]

#: dtypes of each bare ``train.precision``
PRECISIONS: dict[str, dict[str, DType]] = {
    "fp32": dict(params="fp32", compute="fp32", reduce="fp32", optimizer="fp32"),
    "fp64": dict(params="fp64", compute="fp64", reduce="fp64", optimizer="fp64"),
    "bf16": dict(params="fp32", compute="bf16", reduce="fp32", optimizer="fp32"),
    "fp16": dict(params="fp32", compute="fp16", reduce="fp32", optimizer="fp32"),
}
LOW = ("bf16", "fp16")


class PrecisionSection(ShortSection):
    """The dtypes of a run; a bare ``fp32``, ``fp64``, ``bf16`` or ``fp16`` sets all four."""

    #: dtype of stored parameters
    params: DType = "fp32"
    #: dtype of products, and of the activations between them; by default that of params
    compute: DType = Field(default_factory=lambda values: values["params"])
    #: dtype in which gradients are summed over ranks; by default that of params, fp32 if that is bf16 or fp16
    reduce: DType = Field(default_factory=lambda values: _wide(values["params"]))
    #: dtype of the optimizer's state, and of the copy that it updates if params are bf16 or fp16
    optimizer: DType = Field(default_factory=lambda values: _wide(values["params"]))

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        if not isinstance(bare, str):
            return None
        if bare not in PRECISIONS:
            raise ValueError(
                f"must be one of {', '.join(PRECISIONS)}, or dict(params=, compute=, reduce=, optimizer=), got {bare!r}"
            )
        return dict(PRECISIONS[bare])

    @model_validator(mode="after")
    def _fits(self) -> PrecisionSection:
        params, compute, reduce, optimizer = dtypes = self.params, self.compute, self.reduce, self.optimizer
        refused = {
            "fp64 is for all four or none": "fp64" in dtypes and set(dtypes) != {"fp64"},
            "compute must be bf16, fp16, or the dtype of params": compute != params and compute not in LOW,
            "the optimizer must have the dtype of params, or fp32 if that is bf16 or fp16": optimizer
            not in (params, _wide(params)),
            "the numbers of an optimizer underflow in fp16; use fp32, or bf16": optimizer == "fp16",
            "sums of gradients fit into fp16 only if the loss is scaled, with compute = 'fp16'": (
                reduce == "fp16" and compute != "fp16"
            ),
        }
        for why, is_refused in refused.items():
            if is_refused:
                settings = ", ".join(f"{key} = {getattr(self, key)!r}" for key in type(self).model_fields)
                raise ValueError(f"{settings}: {why}")
        return self

    @property
    def name(self) -> str:
        """The bare value that sets these dtypes, or all four: ``params bf16, compute bf16, reduce fp32, ...``."""
        keys = {key: getattr(self, key) for key in type(self).model_fields}
        for name, precision in PRECISIONS.items():
            if keys == precision:
                return name
        return ", ".join(f"{key} {value}" for key, value in keys.items())


def _wide(params: DType) -> DType:
    return "fp32" if params in LOW else params


class LossScale(Section):
    """The loss scale of fp16, as in torch.amp.GradScaler: gradients of the scaled loss fit into fp16."""

    #: initial scale
    init: Annotated[float, Field(gt=0, le=2.0**64)] = 65536.0
    #: steps without an overflow after which the scale is doubled; an overflow halves it
    growth_interval: Count = 2000


class ActivationCheckpoint(ShortSection):
    """The activations that are not stored for backward, but recomputed."""

    #: "none", "full" (keep a block's inputs only) or "selective" (also keep matmuls, attention and collectives)
    type: Literal["none", "full", "selective"] = "none"
    #: every k-th block is checkpointed
    every: Count = 1
    #: names of modules, with * and ?; None: the blocks of the model
    modules: Annotated[Names, Field(min_length=1)] | None = None

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"type": bare} if isinstance(bare, str) else None

    @model_validator(mode="after")
    def _has_a_type(self) -> ActivationCheckpoint:
        values = {key: getattr(self, key) for key in ("every", "modules")}
        settings = [f"{key} = {value!r}" for key, value in values.items() if value not in (1, None)]
        if self.type == "none" and settings:
            raise ValueError(f"{', '.join(settings)}, but type is 'none': set type='full' or type='selective'")
        return self

    def __str__(self) -> str:
        """Return it as text, for example ``full, blocks (every 2)``."""
        which = f"modules {', '.join(self.modules)}" if self.modules is not None else "blocks"
        every = f" (every {self.every})" if self.every > 1 else ""
        return f"{self.type}, {which}{every}"


def _ranks(value: Any) -> Any:
    is_list = isinstance(value, list | tuple) and all(is_number(item) and item >= 0 for item in value)
    if is_list or value == "all":
        return tuple(value) if is_list else value
    raise ValueError(f"must be 'all' or the numbers of ranks, (0, 1), got {value!r}")


class Profile(Section):
    """The profile of some steps: a table of all ranks, and traces of some."""

    #: first and last step that are profiled, counted from 1 as in the display
    steps: Annotated[tuple[Count, Count], FROM_LIST]
    #: ranks whose trace torch.profiler writes, or "all"; () writes none
    ranks: Annotated[tuple[int, ...] | Literal["all"], BeforeValidator(_ranks)] = (0,)

    @model_validator(mode="after")
    def _has_steps(self) -> Profile:
        first, last = self.steps
        if first > last:
            raise ValueError(f"steps = ({first}, {last}): the first step comes after the last; write ({last}, {first})")
        return self

    def problems(self, num_ranks: int) -> list[str]:
        """Return a line if a rank does not exist in a run of so many ranks."""
        missing = [rank for rank in self.ranks if rank not in range(num_ranks)] if self.ranks != "all" else []
        if not missing:
            return []
        there = f"ranks 0 to {num_ranks - 1}" if num_ranks > 1 else "rank 0 alone"
        return [f"train.profile.ranks: no rank {', '.join(map(str, missing))}: this plan has {there}"]


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


class Train(Section):
    #: optimizer steps of the run
    steps: Count = 100
    #: length of the learning-rate schedule
    schedule_steps: Count = Field(default_factory=lambda values: values["steps"])
    #: sequences per step, over all data ranks and microbatches
    global_batch_size: Count = 32
    #: fp32, fp64, bf16 (compute in bf16, store in fp32), fp16, or dict(params=, compute=, reduce=, optimizer=)
    precision: PrecisionSection = PrecisionSection()
    #: loss scale of fp16; None: the defaults
    loss_scale: LossScale | None = None
    #: "none", "full" or "selective", or dict(type=, every=, modules=): activations that backward recomputes
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    #: largest norm of the gradient of the mean loss; None: no clipping
    clip_grad_norm: Positive | None = None
    #: largest absolute value of its elements, after clip_grad_norm; None: no clipping
    clip_grad_value: Positive | None = None
    #: a gradient that is not finite ends the run ("raise"), or the step is skipped ("skip")
    on_nonfinite: Literal["raise", "skip"] = "raise"
    #: most steps in a row that are skipped; overflows of fp16 do not count
    max_skips: Count = 10
    #: steps between comparisons of parameters that must be equal on several ranks; 0: never
    check_replicas_every: CountOrZero = 0
    #: reaction if these differ: the run ends ("raise"), or the launcher goes back to the newest save before
    #: ("restart", by launch.restarts)
    on_mismatch: Literal["raise", "restart"] = "raise"
    #: dict(factor=3.0): reaction to a loss far above those before it; None: no reaction
    on_spike: LossSpikes | None = None
    #: 1.5, or dict(factor=, rows=): the log names a rank that computes by this factor longer than others of its stage
    stragglers: StragglerSection | None = None
    #: seed of initial values, the order of samples, dropout, and all other random numbers
    seed: CountOrZero = 0
    #: steps between lines of the plain display
    log_every: Count = 10
    #: steps between evaluations; 0: never
    eval_every: CountOrZero = 0
    #: validation batches of an evaluation
    eval_batches: Count = 10
    #: sequences per validation batch, over all data ranks; None: ``global_batch_size``
    eval_batch_size: Count | None = None
    #: most tokens of a microbatch of a data rank, padding counted: microbatches have as many samples as fit, of data
    #: with an attribute ``lengths``; None: equal microbatches, schedule.microbatches of them
    tokens_per_microbatch: Count | None = None
    #: a smaller batch at the beginning of the run, dict(start=, steps=, increment=)
    batch_ramp: BatchRamp | None = None
    #: key of an entry of a batch -> its dim of samples, if not 0 (position_ids of shape [3, samples, tokens]); None:
    #: the entry has no samples
    batch_dims: dict[str, CountOrZero | None] = Field(default_factory=dict)
    #: whether the samples of a microbatch interact (`colossus.layers.gather_samples`) or change buffers: microbatches,
    #: and batches of an evaluation, then have the same samples under every plan
    samples_interact: bool = False
    #: buffers that a forward changes from a rank's samples (a running mean, a codebook): "average" over the ranks that
    #: split the samples, with the first rank's integers, or "first", all from the first rank
    buffers: Literal["average", "first"] = "average"
    #: dict(steps=(10, 13), ranks=(0,)): where the time of these steps goes; None: no profile
    profile: Profile | None = None
    #: whether torch uses algorithms with the same bits each time, some slower; an operation that has none is refused
    deterministic: bool = False
    #: "plan": losses, gradients and weights have the same bits under data, pipeline, 1D and ZeRO in any sizes; several
    #: times slower, and each sample is a microbatch
    reproducible: Literal["plan"] | None = None

    @property
    def is_deterministic(self) -> bool:
        """Return whether torch's deterministic algorithms are used."""
        return self.deterministic or self.reproducible is not None

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch of each step."""
        return BatchSizes(self.global_batch_size, self.batch_ramp)

    @model_validator(mode="after")
    def _fits_together(self) -> Train:
        if self.batch_ramp is not None:
            self.batch_ramp.require_end(self.global_batch_size)
        keys = [key for key in ("batch_dims", "samples_interact") if getattr(self, key)]
        if self.tokens_per_microbatch is not None and keys:
            raise ValueError(
                f"tokens_per_microbatch = {self.tokens_per_microbatch} chooses the samples of a microbatch by their "
                f"lengths, and pads dim 1: leave out {' and '.join(keys)}"
            )
        if self.on_mismatch != "raise" and not self.check_replicas_every:
            raise ValueError(f"on_mismatch = {self.on_mismatch!r}, but nothing is compared: set check_replicas_every")
        if self.profile is not None and self.profile.steps[1] > self.steps:
            first, last = self.profile.steps
            raise ValueError(
                f"profile.steps = ({first}, {last}), but the run ends with step {self.steps} (train.steps)"
            )
        if self.loss_scale is not None and self.precision.compute != "fp16":
            name = self.precision.name
            raise ValueError(f"loss_scale is for fp16, whose gradients would vanish, but precision is {name}")
        return self
