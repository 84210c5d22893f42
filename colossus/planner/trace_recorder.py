"""The recorder of a `Trace` on fake tensors.

It records operators when they are dispatched, and collectives when they are counted and waited for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from colossus.comm import accounting, log
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import DTYPES
from colossus.hardware.hardware import input_bytes_of
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.planner.fake_tensors import CountedFakeTensors
from colossus.planner.trace import AttentionCall, Awaited, Event, Operator, Product, Started, Trace
from colossus.tensor_parallel.gathered_weights import GatheredWeights

aten = torch.ops.aten
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
#: operators that read a few rows of a large tensor: they read as much as they write
_PICKS = ("embedding", "index", "index_select", "gather", "_unsafe_index")
#: operators that move no bytes
_FREE = (
    "detach", "alias", "_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "empty", "empty_like", "new_empty",
    "empty_strided", "new_empty_strided", "_local_scalar_dense", "set_", "record_stream",
)  # fmt: skip


class TraceRecorder:
    """Records events inside the context `recording`; `take` returns those since the last call."""

    def __init__(self, context: ParallelContext) -> None:
        self._context = context
        #: events of each part of a trace, and the part that is being recorded
        self._parts: defaultdict[str, list[Event]] = defaultdict(list)
        self._part = "events"
        self._numbers = 0
        #: (operation, axes, bytes) of each tensor that was counted and not logged yet; a message has several
        self._counted: list[tuple[str, str, float]] = []

    def take(self) -> Trace:
        events, repeated, once = (tuple(self._parts[part]) for part in ("events", "repeated", "once"))
        self._parts.clear()
        return Trace(events, repeated, Trace(once) if once else None)

    @contextmanager
    def part(self, name: Literal["repeated", "once"]) -> Iterator[None]:
        """Record the events inside the context as those of recomputation, or as those that run once per step."""
        outer, self._part = self._part, name
        try:
            yield
        finally:
            self._part = outer

    @contextmanager
    def recording(self, fake: CountedFakeTensors) -> Iterator[None]:
        """Record all events under the fake mode inside the context; those of recomputation apart."""
        rng = self._context.rng
        replay = rng.replay

        @contextmanager
        def recomputed(*args: Any) -> Iterator[None]:
            with self.part("repeated"), replay(*args):
                yield

        fake.observer = self._record_operator
        accounting.listeners.append(self)  # type: ignore[arg-type]
        try:
            with ExitStack() as stack:
                stack.enter_context(patch.object(log, "record", self._log))
                stack.enter_context(patch.object(rng, "replay", recomputed))
                yield
        finally:
            fake.observer = None
            if self in accounting.listeners:
                accounting.listeners.remove(self)  # type: ignore[arg-type]

    def add(self, operation: str, axes: str, dtype: torch.dtype, sent: float) -> None:
        """Note the bytes of a collective, as a `colossus.comm.accounting.Counter` does."""
        self._counted.append((operation, axes, sent))

    def _log(self, operation: str, axes: str, shape: tuple[int, ...], dtype: object) -> log.Entry:
        """Record the start of a collective, in place of `colossus.comm.log.record`; the entry records the wait."""
        counted, self._counted = self._counted, []
        if not counted:  # a receive, which the sending rank counts, or a call that nobody counts
            return log.Entry(operation, axes, 0, shape, dtype, ("", 0))
        self._numbers += 1
        number = self._numbers
        name, axes, _ = counted[0]
        sent, ranks = sum(nbytes for _, _, nbytes in counted), self._context.grid.size(axes.split("x"))
        kind = name.split()[0]
        self.record(Started(number, kind, axes, input_bytes_of(kind, ranks, sent)))
        return AwaitedEntry(number, operation, axes, lambda: self.record(Awaited(number)))

    def record(self, event: Event) -> None:
        """Add an event to the trace that is being recorded."""
        self._parts[self._part].append(event)

    def _record_operator(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        event = work_of(func, args, kwargs, out)
        if event is not None:
            self.record(event)


class RecordedDeferral(DeferredWgrad):
    """A `DeferredWgrad` whose Python around torch's functions in forward is recorded, as starts of operators."""

    def __init__(self, weights: GatheredWeights, recorder: TraceRecorder) -> None:
        super().__init__(weights)
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.is_grad_enabled():
            self._recorder.record(Operator(0.0, "torch_function"))
        return super().__torch_function__(func, types, args, kwargs)


