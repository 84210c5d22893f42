"""One forward of a model with zeros as parameters: the operations and modules that ran, and their tensors."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map

from colossus.construct.init_trace import tensors_written
from colossus.convert.forward_flow import call_model, standing_in
from colossus.convert.zeros import ASKS, EMPTY, SHAPE_ONLY, compute, off_meta, put_zeros
from colossus.error_place import is_users
from colossus.layout.operators import OperatorMode
from colossus.nest import tensors_within

_aten = torch.ops.aten
_CPU = torch.device("cpu")
#: operators whose result does not depend on the values of their tensor
_VALUE_FREE = SHAPE_ONLY | {_aten.rand_like, _aten.randn_like, _aten.randint_like}
_ASKING = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.item}


@dataclass(frozen=True)
class Operation:
    """An operation on tensors that are computed from parameters.

    Attributes:
        time: the tick of the trace's clock.
        reads, makes, writes: keys of the storages that it reads, returns or writes in place, and that depend on
            parameters, those of ``makes`` and ``writes`` from this time on.
        asks: whether Python gets the values that are read, or a shape that depends on them.
        line: file and line of the model's code.
    """

    time: int
    reads: frozenset[int]
    makes: frozenset[int]
    writes: frozenset[int]
    asks: bool
    line: str


@dataclass(frozen=True)
class Leaf:
    """A tensor among the arguments or results of a module.

    Attributes:
        slot: its index among the leaves.
        key: key of its storage.
        shape: its shape.
        is_whole: whether it has each element of its storage once.
    """

    slot: int
    key: int
    shape: torch.Size
    is_whole: bool


@dataclass(frozen=True)
class Call:
    """A call of a module.

    Attributes:
        name: full name of the module.
        began, ended: ticks of the trace's clock.
        arguments, results: tensors among its arguments and its results.
        others: (slot, type) of its other results.
        structure: structure of the nest of its results.
        draws: whether it draws random numbers of Python or numpy.
    """

    name: str
    began: int
    ended: int
    arguments: tuple[Leaf, ...]
    results: tuple[Leaf, ...]
    others: tuple[tuple[int, type], ...]
    structure: TreeSpec
    draws: bool


@dataclass
class ForwardTrace:
    """The record of a forward, with a clock that ticks at each operation and at both ends of a module's call.

    Attributes:
        calls: the calls of modules, in the order in which they began.
        dependent: key of a storage that depends on parameters -> the time since when; parameters are not in it.
        uses: name of a parameter or a buffer -> the times when an operation took it.
        rewrites: name, time and line of writes to buffers.
        draws: times of draws of torch's generators.
        output: keys of the storages of the model's output.
        parameters: key of the storage of a parameter -> its name.
    """

    calls: list[Call] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)
    dependent: dict[int, int] = field(default_factory=dict)
    uses: dict[str, list[int]] = field(default_factory=dict)
    rewrites: list[tuple[str, int, str]] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)
    output: frozenset[int] = frozenset()
    parameters: dict[int, str] = field(default_factory=dict)


def trace_forward(model: nn.Module, example: Any) -> tuple[ForwardTrace, Any, Any, OnZeros]:
    """Run the forward of a model and record it. The model's parameters and buffers become zeros on the CPU.

    All tensors are on the CPU, also where the model names another device. Tensors that depend on no parameter have the
    right values (masks, positions), so that a forward may branch on them.

    Returns:
        The trace, the model's input and output, and the mode in which further forwards of the model run.
    """
    put_zeros(model)
    dtypes = [parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()]
    example = tree_map(partial(_in_dtype, dtypes[0] if dtypes else None), example)  # an engine casts its batches alike
    mode = OnZeros(model)
    trace = mode.trace
    calls: dict[str, Callable[..., Any]] = {
        name: partial(_call, mode, name, module) for name, module in model.named_modules() if name
    }
    with standing_in(model, calls), _Asked(mode), mode:
        output = call_model(model.forward, example)
        trace.output = mode.use(tensors_within(output))
    trace.calls.sort(key=lambda call: call.began)
    return trace, example, output, mode


def _in_dtype(dtype: torch.dtype | None, leaf: Any) -> Any:
    return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf


def _call(mode: OnZeros, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    began, arguments, state = mode.tick(), tree_leaves((args, kwargs)), _random_state()
    out = module(*args, **kwargs)
    results, structure = tree_flatten(out)
    others = tuple((slot, type(leaf)) for slot, leaf in enumerate(results) if not isinstance(leaf, Tensor))
    draws = state != _random_state()
    both = mode.leaves_of(arguments), mode.leaves_of(results)
    mode.trace.calls.append(Call(name, began, mode.tick(), *both, others, structure, draws))
    return out


def _random_state() -> tuple[Any, Any]:
    """Return the states of the global generators of Python and numpy."""
    state: Any = np.random.get_state(legacy=False)
    return random.getstate(), (state["state"]["pos"], state["state"]["key"].tobytes(), state["gauss"])


class OnZeros(OperatorMode):
    """A mode in which operations see zeros as parameters, and are recorded in ``trace``."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.trace = ForwardTrace()
        tensors = [*model.named_parameters(), *model.named_buffers()]
        self._names = {self.key_of(tensor): name for name, tensor in tensors}
        self.trace.parameters = {self.key_of(parameter): name for name, parameter in model.named_parameters()}
        #: storages stay alive, so that no later one gets the key of another
        self._alive: list[Any] = [tensor.untyped_storage() for _, tensor in tensors]
        self._time = 0

    def tick(self) -> int:
        self._time += 1
        return self._time

    def key_of(self, tensor: Tensor) -> int:
        """Return a key that all views of one tensor share."""
        while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            tensor = torch._C._functorch.get_unwrapped(tensor)
        try:
            return tensor.untyped_storage()._cdata
        except NotImplementedError:  # a sparse tensor
            self._alive.append(tensor)
            return id(tensor)

    def use(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        """Record that tensors are used now, and return their keys."""
        time, keys = self.tick(), frozenset(map(self.key_of, tensors))
        for name in (self._names[key] for key in keys if key in self._names):
            self.trace.uses.setdefault(name, []).append(time)
        return keys

    def depends(self, key: int) -> bool:
        return key in self.trace.dependent or key in self.trace.parameters

    def leaves_of(self, values: list[Any]) -> tuple[Leaf, ...]:
        return tuple(
            Leaf(slot, self.key_of(value), value.shape, _is_whole(value))
            for slot, value in enumerate(values)
            if isinstance(value, Tensor)
        )

    def ask(self, tensor: Tensor) -> None:
        """Record that Python gets a tensor's values."""
        if self.depends(key := self.key_of(tensor)):
            self._record(frozenset({key}), (), (), asks=True)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(off_meta, (args, dict(kwargs or {})))
        assert kwargs is not None
        if kwargs.get("device") is not None:
            kwargs["device"] = _CPU
        operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        keys = self.use(operands)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.trace.draws.append(self._time)
        reads = frozenset[int]()
        if func.overloadpacket not in _VALUE_FREE:
            reads = frozenset(filter(self.depends, keys))
        written = list(tensors_written(func, args, kwargs))
        for key in filter(self._names.get, map(self.key_of, written)):
            if key not in self.trace.parameters:
                self.trace.rewrites.append((self._names[key], self._time, _user_line()))
        out = compute(func, args, kwargs) if reads and not written else func(*args, **kwargs)
        if func.overloadpacket in EMPTY:
            out.zero_()
        if reads:
            results = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
            self._record(reads, results, written, asks=bool(ASKS.intersection(func.tags)))
        return out

    def _record(self, reads: frozenset[int], results: Any, written: Any, *, asks: bool) -> None:
        dependent, parameters = self.trace.dependent, self.trace.parameters.keys()
        makes = frozenset(self.key_of(tensor) for tensor in results) - reads - parameters
        writes = frozenset(self.key_of(tensor) for tensor in written) - parameters
        self._alive += [tensor.untyped_storage() for tensor in (*results, *written) if tensor.layout == torch.strided]
        for key in makes | writes:
            dependent.setdefault(key, self._time)
        self.trace.operations.append(Operation(self._time, reads, makes - writes, writes, asks, _user_line()))


class _Asked(TorchFunctionMode):
    """A mode that also records values that Python gets past torch's operators."""

    def __init__(self, mode: OnZeros) -> None:
        super().__init__()
        self._mode = mode

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _ASKING and isinstance(args[0], Tensor):
            self._mode.ask(args[0])
        return func(*args, **(kwargs or {}))


def _is_whole(tensor: Tensor) -> bool:
    try:
        storage = tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return False
    return storage.nbytes() == tensor.numel() * tensor.itemsize and 0 not in tensor.stride()


def _user_line() -> str:
    return next(_user_lines(), "")


def _user_lines() -> Iterator[str]:
    frame = sys._getframe(2)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            yield f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
