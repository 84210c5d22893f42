"""Flat buffers: gradients that are reduced by one collective."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from colossus.comm.collectives import Pending
from colossus.comm.staged import Staged
from colossus.gradients.bucket_sum import BucketSum
from colossus.layout.parameter import spec_of
from colossus.tensor_parallel.dtypes import gradient_dtype

#: names of parameters whose gradients one collective sums, and the sum of this rank's own numbers before it
LocalSum = tuple[tuple[str, ...], Tensor]


def sum_of_all(flat: Tensor) -> Tensor:
    """The sum of all numbers of a flat buffer: finite if they are, and are not huge."""
    return flat.sum(dtype=torch.float32 if flat.dtype.itemsize < 4 else None)


def first_of_each(sums: Iterable[LocalSum]) -> list[LocalSum]:
    """Without the names that an earlier piece has: a parameter is in the first collective that took its gradient."""
    found: list[LocalSum] = []
    known: set[str] = set()
    for names, own_sum in sums:
        names = tuple(name for name in names if name not in known)
        known.update(names)
        if names:
            found.append((names, own_sum))
    return found


class Bucket:
    """A flat buffer of the gradients of some parameters, and behind them one flag each: whether any rank used it.

    A parameter that no rank used keeps ``grad = None``, so that the optimizer skips it as it would in one process. The
    flags are summed with the gradients, without a collective of their own. A rank that used all its parameters does not
    read them. Another one has to, and waits for its device: zeros for a gradient would decay the weight, the moments
    and the count of steps of a parameter that nobody used, and optimizers can be told on the device to leave out a
    step, but no single parameter.

    Args:
        params: whose gradients have one dtype.
        summed: starts their sum over ranks.
        dtype: in which they are summed.
    """

    def __init__(self, params: list[nn.Parameter], summed: BucketSum, dtype: torch.dtype) -> None:
        self.params = params
        self._summed = summed
        self._is_cast = dtype != gradient_dtype(params[0])
        sizes = [param.numel() for param in params]
        total = sum(sizes)
        self.flat = torch.zeros(total + len(params), dtype=dtype, device=params[0].device)
        self.views = [
            flat.view(param.shape) for flat, param in zip(self.flat[:total].split(sizes), params, strict=True)
        ]
        self.flags = self.flat[total:]
        self._position = {id(param): index for index, param in enumerate(params)}
        self._present: set[int] = set()
        self._pending: Pending | None = None
        self._own_sum: Tensor | None = None

    @property
    def is_full(self) -> bool:
        return len(self._present) == len(self.params)

    def holds(self, param: nn.Parameter) -> bool:
        """Whether the parameter's gradient of this step is in the bucket."""
        return self._position[id(param)] in self._present

    def take(self, param: nn.Parameter) -> None:
        """Copy a complete gradient in; the parameter's ``grad`` is a view of the bucket from then on, if it is of one
        dtype with it."""
        index = self._position[id(param)]
        assert param.grad is not None
        self.views[index].copy_(param.grad)
        if not self._is_cast:
            param.grad = self.views[index]
        self._present.add(index)

    def reset(self) -> None:
        """Drop the gradients taken in a step that failed."""
        self._present.clear()

    def wait_and_drop(self) -> None:
        """Wait for the reduction that a step that failed has left: until then it writes to the buffer."""
        if self._pending is not None:
            self._pending.wait()
            self._pending = None

    def start(self) -> None:
        """Start the sum; a parameter without a gradient on this rank counts as zero and unused."""
        self.flags.fill_(1.0)
        for index, view in enumerate(self.views):
            if index not in self._present:
                view.zero_()
                self.flags[index].zero_()
        self._own_sum = sum_of_all(self.flat)
        self._pending = self._summed.start(self.flat)

    def advance(self) -> None:
        """Between the buckets of a step: go on with a sum of several stages."""
        if isinstance(self._pending, Staged):
            self._pending.advance()

    def finish(self) -> None:
        """Wait for the sums, and give each parameter its own."""
        assert self._pending is not None
        total = self._pending.wait()
        if total is not self.flat:
            self.flat.copy_(total)
        complete = self.is_full
        if self._is_cast or not complete:
            used = [1.0] * len(self.params) if complete else self.flags.tolist()
            for param, view, flag in zip(self.params, self.views, used, strict=True):
                param.grad = view.to(gradient_dtype(param)) if flag else None
        self._present.clear()
        self._pending = None

    def local_sums(self) -> list[LocalSum]:
        """Of what this rank put into the last reduction."""
        if self._own_sum is None:
            return []
        return [(tuple(spec_of(param).name for param in self.params), self._own_sum)]
