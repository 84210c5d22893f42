"""A model that writes to its input in place gets copies: its batch is the same on all ranks and under all plans."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

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
    for a model that does not write.
    """

    def __init__(self) -> None:
        #: of training and of evaluation: whether the model writes, once it is known
        self._known: dict[bool, bool] = {}
        self._first_step: int | None = None
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

    def after_forward(self, step: int | None) -> None:
        """The model has run on it."""
        training = step is not None
        for where, x, version in self._given:
            if x._version != version:
                dtype = str(x.dtype).removeprefix("torch.")
                self._written.setdefault(training, f"inputs{where}, {dtype}{list(x.shape)}")
        if self._given and not training:
            self._known.setdefault(False, False in self._written)
        self._given = []

    def around_loss(self, batch: Any, step: int | None) -> AbstractContextManager[Any]:
        """Around a loss function: an error when it reads what the model has written to, while that is found out.

        Args:
            batch: what the loss function gets.
        """
        training = step is not None
        if training not in self._written or (training and step != self._first_step):
            return nullcontext()
        return _ReadGuard([x for _, x in tensors(model_input(batch))], self._written[training])


class _ReadGuard(TorchFunctionMode):
    def __init__(self, watched: list[Tensor], description: str) -> None:
        super().__init__()
        self._watched, self._description = watched, description

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
