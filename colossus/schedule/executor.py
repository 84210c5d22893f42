"""Runs a schedule's actions on this rank's stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.schedule.actions import Action

#: microbatch -> (sum of losses, number of valid tokens)
Loss = tuple[Tensor, Tensor]


@dataclass
class Totals:
    """Sums over the microbatches of a step on this rank, not yet over ranks."""

    loss_sum: Tensor
    tokens: Tensor


def execute(
    actions: Sequence[Action],
    microbatches: Sequence[Any],
    forward: Callable[[int, Any], Loss],
    *,
    before_backward: Callable[[int], None],
    before_last_backward: Callable[[], None],
    reduce: Callable[[], None],
) -> Totals:
    """Run the actions of one step.

    The loss of a microbatch is backpropagated as its sum: no rank and no microbatch knows the number of valid tokens
    of the global batch before all are through, so gradients are sums here and are divided once, when they have been
    reduced. This is the one place that decides how a loss is scaled.

    Args:
        forward: runs the model on a microbatch; returns (sum, count).
        before_backward: called with the microbatch before its backward, which may recompute parts of its forward.
        before_last_backward: called before the backward that completes the gradients, so that their reduction can
            overlap with it.
        reduce: finishes the reduction of the gradients.
    """
    alive: dict[int, Tensor] = {}
    sums: list[Tensor] = []
    counts: list[Tensor] = []
    remaining = sum(action.kind == "backward" for action in actions)
    for action in actions:
        if action.kind == "forward":
            loss, count = forward(action.microbatch, microbatches[action.microbatch])
            alive[action.microbatch] = loss
            sums.append(loss.detach())
            counts.append(count)
        elif action.kind == "backward":
            remaining -= 1
            if remaining == 0:
                before_last_backward()
            before_backward(action.microbatch)
            alive.pop(action.microbatch).backward()
        elif action.kind == "reduce":
            reduce()
        elif action.kind != "step":  # the engine steps, once it has the norm of all gradients
            raise NotImplementedError(f"no execution of a {action} yet: use a schedule of whole backwards on one stage")
    return Totals(_total(sums), _total(counts))


def _total(values: list[Tensor]) -> Tensor:
    return values[0].double() if len(values) == 1 else torch.stack([value.double() for value in values]).sum()
