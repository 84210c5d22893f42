"""Hooks that keep an average of the weights beside the run: ``hooks = [dict(type="EMA", decay=0.999)]``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.checkpoint.saved_averages import AVERAGE
from colossus.context.precision import LOW
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult, StepResult
from colossus.layout.split_parameter import as_shards
from colossus.monitor.hooks.options import (
    AverageOptions,
    EMAOptions,
    SWAOptions,
    has_weights_elsewhere,
    no_average_under,
)
from colossus.state.run_values import named_hooks

log = logging.getLogger("colossus.engine")


class WeightAverage(Hook):
    """Base of the hooks that average the weights. After a step the average moves towards the parameters by a weight.

    Each rank averages what it stores: shards, and under ZeRO rows, so nothing is sent. Averages have the dtype of their
    parameter, or float32 if that is bf16 or fp16. The first update copies the parameters, as
    `torch.optim.swa_utils.AveragedModel` does; a skipped step is no update. Frozen parameters and buffers are not
    averaged.

    In a loop of your own call `on_train_start` once and `on_step_end` after each step. Add the hook to
    ``engine.checkpoints.hooks`` to save it.
    """

    def __init__(self, options: AverageOptions) -> None:
        self.options = options
        self._averages: dict[nn.Parameter, Tensor] = {}
        #: number of updates; on the device, if steps may be skipped there
        self._updates = torch.zeros((), dtype=torch.float64)
        self._is_restored = False

    def weight(self, updates: Tensor) -> Tensor:
        """Return the weight of the parameters in the new average, a float64 scalar; the old average has the rest.

        Args:
            updates: number of updates before this one.
        """
        raise NotImplementedError

    def is_due(self, step: int) -> bool:
        """Return whether an update follows a step, counted from 1."""
        return step % self.options.every == 0

    # -- in the loop ---------------------------------------------------------------------------------------

    def on_train_start(self, engine: Engine) -> None:
        kind, resumed = type(self).__name__, engine.checkpoints.resumed_from
        if not engine.strategy.exact or has_weights_elsewhere(engine.config):
            raise ValueError(f"{kind} {no_average_under(type(engine.strategy).__name__)}")
        if resumed is not None and not self._is_restored and engine.context.is_logging_rank:
            log.warning(
                "%s: %s has no average of this hook: it begins with the weights after step %d",
                kind, resumed, engine.completed_steps,
            )  # fmt: skip

    @torch.no_grad()
    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        if not self.is_due(result.step):
            return
        is_taken = 1.0 - torch.as_tensor(result.skipped_on_device, dtype=torch.float64)
        weight = self.weight(self._updates) * is_taken
        with as_shards():
            for param in engine.strategy.trained:  # includes parameters that were frozen when the run was saved
                if param not in self._averages:
                    self._averages[param] = param.detach().to(_wide(param), copy=True)
            _move(self._averages, weight)
        self._updates = self._updates + is_taken

    @property
    def has_begun(self) -> bool:
        """Return whether there is an average. On an accelerator this may wait for the last step."""
        return bool(self._updates > 0)

    @contextmanager
    def averaged(self, engine: Engine) -> Iterator[None]:
        """Replace the parameters by the average inside of a block, and restore them after it, bit for bit.

        It is for evaluations, `full_state_dict` and `colossus.hf.save`; nothing can be trained, saved or loaded inside.
        All ranks call it. Values are exchanged in place: the extra memory is one parameter, or all parameters in bf16
        or fp16.

        Raises:
            ValueError: if there is no average yet.
        """
        if not self.has_begun:
            raise ValueError(f"{type(self).__name__} has no average yet: no update was made")
        strategy = engine.strategy
        with strategy.evaluation():
            engine.store.release()  # frees gathered weights
            outer, strategy.is_averaged = strategy.is_averaged, True
            try:
                with ExitStack() as back:
                    for param, average in self._averages.items():
                        other = average.to(param.dtype)  # the average itself, unless the parameter is in bf16 or fp16
                        _exchange(param, other)
                        back.callback(_exchange, param, other)
                    back.callback(engine.store.release)
                    torch.clear_autocast_cache()
                    yield
            finally:
                strategy.is_averaged = outer
                torch.clear_autocast_cache()

    def add_to_evaluation(self, engine: Engine, summary: EvalResult) -> Mapping[str, float]:
        if not self.options.evaluate or not self.has_begun:
            return {}
        with self.averaged(engine):
            result = engine.evaluate()
        name = next(name for name, hook in named_hooks(engine.checkpoints.hooks) if hook is self).lower()
        return {f"{name}.{key}": mean for key, mean in result.numbers.items()} if result.complete else {}

    # -- checkpoints ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {"updates": float(self._updates)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._updates = torch.tensor(state["updates"], dtype=torch.float64)
        self._is_restored = True

    def parameter_state(self) -> Mapping[nn.Parameter, Mapping[str, Any]]:
        return {param: {AVERAGE: average} for param, average in self._averages.items()}

    def load_parameter_state(self, state: Mapping[nn.Parameter, Mapping[str, Any]]) -> None:
        self._averages = {param: entries[AVERAGE].to(_wide(param)) for param, entries in state.items()}
        self._updates, self._is_restored = torch.zeros((), dtype=torch.float64), False


class EMA(WeightAverage):
    """The exponential moving average of the weights: ``average = decay * average + (1 - decay) * weights``."""

    options: EMAOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(EMAOptions(**options))

    def weight(self, updates: Tensor) -> Tensor:
        decay = torch.full_like(updates, self.options.decay_of_update)
        if self.options.warmup:
            decay = torch.minimum(decay, (1.0 + updates) / (10.0 + updates))
        return torch.where(updates == 0, 1.0, 1.0 - decay)


class SWA(WeightAverage):
    """Stochastic weight averaging (1803.05407): the mean of the weights of every n-th step from one step on."""

    options: SWAOptions

    def __init__(self, **options: Any) -> None:
        super().__init__(SWAOptions(**options))

    def is_due(self, step: int) -> bool:
        since = step - self.options.start
        return since >= 0 and since % self.options.every == 0

    def weight(self, updates: Tensor) -> Tensor:
        return 1.0 / (updates + 1.0)


# -- tensors ----------------------------------------------------------------------------------------------


def _wide(param: Tensor) -> torch.dtype:
    """Return the dtype of an average: low precision would lose updates that are small beside it."""
    return torch.float32 if param.dtype in LOW else param.dtype


#: bytes of averages that move together, with as many bytes of memory
_MOVED_BYTES = 1 << 27


def _move(averages: Mapping[nn.Parameter, Tensor], weight: Tensor) -> None:
    """Move averages towards their parameters by a weight, without waiting for a device that has the weight."""
    if weight.device.type != "cpu":
        _move_on_device(averages, weight)
        return
    wide = [(average, param.detach()) for param, average in averages.items() if average.dtype == param.dtype]
    low = [(average, param.detach()) for param, average in averages.items() if average.dtype != param.dtype]
    # low precision one after the other, so that one cast at a time is in memory
    for pairs in (wide, *([(average, param.to(average.dtype))] for average, param in low)):
        if pairs:
            torch._foreach_lerp_([average for average, _ in pairs], [values for _, values in pairs], weight.item())


def _move_on_device(averages: Mapping[nn.Parameter, Tensor], weight: Tensor) -> None:
    """Do as `_move` in few kernels, whose number does not depend on that of the parameters."""
    chunks: list[tuple[list[Tensor], list[Tensor]]] = []
    room = 0
    for param, average in sorted(averages.items(), key=lambda pair: str((pair[1].device, pair[1].dtype))):
        begins = not chunks or (chunks[-1][0][0].device, chunks[-1][0][0].dtype) != (average.device, average.dtype)
        if begins or average.nbytes > room:
            chunks.append(([], []))
            room = _MOVED_BYTES
        chunks[-1][0].append(average)
        chunks[-1][1].append(param.detach())
        room -= average.nbytes
    for olds, news in chunks:
        share = weight.to(olds[0])
        added = [torch.empty_like(old) for old in olds]
        torch._foreach_copy_(added, news)
        torch._foreach_mul_(added, share)
        torch._foreach_mul_(olds, 1 - share)
        torch._foreach_add_(olds, added)


@torch.no_grad()
def _exchange(param: nn.Parameter, other: Tensor) -> None:
    """Exchange the values of two tensors."""
    with as_shards():
        own = param.detach().clone()
        param.copy_(other)
        other.copy_(own)