class AwaitedEntry(log.Entry):
    """The log entry of a collective that calls ``on_wait`` when ``done`` is set: at its wait."""

    __slots__ = ("_on_wait",)

    def __init__(self, number: int, operation: str, axes: str, on_wait: Callable[[], None]) -> None:
        self._on_wait = on_wait
        super().__init__(operation, axes, number, (), None, ("", 0))

    @property
    def done(self) -> bool:
        return False

    @done.setter
    def done(self, value: bool) -> None:
        if value:
            self._on_wait()


def work_of(func: Any, args: Any, kwargs: Any, out: Any) -> Event | None:
    """Return the event of an operator, None for torch's bookkeeping and its collectives, which are logged."""
    name = func._schema.name.partition("::")[2]
    if func.namespace != "aten":
        return None if func.namespace in ("prim", "c10d", "_c10d_functional") else _moved(name, args, kwargs, out)
    make = _PRODUCTS.get(name)
    if make is not None:
        return make(*args, **kwargs)
    if name.startswith("_scaled_dot_product"):
        return _attention(name, args, kwargs)
    if name in _FREE or getattr(func, "is_view", False):
        return Operator(0.0, name)
    return _moved(name, args, kwargs, out)


def _moved(name: str, args: Any, kwargs: Any, out: Any) -> Operator:
    made = sum(x.nbytes for x in tree_leaves(out) if isinstance(x, Tensor))
    if name in _PICKS:
        return Operator(2.0 * made, name)
    read = sum(x.nbytes for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
    return Operator(float(made + read), name)


def _product(a: Tensor, b: Tensor) -> Product:
    count = math.prod(a.shape[:-2])
    return Product(count, a.shape[-2], b.shape[-1], a.shape[-1], _NAMES[a.dtype])


def _grouped(a: Tensor, b: Tensor, ends: Tensor, **options: Any) -> Product:
    """Return the products of equally large groups: of rows with a matrix each, or in wgrad of columns with rows."""
    groups, (rows, inner), of_rows = len(ends), a.shape, b.dim() == 3
    m, k = (rows / groups, inner) if of_rows else (rows, inner / groups)
    return Product(groups, m, b.shape[-1], k, _NAMES[a.dtype])


def _convolved(x: Tensor, weight: Tensor, bias: Any, stride: Any, padding: Any, dilation: Any, transposed: bool,
               output_padding: Any, groups: int, *rest: Any) -> Product:  # fmt: skip
    """Return a convolution as the product of patches and weights."""
    out_channels, inner = weight.shape[0], math.prod(weight.shape[1:])
    places = [
        (size + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for size, pad, dil, kernel, step in zip(x.shape[2:], padding, dilation, weight.shape[2:], stride, strict=True)
    ]
    return Product(groups, len(x) * math.prod(places), out_channels // groups, inner, _NAMES[x.dtype])


def _convolved_back(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Product:
    """Return the dgrad and the wgrad of a convolution."""
    rows, mask = len(dy) * math.prod(dy.shape[2:]), rest[-1]
    return Product(sum(mask[:2]), rows, dy.shape[1], math.prod(weight.shape[1:]), _NAMES[x.dtype])


_PRODUCTS: dict[str, Callable[..., Product]] = {
    "mm": lambda a, b, **_: _product(a, b),
    "bmm": lambda a, b, **_: _product(a, b),
    "addmm": lambda bias, a, b, **_: _product(a, b),
    "baddbmm": lambda bias, a, b, **_: _product(a, b),
    "mv": lambda a, b: Product(1, a.shape[0], 1, a.shape[1], _NAMES[a.dtype]),
    "dot": lambda a, b: Product(1, 1, 1, a.shape[0], _NAMES[a.dtype]),
    "_grouped_mm": _grouped,
    "convolution": _convolved,
    "convolution_backward": _convolved_back,
}


def _attention(name: str, args: Any, kwargs: Any) -> AttentionCall:
    backward = name.endswith("_backward")
    q, k = (args[1], args[2]) if backward else (args[0], args[1])
    flags = [value for value in (*args, *kwargs.values()) if isinstance(value, bool)]
    causal = kwargs.get("is_causal", any(flags[:1]) if backward else any(flags))
    samples, heads, queries, head_dim = q.shape
    return AttentionCall(samples * heads, queries, k.shape[2], head_dim, _NAMES[q.dtype], backward, causal)
