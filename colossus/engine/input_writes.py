"""A model that writes to its input in place gets copies: its batch is the same on all ranks and under all plans."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import map_batch
from colossus.engine.inputs import model_input
from colossus.nest import tensors

#: functions of a tensor's values whose result is no tensor
_READING = {
    "item",
    "tolist",
    "numpy",
    "equal",
    "allclose",
    "__array__",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
}


class InputWrites:
    """What the model of this rank is called with: views of the caller's batch, or copies of them where it writes.

    The first step, and the first evaluation, find out which by the version counters of copies; later ones pay nothing
    for a model that does not write. The stages of a pipeline tell the next one in the store what was written, and which
    of their outputs are inputs that they pass on.
    """

    def __init__(self, context: ParallelContext, last_stage: int) -> None:
        self._context, self._last_stage = context, last_stage
        #: of training and of evaluation: whether the model writes, once it is known
        self._known: dict[bool, bool] = {}
        #: what a message says of the tensor that was written
        self._written: dict[bool, str] = {}
        self._first_step: int | None = None
        self._evaluated_stages: set[int] = set()
        #: of the forward at work: whether it finds out, what is watched (description, tensor, version), what is written
        self._finds_out = False
        self._watched: list[tuple[str, Tensor, int]] = []
        self._description = ""

    def before_forward(self, stage: int, microbatch: int, value: Any, step: int | None) -> Any:
        """What to call a stage with.

        Args:
            value: the input of the model, or what the stage before returned.
        """
        self._finds_out = self._is_first(stage, microbatch, step)
        self._watched, self._description = [], ""
        if stage:
            if self._finds_out:
                self._watch_passed_on(stage, microbatch, value, step is not None)
            return value
        training = step is not None
        if training and not self._finds_out:
            self._known.setdefault(True, True in self._written)
        if self._known.get(training) is False:
            return value
        copies = map_batch(Tensor.clone, value)
        if training not in self._known:
            self._watch([(_describe(where, x), x) for where, x in tensors(copies)])
        return copies

    def after_forward(self, stage: int, microbatch: int, output: Any, step: int | None) -> None:
        """The stage has run on it."""
        training, found = step is not None, self._description
        found = next((words for words, x, version in self._watched if x._version != version), found)
        if not stage:
            if found:
                self._written.setdefault(training, found)
            if self._watched and not training:
                self._known.setdefault(False, False in self._written)
        if self._finds_out and stage < self._last_stage:
            passed_on = {where: words for where, y in tensors(output) for words, x, _ in self._watched if _share(x, y)}
            self._context.store().set(self._key(stage, microbatch, training), json.dumps([found, passed_on]))
        if not self._last_stage and (not training or step == self._first_step):
            found = self._written.get(training, "")  # also by an earlier microbatch
        self._watched, self._description = [], found

    def around_loss(self, batch: Any) -> AbstractContextManager[Any]:
        """Around a loss function: an error when it reads what the model has written to, while that is found out.

        Args:
            batch: what the loss function gets.
        """
        return _ReadGuard(batch, self._description) if self._description else nullcontext()

    def _is_first(self, stage: int, microbatch: int, step: int | None) -> bool:
        """Whether a forward is one of the first step, or the first one of a stage in evaluations."""
        if step is not None:
            if self._first_step is None:
                self._first_step = step
            return step == self._first_step
        if microbatch or stage in self._evaluated_stages:
            return False
        self._evaluated_stages.add(stage)
        return True

    def _watch(self, found: list[tuple[str, Tensor]]) -> None:
        self._watched = [(words, x, x._version) for words, x in found if not x.is_inference()]

    def _watch_passed_on(self, stage: int, microbatch: int, value: Any, training: bool) -> None:
        # it was there before the value was sent
        told = self._context.store().get(self._key(stage - 1, microbatch, training))
        self._description, passed_on = json.loads(told)
        self._watch([(passed_on[where], x) for where, x in tensors(value) if where in passed_on])

    def _key(self, stage: int, microbatch: int, training: bool) -> str:
        model = self._context.index(tuple(axis for axis in self._context.grid.names if axis != "pipeline"))
        return f"inputs written/{model}/{stage}/{microbatch}/{'training' if training else 'evaluation'}"


def _describe(where: str, x: Tensor) -> str:
    return f"inputs{where}, {str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def _share(x: Tensor, y: Tensor) -> bool:
    """Whether what is written to one is seen in the other."""
    if x.layout is not torch.strided or y.layout is not torch.strided:
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class _ReadGuard(TorchFunctionMode):
    """Refuses functions that read an input of the model which it has written to.

    Args:
        batch: what the loss function gets.
        description: of that input.
    """

    def __init__(self, batch: Any, description: str) -> None:
        super().__init__()
        self._watched, self._description = [x for _, x in tensors(model_input(batch))], description

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves((args, kwargs)) if any(leaf is x for x in self._watched)]
        name = getattr(func, "__name__", str(func))
        if found and (name in _READING or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result))):
            raise ValueError(
                f"the model writes to its input in place ({self._description}), and the loss function reads that input "
                f"({name}): it would see what the model wrote in one process and the batch as it was under a pipeline. "
                f"Write to a copy in the model (x = x - mean instead of x -= mean, or x = x.clone() first), and return "
                f"what the loss needs of it"
            )
        return result
