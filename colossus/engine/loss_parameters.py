"""Parameters that a loss function reads itself, beside the model's outputs: counted as in one process, or refused.

A loss function is called for each microbatch on each rank that has samples or tokens of its own, and its results are
summed. A penalty on weights would be added as often, and a rank may have a part of a weight, or of the model. The first
loss of training, and of an evaluation, is checked, and computed again if it reads a parameter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from colossus.arithmetic import listed
from colossus.context.parallel_context import ParallelContext
from colossus.data.batch import batch_size_of, repeat_batch
from colossus.engine.loss_function import LossFunction, checked_sum
from colossus.error_place import located_error
from colossus.gradients.gradient_axes import gradient_sum_axes
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import SplitParameter

_ADVICE = (
    "Use weight_decay of the optimizer; or let a module of the model compute with its parameters in its forward, and "
    "the model return the result"
)
#: functions that read no values of a tensor
_SHAPES_ALONE = {
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
    *("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor", "requires_grad_"),
}


class FirstLoss:
    """The first call of a loss function in a run, which checks the parameters that it reads.

    Args:
        context: the rank's context.
        model: the rank's part of the model.
        is_partitioned: whether other ranks have other stages of the model.
        num_microbatches: microbatches of a step.
    """

    def __init__(
        self, context: ParallelContext, model: nn.Module, *, is_partitioned: bool, num_microbatches: int
    ) -> None:
        self._context, self._model, self._is_partitioned = context, model, is_partitioned
        split = model_parallel_of(context).regions.whole.shard_axes
        self._axes = tuple(axis for axis in context.grid.names if axis in split and context.grid.sizes[axis] > 1)
        self._num_calls = num_microbatches * context.size(self._axes)

    def call(self, loss_fn: LossFunction, outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the sum and the count.

        Raises:
            ValueError: for a parameter whose share of the loss would not be that of one process.
        """
        with self._with_a_parameter():
            with _ParametersRead() as read:
                result = checked_sum(loss_fn(outputs, batch))
            params = list(read.places)
            if params and (self._num_calls > 1 or self._context.world_size > 1):
                why = self._why_not(params, loss_fn, outputs, batch)
                if why:
                    names = listed([spec_of(param).name for param in params], 3)
                    raise ValueError(f"the loss function reads {names} itself, {why}{read.places[params[0]]}")
        return result

    def _why_not(self, params: Sequence[nn.Parameter], loss_fn: LossFunction, outputs: Any, batch: Any) -> str:
        """Return why the loss would not be that of one process; empty if it would be."""
        try:
            return self._why_otherwise(params, loss_fn, outputs, batch)
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"and could not be computed again with each sample twice, as a check ({error}). {_ADVICE}"

    @contextmanager
    def _with_a_parameter(self) -> Iterator[None]:
        """Register a stand-in for parameters of other stages, if this rank has none.

        A loss function that reads all parameters of the model then reads the stand-in.
        """
        if not self._is_partitioned or next(self._model.parameters(), None) is not None:
            yield
            return
        name = "parameters_of_other_stages"
        stand_in = nn.Parameter(torch.ones((), dtype=self._context.precision.data, device=self._context.device))
        spec_of(stand_in).name = name
        self._model.register_parameter(name, stand_in)
        try:
            yield
        finally:
            del self._model._parameters[name]

    def _why_otherwise(self, params: Sequence[nn.Parameter], loss_fn: LossFunction, outputs: Any, batch: Any) -> str:
        if any(isinstance(param, SplitParameter) for param in params):
            return f"and this rank has a part of it only. {_ADVICE}"
        once = _beside_outputs(params, loss_fn, outputs, batch)
        if self._is_partitioned:
            halved = tree_map_only(Tensor, lambda x: x * 0.5 if x.is_floating_point() else x, outputs)
            if _are_equal(once[1:], _beside_outputs(params, loss_fn, halved, batch)[1:]):
                return (
                    f"whatever the outputs are: under a pipeline the last stage, which computes the loss, has only its "
                    f"own parameters. {_ADVICE}"
                )
        for param in (param for param in params if param.requires_grad and torch.is_grad_enabled()):
            axes = gradient_sum_axes(param, self._context)
            if axes != self._axes:
                return (
                    f"and its gradient is summed over {_named(axes)}, the loss over {_named(self._axes)}: the term of "
                    f"the loss would be counted wrongly. {_ADVICE}"
                )
        if self._num_calls == 1:
            return ""
        size = batch_size_of(batch)

        def repeated(x: Tensor) -> Tensor:
            return torch.cat((x, x)) if x.dim() and x.shape[0] % size == 0 else x

        twice = _beside_outputs(params, loss_fn, tree_map_only(Tensor, repeated, outputs), repeat_batch(batch, 2))
        if _are_equal([2 * value for value in once], twice):
            return ""
        return (
            f"and this term does not grow with the samples: a step calls the function {self._num_calls} times, for "
            f"each microbatch and on each rank that has samples or tokens of its own, and would count the term as "
            f"often. Weight a penalty by the count: return total + 0.01 * count * penalty, count; or use weight_decay "
            f"of the optimizer"
        )


def _beside_outputs(params: Sequence[nn.Parameter], loss_fn: LossFunction, outputs: Any, batch: Any) -> list[Tensor]:
    """Return the sum, and its gradient of each trained parameter except for the part through the outputs."""
    with torch.enable_grad():
        total, _ = checked_sum(loss_fn(tree_map_only(Tensor, Tensor.detach, outputs), batch))
        trained = [param for param in params if param.requires_grad]
        if not total.requires_grad:
            return [total, *map(torch.zeros_like, trained)]
        gradients = torch.autograd.grad(total, trained, allow_unused=True, materialize_grads=True)
    return [total.detach(), *gradients]


def _are_equal(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Return whether the tensors are the same up to rounding."""
    for one, other in zip(first, second, strict=True):
        tolerance = min(0.1, 16 * torch.finfo(one.dtype).eps ** 0.5)
        if (one.double() - other.double()).norm() > tolerance * one.double().norm():
            return False
    return True


def _named(axes: Sequence[str]) -> str:
    return ", ".join(axes) or "no axis"


class _ParametersRead(TorchFunctionMode):
    """The record of a model's parameters whose values are read outside of the forward of their modules.

    Attributes:
        places: parameter -> the place where it was read, as text for an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places: dict[nn.Parameter, str] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling() or getattr(func, "__name__", "") in _SHAPES_ALONE:
            return out
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(out)):
            for leaf in tree_leaves((args, kwargs)):
                spec = getattr(leaf, "_colossus_spec", None) if isinstance(leaf, nn.Parameter) else None
                if spec is not None and spec.name and leaf not in self.places and not _is_of_running_module(leaf):
                    self.places[leaf] = str(located_error(""))
        return out


def _is_of_running_module(param: nn.Parameter) -> bool:
    """Return whether the forward of a module that has the parameter is running."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "forward" else None
        if isinstance(module, nn.Module) and any(param is own for own in module.parameters()):
            return True
        frame = frame.f_back
    return False
