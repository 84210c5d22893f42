"""A module whose activations are computed again in backward, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.layers.activation_checkpoint import KINDS, checkpoint
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of
from colossus.refusal import refusal

#: (module, name) of a buffer
Place = tuple[nn.Module, str]
#: bytes of a buffer whose copy is always kept
_SMALL = 1 << 16


def checkpoint_module(module: nn.Module, kind: str, context: ParallelContext, *, offload: bool = False) -> None:
    """Let a module compute its activations again in backward: its ``forward``, not its hooks, which run once.

    In training only: not in evaluation, nor where no gradients are wanted. Buffers that the forward changes (running
    statistics) are changed once.

    Args:
        kind, offload: as of `colossus.layers.checkpoint`.

    Raises:
        ValueError: for another kind, and for a module that is checkpointed already.
    """
    if kind not in KINDS:
        raise refusal(f"activation checkpointing {kind!r}: use 'none', 'full' or 'selective'")
    if is_checkpointed(module):
        raise refusal(f"{type(module).__name__}: its activations are checkpointed already; once is enough")
    module.__dict__["forward"] = CheckpointedForward(module, kind, context, offload)


def is_checkpointed(module: nn.Module) -> bool:
    """Whether `checkpoint_module` was called for it."""
    return isinstance(module.__dict__.get("forward"), CheckpointedForward)


class CheckpointedForward:
    """What stands in the place of ``module.forward``.

    An object rather than a function, so that a copy of the module has one of its own.
    """

    def __init__(self, module: nn.Module, kind: str, context: ParallelContext, offload: bool) -> None:
        self._module, self._kind, self._offload = module, kind, offload
        #: a ``forward`` that somebody has given to this module alone
        self._replaced = module.__dict__.get("forward")
        self._parallel = model_parallel_of(context)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.training or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        foreign = [inner for inner in self._module.modules() if not _is_ours(inner)]
        buffers = _Buffers(foreign)
        is_first = True

        def forward(args: Any, kwargs: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return self._forward(*args, **kwargs)
            with buffers.again():
                return self._forward(*args, **kwargs)

        out = checkpoint(
            forward,
            args,
            kwargs,
            context=self._parallel.context,
            kind=self._kind,
            preserve_rng_state=bool(foreign),
            offload=self._offload,
            title=_title(self._module),
        )
        buffers.forget_unchanged()
        return out

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _is_ours(module: nn.Module) -> bool:
    """Whether a module draws from the streams of the context only, if at all."""
    replaced = module.__dict__.get("forward")
    mine = type(module).__module__.startswith("colossus.")
    return mine and (replaced is None or isinstance(replaced, CheckpointedForward))


def _title(module: nn.Module) -> str:
    return module.title if isinstance(module, Layer) else type(module).__name__


class _Buffers:
    """Buffers in which modules may keep running statistics, and their values before a forward."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = [(module, leaf) for module in modules for leaf in module._buffers]
        held = self._held()
        self._before = {place: buffer.detach().clone() for place, buffer in held.items()}
        self._versions = {place: (buffer, buffer._version) for place, buffer in held.items()}

    def _held(self) -> dict[Place, Tensor]:
        found = {place: place[0]._buffers.get(place[1]) for place in self._places}
        return {place: held for place, held in found.items() if held is not None}

    def forget_unchanged(self) -> None:
        """After the forward: no copies of large ones (masks, tables) that it has not changed.

        Of small ones they stay: batch normalisation does not count what it writes as a change.
        """
        for place, buffer in self._held().items():
            earlier, version = self._versions.get(place, (None, 0))
            if earlier is buffer and version == buffer._version and buffer.nbytes > _SMALL:
                del self._before[place]
        self._versions.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation: it sees them as they were, and leaves no trace."""
        now = self._held()
        for (module, leaf), held in now.items():
            module._buffers[leaf] = self._before.get((module, leaf), held).detach().clone()
        try:
            yield
        finally:
            for (module, leaf), held in now.items():
                module._buffers[leaf] = held
