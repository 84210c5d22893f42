"""Buffers that a forward changes from its samples, kept the same on all ranks that split these.

A user's running means, averages of activations, codebooks or queues depend on a rank's own samples, and would drift
apart. `colossus.layers.BatchNorm2d` and similar layers update theirs from all samples, and are left alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.flat_buffer import split_as
from colossus.comm.objects import all_gather_object
from colossus.context.precision import LOW
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import ModelParallel

log = logging.getLogger("colossus.engine")


@dataclass(eq=False)
class _Buffer:
    """A buffer by its module and name, since a forward may replace the tensor.

    Attributes:
        module: module that has the buffer.
        name: name of the buffer in it.
        path: full name.
        original: the tensor at the beginning of the step.
        recorded: the tensor at the last `record`, and its count of writes.
        value: a copy of it, if values are compared: torch does not count writes to ``buffer.data``.
        is_written: whether its value has changed although torch counted no write.
    """

    module: nn.Module
    name: str
    path: str
    original: Tensor | None = None
    recorded: tuple[Tensor | None, int] = (None, 0)
    value: Tensor | None = None
    is_written: bool = False

    @property
    def tensor(self) -> Tensor | None:
        return self.module._buffers[self.name]

    def record(self, *, keep_value: bool = False) -> None:
        x = self.tensor
        self.recorded = x, 0 if x is None or x.is_inference() else x._version
        self.value = x.clone() if keep_value and x is not None else None

    def has_changed(self) -> bool:
        x, (before, version) = self.tensor, self.recorded
        if x is None:
            return False
        if x is not before or (not x.is_inference() and x._version != version) or self.is_written:
            return True
        self.is_written = self.value is not None and not torch.equal(x, self.value)
        return self.is_written

    def put(self, new: Tensor) -> None:
        """Replace the tensor: the backward of an earlier microbatch may have saved the current one."""
        self.module._buffers[self.name] = new
        self.record(keep_value=self.value is not None)

    def restore_original(self) -> None:
        """Write the value into the tensor that was there at the beginning of the step, which others may reference."""
        x, original = self.tensor, self.original
        if x is None or original is None or x is original or original.is_inference() or x.shape != original.shape:
            return
        original.copy_(x)
        self.module._buffers[self.name] = original
        self.record()


class ForwardBuffers:
    """The buffers of this rank's stages that forwards may change.

    Changes are detected by torch's count of writes and by identity, in the first step by value, too; later a first
    write to ``buffer.data`` is not seen. Ranks that split samples run the same program, and so write to the same
    buffers; which values change depends on the samples.

    Args:
        model: the rank's part of the model.
        parallel: the axes of the model.
        how: ``train.buffers``.
    """

    def __init__(self, model: nn.Module, parallel: ModelParallel, how: Literal["average", "first"]) -> None:
        self._group = parallel.context.group((*parallel.sample_axes, *parallel.regions.whole.tokens))
        self._how, coordinates = how, parallel.context.coordinates
        self._logs = all(index == 0 for axis, index in coordinates.items() if axis != "pipeline")
        self._compared: set[str] = set()
        self._buffers = [*_buffers_of_users(model)] if self._group.size > 1 else []
        self._is_first_step = True

    def begin(self) -> None:
        """Begin a step or an evaluation: writes since the last one are not those of a forward."""
        for buffer in self._buffers:
            buffer.original = buffer.tensor
            buffer.record(keep_value=self._is_first_step)

    def sync(self) -> None:
        """Combine the changes of forwards since the last call. Collective if there are some, and in the first step."""
        if self._is_first_step:
            self._sync_changed_anywhere()
        else:
            self._sync([buffer for buffer in self._buffers if buffer.has_changed()])

    def end_step(self) -> None:
        """Combine the changes of the last forward, or of one that was recomputed."""
        self.sync()
        self._is_first_step = False
        self._settle()

    def end_evaluation(self) -> None:
        """Combine the changes of an evaluation, of which some ranks may have had no sample. Collective."""
        self._sync_changed_anywhere()
        self._settle()

    def _sync_changed_anywhere(self) -> None:
        if self._buffers:
            own = {buffer.path for buffer in self._buffers if buffer.has_changed()}
            paths = set[str]().union(*all_gather_object(own, self._group))
            self._sync([buffer for buffer in self._buffers if buffer.path in paths])

    @torch.no_grad()
    def _settle(self) -> None:
        for buffer in self._buffers:
            buffer.value = None
            buffer.restore_original()
            buffer.original = None

    @torch.no_grad()
    def _sync(self, changed: list[_Buffer]) -> None:
        by_dtype: dict[torch.dtype, list[tuple[_Buffer, Tensor]]] = {}
        for buffer in changed:
            if (x := buffer.tensor) is not None:
                by_dtype.setdefault(x.dtype, []).append((buffer, x))
        differing: list[str] = []
        new: dict[int, Tensor] = {}  # by id of the old tensor, so that a buffer of two modules stays one
        for pairs in by_dtype.values():
            common = self._common(torch.cat([x.reshape(-1) for _, x in pairs]))
            for (buffer, x), part in zip(pairs, split_as(common, [x for _, x in pairs]), strict=True):
                if buffer.path not in self._compared:  # only once, since comparing waits for the device
                    self._compared.add(buffer.path)
                    differing += [] if torch.equal(x, part) else [buffer.path]
                buffer.put(new.setdefault(id(x), part.clone()))
        if differing and self._logs:
            what = "averaged over them" if self._how == "average" else "taken from the first of them"
            log.warning(
                "a forward changes buffers from the samples of a rank (%s): before each forward, and after each step, "
                "they are %s (train.buffers = %r). They equal those of one process if they are linear in the samples, "
                "as a running mean is, and train.samples_interact is set if there are microbatches; else compute them "
                "from colossus.layers.gather_samples or mean_over_samples",
                ", ".join(differing), what, self._how,
            )  # fmt: skip

    def _common(self, flat: Tensor) -> Tensor:
        if self._how == "first" or not flat.is_floating_point():
            return collectives.broadcast(flat, self._group, 0)
        wide = flat.float() if flat.dtype in LOW else flat
        return (collectives.all_reduce(wide, self._group, owned=True, what="buffers").wait() / self._group.size).to(
            flat.dtype
        )


def _buffers_of_users(model: nn.Module) -> Iterator[_Buffer]:
    for path, module in model.named_modules():
        if not isinstance(module, Layer):
            for name in module._buffers:
                yield _Buffer(module, name, f"{path}.{name}" if path else name)
