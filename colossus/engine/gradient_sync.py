"""Summing gradients over the axes their layouts name, overlapped with backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from colossus.comm import collectives
from colossus.comm.shared_memory import SLOT_BYTES
from colossus.context.parallel_context import ParallelContext
from colossus.engine.buckets import Bucket
from colossus.layers.layer import plan_of
from colossus.layout.parameter import spec_of


def gradient_sum_axes(parameter: nn.Parameter, context: ParallelContext) -> tuple[str, ...]:
    """Axes over which this rank's gradient of a parameter is a partial sum: the one answer to that question.

    Recorded by the layers at each use; a plain parameter is in the user layout, where the batch alone is split.
    """
    spec = spec_of(parameter)
    recorded = spec.gradient_axes if spec is not None else None
    axes = recorded if recorded is not None else plan_of(context).regions.user.shard_axes
    live = {axis for axis in axes if context.grid.sizes[axis] > 1}
    return tuple(axis for axis in context.grid.names if axis in live)


def agree_on_axes(parameters: list[nn.Parameter], context: ParallelContext) -> list[nn.Parameter]:
    """Let every rank know what the others recorded of parameters that are decided by their first use.

    A layer may be used on some ranks only, or not before a later step. All ranks must call with the same parameters.

    Returns:
        Those that no rank has used yet.
    """
    if not parameters:
        return []
    names = context.grid.names
    masks = []
    for parameter in parameters:
        spec = spec_of(parameter)
        assert spec is not None
        axes = spec.gradient_axes
        masks.append(0 if axes is None else 1 + sum(2 << names.index(axis) for axis in axes))
    found = torch.tensor(masks, dtype=torch.int64, device=context.device)
    found = collectives.all_reduce(found, context.group(names), op="max", owned=True).wait()
    unused = []
    for parameter, mask in zip(parameters, found.tolist(), strict=True):
        spec = spec_of(parameter)
        assert spec is not None
        if mask:
            spec.record(tuple(axis for index, axis in enumerate(names) if mask & (2 << index)))
        else:
            unused.append(parameter)
    return unused


class AllReduce:
    """The exact data-parallel strategy: one all-reduce per bucket of gradients, in the order backward fills them.

    Buckets start in the same order on all ranks, whatever order their gradients appear in (as torch's DDP does,
    2006.15704), and only for the last microbatch of a step.
    """

    exact = True

    def __init__(self, model: nn.Module, context: ParallelContext, bucket_mb: float) -> None:
        self.model = model
        self.context = context
        self.bucket_bytes = int(bucket_mb * 2**20)
        self.buckets: list[Bucket] | None = None
        self._of: dict[int, int] = {}
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        #: trainable parameters whose axes their first use decides, not used so far
        self._unused = [param for param in model.parameters() if param.requires_grad and _is_open(param)]
        self._next = 0
        self._armed = False

    def arm(self) -> None:
        """The next backward is the last of the step: reduce what it finishes."""
        if any(param.requires_grad for param in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the engine was made is trainable now: its gradient would not be "
                "summed over the ranks, and the optimizer does not have it. Unfreeze it while the model is built, or "
                "make a new engine"
            )
        waiting = len(self._unused)
        self._unused = agree_on_axes(self._unused, self.context)
        if self.buckets is None or len(self._unused) < waiting:
            self._add_buckets()
        self._next = 0
        self._armed = True

    def finish(self) -> None:
        """Wait until every gradient is summed."""
        assert self.buckets is not None
        self._armed = False
        for bucket in self.buckets[self._next :]:
            # gradients of earlier microbatches may be there although the last one did not use the parameter
            for param in bucket.params:
                if param.grad is not None and not bucket.holds(param):
                    bucket.take(param)
            bucket.start()
        for bucket in self.buckets:
            bucket.finish()

    def _on_gradient(self, param: nn.Parameter) -> None:
        if not self._armed:
            return
        assert self.buckets is not None
        self.buckets[self._of[id(param)]].take(param)
        while self._next < len(self.buckets) and self.buckets[self._next].is_full:
            self.buckets[self._next].start()
            self._next += 1

    def disarm(self) -> None:
        """Forget a backward that did not come to its end."""
        self._armed = False
        for bucket in self.buckets or []:
            bucket.forget()

    def _add_buckets(self) -> None:
        """Buckets for all parameters whose axes are known and that are in none yet, in the order of backward."""
        waiting = {id(param) for param in self._unused}
        params = [
            param
            for param in reversed(list(self.model.parameters()))
            if param.requires_grad and id(param) not in waiting and id(param) not in self._of
        ]
        self.buckets = (self.buckets or []) + self._make_buckets(params)
        self._of = {id(param): index for index, bucket in enumerate(self.buckets) for param in bucket.params}

    def _make_buckets(self, params: list[nn.Parameter]) -> list[Bucket]:
        buckets = []
        for group, axes in self._groups(params):
            limit = self.bucket_bytes
            if group[0].device.type == "cpu":  # with room for the flags of a bucket, so that it fits a slot
                limit = min(limit, SLOT_BYTES - 4096 * group[0].element_size())
            for chunk in _chunks(group, limit):
                buckets.append(Bucket(chunk, self.context.group(axes)))
                for param in chunk:
                    param.register_post_accumulate_grad_hook(self._on_gradient)
                    spec = spec_of(param)
                    if spec is not None:
                        spec.on_gradient = self._on_gradient
        # in the order in which backward reaches the end of each
        order = {id(param): index for index, param in enumerate(params)}
        buckets.sort(key=lambda bucket: max(order[id(param)] for param in bucket.params))
        return buckets

    def _groups(self, params: list[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], tuple[str, ...]]]:
        """Parameters by axes and dtype; those without axes need nothing."""
        groups: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        for param in params:
            axes = gradient_sum_axes(param, self.context)
            if axes:
                groups.setdefault((axes, param.dtype), []).append(param)
        for (axes, _), held in groups.items():
            yield held, axes


def _is_open(param: nn.Parameter) -> bool:
    spec = spec_of(param)
    return spec is not None and not spec.is_decided


def _chunks(params: list[nn.Parameter], limit: int) -> Iterator[list[nn.Parameter]]:
    chunk: list[nn.Parameter] = []
    size = 0
    for param in params:
        if chunk and size + param.nbytes > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append(param)
        size += param.nbytes
    if chunk:
        yield chunk
