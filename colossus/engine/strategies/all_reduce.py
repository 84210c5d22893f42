"""Summing gradients over the axes their layouts name, overlapped with backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from colossus.comm import collectives
from colossus.comm.shared_memory import SLOT_BYTES
from colossus.context.parallel_context import ParallelContext
from colossus.engine.gradients.buckets import Bucket
from colossus.layers.model_parallel import model_parallel_of
from colossus.layout.parameter import spec_of


def gradient_sum_axes(parameter: nn.Parameter, context: ParallelContext) -> tuple[str, ...]:
    """Axes over which this rank's gradient of a parameter is a partial sum: the one answer to that question.

    Recorded by the layers at each use; a plain parameter is in the user layout, where the batch alone is split.
    """
    spec = spec_of(parameter)
    recorded = spec.gradient_axes if spec is not None else None
    axes = recorded if recorded is not None else model_parallel_of(context).regions.user.shard_axes
    live = {axis for axis in axes if context.grid.sizes[axis] > 1}
    return tuple(axis for axis in context.grid.names if axis in live)


def agree_on_axes(parameters: list[nn.Parameter], context: ParallelContext) -> list[nn.Parameter]:
    """Let every rank know what the others recorded of parameters that are decided by their first use.

    A layer may be used on some ranks only, or not before a later step. All ranks of the same stages must call, with the
    same parameters.

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
    peers = context.group(tuple(name for name in names if name != "pipeline"))
    found = collectives.all_reduce(found, peers, op="max", owned=True).wait()
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
    2006.15704), and only once the last backward of their parameters has begun.

    Args:
        parts: parameters whose last backward is the same (those of a stage), in the order in which they are reduced;
            None: all together.
    """

    exact = True

    def __init__(
        self,
        model: nn.Module,
        context: ParallelContext,
        bucket_mb: float,
        parts: Sequence[Sequence[nn.Parameter]] | None = None,
    ) -> None:
        self._frozen = [param for param in model.parameters() if not param.requires_grad]
        limit = int(bucket_mb * 2**20)
        held = [list(model.parameters())] if parts is None else parts
        self.parts = [_Part(part, context, limit, self._on_gradient) for part in held]
        self._armed: int | None = None
        #: parts whose buckets have all been started in this step
        self._started = 0

    def arm(self, part: int = 0) -> None:
        """The backward that follows is the last of the step for the parameters of a part: reduce what it finishes."""
        if any(param.requires_grad for param in self._frozen):
            raise ValueError(
                "a parameter that was frozen when the engine was made is trainable now: its gradient would not be "
                "summed over the ranks, and the optimizer does not have it. Unfreeze it while the model is built, or "
                "make a new engine"
            )
        self.parts[part].prepare()
        self._armed = part

    def start(self, part: int = 0) -> None:
        """Start the reductions of a part that have not been started, without waiting for any."""
        assert part == self._started, "parts are reduced in their order"
        self.parts[part].start_rest()
        self._armed = None
        self._started += 1

    def finish(self) -> None:
        """Wait until every gradient is summed."""
        for part in self.parts:
            part.finish()
        self._started = 0

    def abandon(self) -> None:
        """Forget a step that did not come to its end."""
        self._armed, self._started = None, 0
        for part in self.parts:
            part.forget()

    def _on_gradient(self, param: nn.Parameter) -> None:
        # a part before this one that is not through has its turn first, on all ranks
        if self._armed is not None and self._armed == self._started:
            self.parts[self._armed].take(param)


class _Part:
    """The buckets of some parameters."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        context: ParallelContext,
        bucket_bytes: int,
        on_gradient: Callable[[nn.Parameter], None],
    ) -> None:
        self._params, self._context, self._bytes, self._on_gradient = list(params), context, bucket_bytes, on_gradient
        self._buckets: list[Bucket] | None = None
        self._of: dict[int, int] = {}
        #: trainable parameters whose axes their first use decides, not used so far
        self._unused = [param for param in params if param.requires_grad and _is_open(param)]
        self._next = 0

    def prepare(self) -> None:
        """Before the last backward of a step."""
        waiting = len(self._unused)
        self._unused = agree_on_axes(self._unused, self._context)
        if self._buckets is None or len(self._unused) < waiting:
            self._add_buckets()
        self._next = 0

    def take(self, param: nn.Parameter) -> None:
        """A gradient is complete: start all buckets that are full and whose turn it is."""
        index = self._of.get(id(param))
        if index is None:  # of another part
            return
        assert self._buckets is not None
        if index < self._next:
            raise ValueError(
                f"the gradient of {_name(param)} came in several parts, and the sum over ranks had begun after the "
                f"first: a module that is used several times under torch.utils.checkpoint with use_reentrant=True does "
                f"that; use_reentrant=False, or colossus.layers.checkpoint, does not"
            )
        self._buckets[index].take(param)
        while self._next < len(self._buckets) and self._buckets[self._next].is_full:
            self._buckets[self._next].start()
            self._next += 1

    def start_rest(self) -> None:
        assert self._buckets is not None
        for bucket in self._buckets[self._next :]:
            # gradients of earlier microbatches may be there although the last one did not use the parameter
            for param in bucket.params:
                if param.grad is not None and not bucket.holds(param):
                    bucket.take(param)
            bucket.start()

    def finish(self) -> None:
        for bucket in self._buckets or ():
            bucket.finish()

    def forget(self) -> None:
        for bucket in self._buckets or ():
            bucket.forget()

    def _add_buckets(self) -> None:
        """Buckets for all parameters whose axes are known and that are in none yet, in the order of backward."""
        waiting = {id(param) for param in self._unused}
        params = [
            param
            for param in reversed(self._params)
            if param.requires_grad and id(param) not in waiting and id(param) not in self._of
        ]
        self._buckets = (self._buckets or []) + self._make_buckets(params)
        self._of = {id(param): index for index, bucket in enumerate(self._buckets) for param in bucket.params}

    def _make_buckets(self, params: list[nn.Parameter]) -> list[Bucket]:
        buckets = []
        for group, axes in self._groups(params):
            limit = self._bytes
            if group[0].device.type == "cpu":  # with room for the flags of a bucket, so that it fits a slot
                limit = min(limit, SLOT_BYTES - 4096 * group[0].element_size())
            for chunk in _chunks(group, limit):
                buckets.append(Bucket(chunk, self._context.group(axes)))
                for param in chunk:
                    param.register_post_accumulate_grad_hook(self._on_gradient)
        # in the order in which backward reaches the end of each
        order = {id(param): index for index, param in enumerate(params)}
        buckets.sort(key=lambda bucket: max(order[id(param)] for param in bucket.params))
        return buckets

    def _groups(self, params: list[nn.Parameter]) -> Iterator[tuple[list[nn.Parameter], tuple[str, ...]]]:
        """Parameters by axes and dtype; those without axes need nothing."""
        groups: dict[tuple[tuple[str, ...], torch.dtype], list[nn.Parameter]] = {}
        for param in params:
            axes = gradient_sum_axes(param, self._context)
            if axes:
                groups.setdefault((axes, param.dtype), []).append(param)
        for (axes, _), held in groups.items():
            yield held, axes


def _name(param: nn.Parameter) -> str:
    spec = spec_of(param)
    return spec.name if spec is not None and spec.name else f"a parameter of shape {tuple(param.shape)}"


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
