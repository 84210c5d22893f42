"""An engine whose gradients can be made worse, and what it says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from helpers.training import BATCH, batch_of
from torch import Tensor, nn

import colossus
from colossus.checkpoint.state_dict import full_state_dict

#: rank, parameter
Place = tuple[int, str]


class Messages(logging.Handler):
    """The warnings of the engine on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Messages:
        logging.getLogger("colossus.engine").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("colossus.engine").removeHandler(self)


class Faulty:
    """An engine whose gradients can be made worse on one rank, before any sum."""

    def __init__(self, config: dict[str, Any], value: float = float("nan"), **options: Any) -> None:
        self.engine = colossus.initialize(config, **options)
        self._value = value
        self._bad: set[str] = set()
        computed = {stored: param for param, stored in self.engine.store._stored_as.items()}
        for name, stored in self.engine.model.named_parameters():
            param = computed.get(stored, stored)
            # before the hooks of the buckets; one on the gradient itself would not be deferred by zero-bubble schedules
            param.register_post_accumulate_grad_hook(lambda param, name=name: self._spoil(param, name))

    def _spoil(self, param: nn.Parameter, name: str) -> None:
        if name in self._bad and param.grad is not None:
            param.grad.view(-1)[-1] = self._value

    def step(self, step: int, places: Sequence[Place] = ()) -> Any:
        """Train on the batch of ``step``, with gradients that are not finite at these places."""
        index, count = self.engine.context.index("data"), self.engine.context.size("data")
        part = BATCH // count
        batch = {key: value[index * part : (index + 1) * part] for key, value in batch_of(step).items()}
        self._bad = {name for rank, name in places if rank == self.engine.context.rank}
        assert self._bad <= dict(self.engine.model.named_parameters()).keys()
        try:
            return self.engine.train_step(batch)
        finally:
            self._bad = set()

    def state(self) -> dict[str, Tensor]:
        """Weights of the whole model, and the optimizer's state of this rank."""
        found = full_state_dict(self.engine.model, self.engine.context)
        for number, param in enumerate(self.engine.model.parameters()):
            for key, value in self.engine.optimizer.state.get(param, {}).items():
                found[f"{number}.{key}"] = torch.as_tensor(value)
        return {name: value.detach().clone() for name, value in found.items()}

    def leave_out_update(self) -> Callable[[], None]:
        """Have the strategy update nothing. Returns what undoes that."""
        strategy = self.engine.strategy
        strategy.update = lambda optimizer: None  # type: ignore[method-assign]
        return lambda: vars(strategy).pop("update")
