"""The losses of `colossus.models.tuning_options`, as functions of a model's outputs and a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from colossus.layers.distillation import distillation_loss
from colossus.layers.preference import dpo_margins, policy_loss, preference_loss
from colossus.layers.token_values import ChunkedLogits, Logits
from colossus.models.multi_token import TOKEN_WEIGHTS
from colossus.models.reference import Both
from colossus.models.tuning_options import DistillationOptions, DPOOptions, GRPOOptions

#: (outputs of the model, a rank's shard of a microbatch) -> (sum, count)
Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]
#: keys of a batch: log-probabilities of labels under the reference, and under the policy that wrote the texts, each
#: [batch, tokens]; advantages, [batch] or [batch, tokens]
REFERENCE_LOG_PROBS, OLD_LOG_PROBS, ADVANTAGES = "reference_log_probs", "old_log_probs", "advantages"


def loss_of_objective(options: Any) -> tuple[Loss, dict[str, Loss]]:
    """Return the loss of an objective's options, and the metrics of its evaluations (`_Preference`)."""
    if isinstance(options, DPOOptions):
        preference = _Preference(options)
        return preference.loss, {"margin": preference.margin, "accuracy": preference.accuracy}
    kinds: dict[type, Any] = {GRPOOptions: _grpo, DistillationOptions: _distillation}
    return partial(kinds[type(options)], o=options), {}


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


class _Preference:
    """The loss of DPO and its metrics: the mean ``margin``, and the part of pairs in which it is positive.

    In an evaluation the margins of a model's outputs are computed once.
    """

    def __init__(self, options: DPOOptions) -> None:
        self._options = options
        self._last = WeakTensorKeyDictionary()

    def loss(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        o = self._options
        margins = self._margins(outputs, batch)
        return preference_loss(*margins, beta=o.beta, label_smoothing=o.label_smoothing, kind=o.kind)

    def margin(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        margins, counted = self._margins(outputs, batch)
        return self._options.beta * margins.masked_fill(~counted, 0.0).sum(), counted.sum()

    def accuracy(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        margins, counted = self._margins(outputs, batch)
        return ((margins > 0) & counted).sum(), counted.sum()

    def _margins(self, outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        (own, reference), labels = _compared(outputs, batch), batch["labels"]
        logits = own.hidden if isinstance(own, ChunkedLogits) else own
        others, margins = self._last.get(logits, ((None, None), None))
        if margins is None or others[0] is not reference or others[1] is not labels:
            margins = dpo_margins(own, reference, labels)
            if not torch.is_grad_enabled():  # else the margins would keep the logits alive
                self._last[logits] = (reference, labels), margins
        return margins


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
