"""Replicas in plain torch: models that one process starts with, their own optimizers, clipping by their own norms."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from helpers.ranks import run_ranks
from helpers.training import Trace, batch_of, config_of, is_key_bias
from torch import Tensor, nn

import colossus


def _start(rank: int) -> nn.Module:
    engine = colossus.initialize(config_of({}, 1, "fp64"))
    engine.close()
    return engine.model


@cache
def start() -> nn.Module:
    """The model of `config_of` as every run begins with it; not to be changed."""
    return run_ranks(1, _start, with_context=False)[0]


class Replica:
    """A copy of the model at the start.

    Attributes:
        params: in the model's order.
        tokens: on which it has trained, a number that a test may set back.
    """

    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], clip: float | None) -> None:
        self.model = copy.deepcopy(start())
        self.params = list(self.model.parameters())
        self.optimizer, self._clip, self.tokens = make(self.params), clip, 0

    def gradients(self, batch: dict[str, Tensor]) -> tuple[float, int]:
        """Of the sum of losses, as ``grad``; that sum, and the number of tokens."""
        self.optimizer.zero_grad()
        logits = self.model(batch["inputs"])
        total = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100, reduction="sum")
        total.backward()
        return total.item(), int((batch["labels"] != -100).sum())

    def update(self, count: int) -> None:
        """A step by the sums that are there."""
        for param in self.params:
            param.grad /= count
        if self._clip is not None:
            torch.nn.utils.clip_grad_norm_(self.params, self._clip)
        self.optimizer.step()

    def step(self, batch: dict[str, Tensor]) -> float:
        total, count = self.gradients(batch)
        self.update(count)
        self.tokens += count
        return total / count


def share_of(step: int, index: int, num_replicas: int, size: int) -> dict[str, Tensor]:
    """What one replica trains on of the global batch of a step."""
    part = size // num_replicas
    whole = batch_of(step, batch=size)
    return {key: value[index * part : (index + 1) * part] for key, value in whole.items()}


def assert_is_replica(trace: Trace, replica: Replica, *, atol: float = 1e-11) -> None:
    """The weights of a rank at the end are those of a replica, as far as the rank has them."""
    compared = 0
    for name, value in replica.model.named_parameters():
        if name in trace.end and not is_key_bias(name):
            torch.testing.assert_close(
                trace.end[name], value.detach(), rtol=1e-9, atol=atol, msg=lambda m: f"{name}: {m}"
            )
            compared += 1
    assert compared >= 10
