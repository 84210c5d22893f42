"""The flat buckets of gradients, which are summed as soon as they are full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import nn

from colossus.comm import shared_memory
from colossus.comm.flat_buffer import chunks, split_as
from colossus.comm.pending import Pending, Staged
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import Precision
from colossus.gradients.bucket_sum import BucketSum, SumFactory
from colossus.gradients.gradient_axes import agree_on_axes
from colossus.layout.parameter import spec_of
from colossus.layout.split_parameter import as_shards
from colossus.tensor_parallel.dtypes import gradient_dtype

#: a stage of a sum ends before gradients of this part of its elements are made, or sums do not hide behind backward
_PART_BEHIND = 1 / 8


class GradientForm(NamedTuple):
    """The axes over which a gradient is summed, its dtype and its number of elements, which decide its bucket."""

    axes: tuple[str, ...]
    dtype: torch.dtype
    elements: int


def cut_into_buckets(
    gradients: Sequence[GradientForm], precision: Precision, bucket_bytes: int, flat_limit: int | None
) -> list[list[int]]:
    """Return the indices of the gradients of each bucket of a stage; gradients without axes need no sum.

    The gradients of a bucket have the same axes and dtype. Buckets come in the order in which backward fills them.

    Args:
        gradients: the gradients, in the order of backward.
        precision: the dtypes of the run.
        bucket_bytes: the size of a bucket; a larger gradient has one for itself.
        flat_limit: see `colossus.comm.shared_memory.flat_limit`.
    """
    groups: dict[tuple[tuple[str, ...], torch.dtype], list[int]] = {}
    for index, gradient in enumerate(gradients):
        if gradient.axes:
            groups.setdefault((gradient.axes, gradient.dtype), []).append(index)
    buckets: list[list[int]] = []
    for (_, dtype), indices in groups.items():
        width = precision.reduce_dtype(dtype).itemsize
        # flags have to fit, too
        limit = bucket_bytes if flat_limit is None else min(bucket_bytes, flat_limit - 4096 * width)
        buckets += chunks(indices, lambda index: gradients[index].elements, limit // width)
    return sorted(buckets, key=max)


class Bucket:
    """A flat buffer of the gradients of some parameters, followed by one flag for each: whether a rank used it.

    A parameter that no rank used keeps ``grad = None``, so that the optimizer skips it as it would in one process:
    zeros would decay the weight and the moments. The flags are summed with the gradients. A rank that used all of its
    parameters need not read the sums of the flags. Another rank reads them, and waits for its device.

    Args:
        params: parameters whose gradients have one dtype.
        bucket_sum: starts the sum of the buffer over ranks.
        dtype: the dtype of the sum.
    """

    def __init__(self, params: list[nn.Parameter], bucket_sum: BucketSum, dtype: torch.dtype) -> None:
        self.params = params
        self._sum = bucket_sum
        self._is_cast = dtype != gradient_dtype(params[0])
        total = sum(param.numel() for param in params)
        self.flat = torch.zeros(total + len(params), dtype=dtype, device=params[0].device)
        self.views = split_as(self.flat[:total], params)
        self.flags = self.flat[total:]
        self._position = {id(param): index for index, param in enumerate(params)}
        self._present: set[int] = set()
        self._pending: Pending | None = None
        #: elements of later buckets that were started since the stage under way
        self._num_behind = 0

    @property
    def is_full(self) -> bool:
        return len(self._present) == len(self.params)

    def holds(self, param: nn.Parameter) -> bool:
        """Return whether the parameter's gradient of this step is in the bucket."""
        return self._position[id(param)] in self._present

    def hold(self, param: nn.Parameter) -> None:
        """Let ``grad`` be a view of the bucket where the dtypes agree, so that later microbatches add to the bucket."""
        if not self._is_cast and param.grad is not None:  # None where wgrad is deferred
            self._copy(self._position[id(param)])

    def take(self, param: nn.Parameter) -> None:
        """Copy a complete gradient into the bucket, unless it is there (see `hold`)."""
        index = self._position[id(param)]
        self._copy(index)
        self._present.add(index)

    def _copy(self, index: int) -> None:
        param, view = self.params[index], self.views[index]
        with as_shards():
            assert param.grad is not None
            if param.grad is not view:
                view.copy_(param.grad)
                if not self._is_cast:
                    param.grad = view

    def start(self) -> None:
        """Start the sum; a parameter without a gradient on this rank adds zeros and counts as unused."""
        self.flags.fill_(1.0)
        for index, view in enumerate(self.views):
            if index not in self._present:
                view.zero_()
                self.flags[index].zero_()
        self._num_behind = 0
        self._pending = self._sum.start(self.flat)

    def advance(self, num_later: int) -> None:
        """Start the next stage of a sum of several stages, once enough elements have been started behind this one.

        Then backward has run for long enough that the stage under way has ended: the device waits for it.

        Args:
            num_later: elements of the bucket that has just been started.
        """
        self._num_behind += num_later
        if isinstance(self._pending, Staged) and self._num_behind >= _PART_BEHIND * self.flat.numel():
            self._num_behind = 0
            self._pending.advance()

    def finish(self) -> None:
        """Wait for the sums, and set each parameter's ``grad`` to its own."""
        assert self._pending is not None
        total = self._pending.wait()
        if total is not self.flat:
            self.flat.copy_(total)
        complete = self.is_full
        if self._is_cast or not complete:
            used = [1.0] * len(self.params) if complete else self.used_by_ranks()
            for param, view, flag in zip(self.params, self.views, used, strict=True):
                param.grad = view.to(gradient_dtype(param)) if flag else None
        self._present.clear()
        self._pending = None

    def used_by_ranks(self) -> list[float]:
        """Return for each parameter the number of ranks that used it, by the summed flags."""
        return self.flags.tolist()


