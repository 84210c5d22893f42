"""A model that writes to its input in place gets copies: its batch is the same on all ranks and under all plans."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

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
    for a model that does not write. Where a pipeline has the first stage and the loss on different ranks, these meet in
    the store.

    Args:
        has_first, has_last: whether this rank has the first stage of the model, and the last, with the loss.
    """

    def __init__(self, context: ParallelContext, *, has_first: bool, has_last: bool) -> None:
        self._context, self._has_first, self._has_last = context, has_first, has_last
        #: of training and of evaluation: whether the model writes, once it is known
        self._known: dict[bool, bool] = {}
        self._first_step: int | None = None
        self._has_evaluated = False
        self._given: list[tuple[str, Tensor, int]] = []
        #: what a message says of the tensor that was written
        self._written: dict[bool, str] = {}

    def before_forward(self, value: Any, step: int | None) -> Any:
        """What to call the model with."""
        training = step is not None
        if training and self._first_step not in (None, step):
            self._known.setdefault(True, True in self._written)
        if self._known.get(training) is False:
            return value
        copies = map_batch(Tensor.clone, value)
        if training not in self._known:
            self._first_step = step if training else self._first_step
            self._given = [(where, x, x._version) for where, x in tensors(copies) if not x.is_inference()]
        return copies

    def after_forward(self, step: int | None, microbatch: int) -> None:
        """The first stage of the model has run on it."""
        training = step is not None
        for where, x, version in self._given:
            if x._version != version:
                dtype = str(x.dtype).removeprefix("torch.")
                self._written.setdefault(training, f"inputs{where}, {dtype}{list(x.shape)}")
        if not self._has_last and self._is_first(step):
            self._context.store().set(self._key(training, microbatch), self._written.get(training, ""))
        if self._given and not training:
            self._known.setdefault(False, False in self._written)
        self._given = []

    def around_loss(self, batch: Any, step: int | None, microbatch: int) -> AbstractContextManager[Any]:
        """Around a loss function: an error when it reads what the model has written to, while that is found out.

        Args:
            batch: what the loss function gets.
        """
        training = step is not None
        if not self._has_first:
            return (
                _ReadGuard(batch, lambda: self._told(training, microbatch)) if self._is_first(step) else nullcontext()
            )
        if training not in self._written or (training and step != self._first_step):
            return nullcontext()
        return _ReadGuard(batch, lambda: self._written[training])

    def _is_first(self, step: int | None) -> bool:
        """Whether a forward is one of the first step, or the very first of evaluations: ranks tell and ask of these."""
        if step is None:
            first, self._has_evaluated = not self._has_evaluated, True
            return first
        if self._first_step is None:
            self._first_step = step
        return step == self._first_step

    def _told(self, training: bool, microbatch: int) -> str:
        """What the rank of the first stage found, before it sent on what the loss is computed from."""
        return self._context.store().get(self._key(training, microbatch)).decode()

    def _key(self, training: bool, microbatch: int) -> str:
        model = self._context.index(tuple(axis for axis in self._context.grid.names if axis != "pipeline"))
        return f"input written/{model}/{training}/{microbatch}"


class _ReadGuard(TorchFunctionMode):
    """Refuses functions that read an input of the model which it has written to.

    Args:
        batch: what the loss function gets.
        written: says which of the inputs that is; nothing when there is none.
    """

    def __init__(self, batch: Any, written: Callable[[], str]) -> None:
        super().__init__()
        self._watched, self._written = [x for _, x in tensors(model_input(batch))], written

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        found = [leaf for leaf in tree_leaves((args, kwargs)) if any(leaf is x for x in self._watched)]
        name = getattr(func, "__name__", str(func))
        is_read = found and (name in _READING or any(isinstance(leaf, Tensor) for leaf in tree_leaves(result)))
        if is_read and (description := self._written()):
            raise ValueError(
                f"the model writes to its input in place ({description}), and the loss function reads that input "
                f"({name}): it would see what the model wrote in one process and the batch as it was under a pipeline. "
                f"Write to a copy in the model (x = x - mean instead of x -= mean, or x = x.clone() first), and return "
                f"what the loss needs of it"
            )
        return result
