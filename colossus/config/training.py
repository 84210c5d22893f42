"""The ``train`` section: steps, batch, precision, activation checkpointing, what is done about gradients. No torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from colossus.config.section import Count, CountOrZero, Names, Positive, Section, ShortSection, drop_none

DType = Literal["fp32", "fp64", "bf16", "fp16"]

#: what a bare ``train.precision`` stands for
PRECISIONS: dict[str, dict[str, DType]] = {
    "fp32": dict(params="fp32", compute="fp32", reduce="fp32", optimizer="fp32"),
    "fp64": dict(params="fp64", compute="fp64", reduce="fp64", optimizer="fp64"),
    "bf16": dict(params="fp32", compute="bf16", reduce="fp32", optimizer="fp32"),
    "fp16": dict(params="fp32", compute="fp16", reduce="fp32", optimizer="fp32"),
}
LOW = ("bf16", "fp16")


class PrecisionSection(ShortSection):
    """Of what dtype things are; ``fp32``, ``fp64``, ``bf16`` and ``fp16`` stand for all four."""

    #: stored parameters
    params: DType = "fp32"
    #: products, and the activations between them; by default that of params
    compute: DType = Field(default_factory=lambda values: values["params"])
    #: in which gradients are summed over ranks; by default that of params, of low precision fp32
    reduce: DType = Field(default_factory=lambda values: _wide(values["params"]))
    #: the optimizer's state, and where params are of low precision the copy of them that it updates
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
        if (self.params == "fp64") != (self.compute == "fp64"):
            raise ValueError(f"params = {self.params!r} and compute = {self.compute!r}: fp64 is for both or neither")
        if self.compute != self.params and self.compute not in LOW:
            raise ValueError(
                f"params = {self.params!r} and compute = {self.compute!r}: compute is bf16, fp16, or that of params"
            )
        if self.optimizer != self.params and not (self.params in LOW and self.optimizer == "fp32"):
            raise ValueError(
                f"params = {self.params!r} and optimizer = {self.optimizer!r}: the optimizer has the dtype of params, "
                f"or fp32 where that is low"
            )
        if self.optimizer == "fp16":
            raise ValueError("optimizer = 'fp16': the numbers of an optimizer vanish in fp16; take fp32, or bf16")
        if (self.reduce == "fp64") != (self.params == "fp64"):
            raise ValueError(f"params = {self.params!r} and reduce = {self.reduce!r}: fp64 is for all four or none")
        if self.reduce == "fp16" and self.compute != "fp16":
            raise ValueError(
                f"compute = {self.compute!r} and reduce = 'fp16': sums of gradients fit into fp16 only where the loss "
                f"is scaled, for compute = 'fp16'"
            )
        return self

    @property
    def name(self) -> str:
        """The bare value that stands for it, or all four: ``params bf16, compute bf16, reduce fp32, ...``."""
        keys = {key: getattr(self, key) for key in type(self).model_fields}
        for name, precision in PRECISIONS.items():
            if keys == precision:
                return name
        return ", ".join(f"{key} {value}" for key, value in keys.items())


def _wide(params: DType) -> DType:
    return "fp32" if params in LOW else params


class LossScale(Section):
    """Of fp16: the loss is scaled so that its gradients fit, as torch.amp.GradScaler does."""

    init: Annotated[float, Field(gt=0, le=2.0**64)] = 65536.0
    #: steps without an overflow after which the scale is doubled; an overflow halves it
    growth_interval: Count = 2000


class ActivationCheckpoint(ShortSection):
    """Which activations are not kept for backward, but computed again."""

    #: "none", "full" (keep a block's inputs only) or "selective" (also keep matmuls, attention and collectives)
    type: Literal["none", "full", "selective"] = "none"
    #: of the blocks, every k-th
    every: Count = 1
    #: names of modules, with * and ?; None: the blocks of the model
    modules: Names | None = None
    #: the inputs that "full" keeps wait in the memory of the host
    offload: bool = False

    @classmethod
    def keys_of(cls, bare: Any) -> dict[str, Any] | None:
        return {"type": bare} if isinstance(bare, str) else None

    @model_validator(mode="after")
    def _is_meant(self) -> ActivationCheckpoint:
        given = [f"{key} = {getattr(self, key)!r}" for key in ("every", "modules", "offload") if self._is_changed(key)]
        if self.type == "none" and given:
            raise ValueError(f"{', '.join(given)}, but type is 'none': say type='full' or type='selective'")
        if self.offload and self.type == "selective":
            raise ValueError("offload = True is for inputs, and type is 'selective', which keeps more: say type='full'")
        if self.modules is not None and not self.modules:
            raise ValueError("modules names none: leave it out for the blocks of the model, or take type='none'")
        return self

    def _is_changed(self, key: str) -> bool:
        return bool(getattr(self, key) != type(self).model_fields[key].default)

    def __str__(self) -> str:
        """``full, every 2nd block, on the host``, say."""
        which = f"modules {', '.join(self.modules)}" if self.modules is not None else "blocks"
        number = {1: "", 2: "every 2nd of the ", 3: "every 3rd of the "}.get(
            self.every, f"every {self.every}th of the "
        )
        return f"{self.type}, {number}{which}" + (", kept on the host" if self.offload else "")


class Train(Section):
    steps: Count = 100
    #: length of the learning-rate schedule
    schedule_steps: Count = Field(default_factory=lambda values: values["steps"])
    #: sequences per step, over all data ranks and microbatches
    global_batch_size: Count = 32
    precision: PrecisionSection = PrecisionSection()
    #: of fp16; None there: the defaults
    loss_scale: LossScale | None = None
    activation_checkpoint: ActivationCheckpoint = ActivationCheckpoint()
    #: largest norm of the gradient of the mean loss; None does not clip
    clip_grad_norm: Positive | None = None
    #: largest absolute value of its elements, after clip_grad_norm; None does not clip
    clip_grad_value: Positive | None = None
    #: a gradient that is not finite ends the run ("raise"), or the step changes nothing ("skip")
    on_nonfinite: Literal["raise", "skip"] = "raise"
    #: steps in a row that may be skipped so; overflows of fp16 do not count
    max_skips: Count = 10
    seed: CountOrZero = 0
    log_every: Count = 10
    #: steps between evaluations; 0 evaluates never
    eval_every: CountOrZero = 0
    eval_batches: Count = 10
    #: sequences per validation batch, over all data ranks; None: ``global_batch_size``
    eval_batch_size: Count | None = None

    @model_validator(mode="before")
    @classmethod
    def _none_is_default(cls, value: Any) -> Any:
        return drop_none(value, "schedule_steps", "activation_checkpoint")

    @model_validator(mode="after")
    def _loss_is_scaled(self) -> Train:
        if self.loss_scale is not None and self.precision.compute != "fp16":
            name = self.precision.name
            raise ValueError(f"loss_scale is for fp16, whose gradients would vanish, but precision is {name}")
        return self
