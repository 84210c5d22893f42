"""The losses of `colossus.models.tuning_options`, as functions of a model's outputs and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from colossus.layers.distillation import distillation_loss
from colossus.layers.preference import dpo_loss, dpo_margins, policy_loss
from colossus.layers.token_values import Logits
from colossus.models.multi_token import TOKEN_WEIGHTS
from colossus.models.reference import Both
from colossus.models.tuning_options import DistillationOptions, DPOOptions, GRPOOptions

#: (outputs of the model, a rank's shard of a microbatch) -> (sum, count)
Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
#: keys of a batch: log-probabilities of labels under the reference, and under the policy that wrote the texts, each
#: [batch, tokens]; advantages, [batch] or [batch, tokens]
REFERENCE_LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES = "reference_log_probs", "old_log_probs", "advantages"


def loss_of_objective(options: Any) -> Loss:
    """Return the loss of an objective's options."""
    kinds: dict[type, Any] = {DPOOptions: _dpo, GRPOOptions: _grpo, DistillationOptions: _distillation}
    return partial(kinds[type(options)], o=options)


def metrics_of_objective(options: Any) -> dict[str, Loss]:
    """Return the metrics of evaluations: of DPO the mean ``margin``, and the part of pairs in which it is positive."""
    if not isinstance(options, DPOOptions):
        return {}

    def margin(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        margins, counted = dpo_margins(*_compared(outputs, batch), batch["labels"])
        return options.beta * margins.masked_fill(~counted, 0.0).sum(), counted.sum()

    def accuracy(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        margins, counted = dpo_margins(*_compared(outputs, batch), batch["labels"])
        return ((margins > 0) & counted).sum(), counted.sum()

    return {"margin": margin, "accuracy": accuracy}


def _compared(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Logits, Logits]:
    """Return the model's logits, and the reference's, or its log-probabilities in the batch."""
    if isinstance(outputs, Both):
        return outputs.own, outputs.reference
    if REFERENCE_LOG_PROBS in batch:
        return outputs, batch[REFERENCE_LOG_PROBS]
    raise ValueError(
        f"the objective compares the model with a reference, but there is none: set model.reference = dict(), or put "
        f"its log-probabilities of the labels, [batch, tokens], into the batch as {REFERENCE_LOG_PROBS!r}"
    )


def _dpo(outputs: Any, batch: Mapping[str, Tensor], o: DPOOptions) -> tuple[Tensor, Tensor]:
    own, reference = _compared(outputs, batch)
    return dpo_loss(own, reference, batch["labels"], beta=o.beta, label_smoothing=o.label_smoothing, kind=o.kind)


def _grpo(outputs: Any, batch: Mapping[str, Tensor], o: GRPOOptions) -> tuple[Tensor, Tensor]:
    if ADVANTAGES not in batch:
        raise ValueError(f"objective grpo: the batch has no {ADVANTAGES!r}, [batch] or [batch, tokens]")
    own, reference = _compared(outputs, batch) if o.kl_weight else (outputs, None)
    own = own.own if isinstance(own, Both) else own
    more: dict[str, Any] = {"clip": o.clip, "clip_high": o.clip_high, "kl_weight": o.kl_weight}
    more |= {"old_log_probs": batch.get(OLD_LOG_PROBS), "token_weights": batch.get(TOKEN_WEIGHTS)}
    return policy_loss(own, batch["labels"], batch[ADVANTAGES], reference=reference, **more)


def _distillation(outputs: Any, batch: Mapping[str, Tensor], o: DistillationOptions) -> tuple[Tensor, Tensor]:
    own, reference = _compared(outputs, batch)
    more: dict[str, Any] = {name: getattr(o, name) for name in ("reverse", "temperature", "top_k", "label_weight")}
    return distillation_loss(own, reference, batch["labels"], token_weights=batch.get(TOKEN_WEIGHTS), **more)