class StageBuckets:
    """The buckets of the parameters of one pipeline stage, which are made when the axes of their gradients are known.

    Args:
        params: the stage's parameters, in the order of the model.
        context: the ranks.
        bucket_bytes: the size of a bucket; a larger parameter has one for itself.
        axes_of: returns the axes over which the gradient of a parameter is summed, once they are decided.
        sum_of: makes the sum of a bucket over its axes.
        on_gradient: called with each parameter when its gradient has been accumulated.
        closing: removes these hooks.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        context: ParallelContext,
        bucket_bytes: int,
        axes_of: Callable[[nn.Parameter], tuple[str, ...]],
        sum_of: SumFactory,
        on_gradient: Callable[[nn.Parameter], None],
        closing: ExitStack,
    ) -> None:
        self._params, self._context = list(params), context
        self._bucket_bytes, self._axes_of, self._sum_of = bucket_bytes, axes_of, sum_of
        self._on_gradient, self._closing = on_gradient, closing
        self._buckets: list[Bucket] | None = None
        #: id of a parameter -> index of its bucket
        self._bucket_of: dict[int, int] = {}
        #: trainable parameters whose axes are decided by their first use, not used so far
        self._undecided = [param for param in params if param.requires_grad and not spec_of(param).is_decided]
        #: index of the bucket that starts next
        self._next = 0

    @property
    def has_sums(self) -> bool:
        return bool(self._buckets)

    def prepare(self) -> None:
        """Make the buckets of parameters used for the first time; called before the stage's last backward of a step."""
        num_before = len(self._undecided)
        self._undecided = agree_on_axes(self._undecided, self._context)
        if self._buckets is None or len(self._undecided) < num_before:
            self._add_buckets()
        self._next = 0

    def take(self, param: nn.Parameter) -> None:
        """Copy a complete gradient into its bucket, and start the buckets that are full, in order."""
        index = self._bucket_of.get(id(param))
        if index is None:  # a parameter of another stage
            return
        assert self._buckets is not None
        if index < self._next:
            raise gradient_in_parts(param)
        self._buckets[index].take(param)
        while self._next < len(self._buckets) and self._buckets[self._next].is_full:
            self._start(self._next)
            self._next += 1

    def hold(self, param: nn.Parameter) -> None:
        """Move a gradient that is not complete into its bucket, if it has one by now."""
        index = self._bucket_of.get(id(param))
        if index is not None:
            assert self._buckets is not None
            self._buckets[index].hold(param)

    def start_rest(self) -> None:
        """Start the remaining buckets, full or not."""
        assert self._buckets is not None
        for index, bucket in enumerate(self._buckets[self._next :], self._next):
            # a parameter that the last microbatch did not use may have a gradient from earlier ones
            for param in bucket.params:
                if param.grad is not None and not bucket.holds(param):
                    bucket.take(param)
            self._start(index)

    def _start(self, index: int) -> None:
        """Start a bucket's sum, and the next stages of the buckets before it."""
        assert self._buckets is not None
        self._buckets[index].start()
        for bucket in reversed(self._buckets[:index]):
            bucket.advance(self._buckets[index].flat.numel())

    def finish(self) -> None:
        """Wait for the sums of all buckets."""
        for bucket in self._buckets or ():
            bucket.finish()

    def _add_buckets(self) -> None:
        """Make buckets for the parameters that have none and whose axes are known, in the order of backward."""
        undecided = {id(param) for param in self._undecided}
        params = [
            param
            for param in reversed(self._params)
            if param.requires_grad and id(param) not in undecided and id(param) not in self._bucket_of
        ]
        self._buckets = (self._buckets or []) + self._make_buckets(params)
        self._bucket_of = {id(param): index for index, bucket in enumerate(self._buckets) for param in bucket.params}

    def _make_buckets(self, params: list[nn.Parameter]) -> list[Bucket]:
        """Make the buckets of parameters, which are in the order of backward."""
        forms = [GradientForm(self._axes_of(param), gradient_dtype(param), param.numel()) for param in params]
        limit = shared_memory.flat_limit(params[0].device) if params else None
        buckets = []
        for indices in cut_into_buckets(forms, self._context.precision, self._bucket_bytes, limit):
            members, (axes, gradient, _) = [params[index] for index in indices], forms[indices[0]]
            dtype = self._context.precision.reduce_dtype(gradient)
            buckets.append(Bucket(members, self._sum_of(members, axes, dtype), dtype))
            for param in members:
                self._closing.callback(param.register_post_accumulate_grad_hook(self._on_gradient).remove)
        return buckets


def gradient_in_parts(param: nn.Parameter) -> ValueError:
    """Return the error of a gradient that grew after its sum over ranks had begun."""
    name = spec_of(param).name or f"a parameter of shape {tuple(param.shape)}"
    return ValueError(
        f"the gradient of {name} came in several parts, and its sum over ranks had begun after the first. A module "
        f"that runs several times under torch.utils.checkpoint with use_reentrant=True does that; set "
        f"use_reentrant=False, or use colossus.layers.recompute"
    )
