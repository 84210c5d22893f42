"""A module whose activations are computed again in backward, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.layers.activation_checkpoint import KINDS, checkpoint
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of
from colossus.refusal import refusal


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
        self._buffers: _Buffers | None = None
        self._draws_anything = False

    def __getstate__(self) -> dict[str, Any]:
        """Without what the first forward finds out, which a copy does again."""
        return {**vars(self), "_buffers": None}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._module.training or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        if self._buffers is None:
            self._buffers = _Buffers(self._module)
            self._draws_anything = any(not _is_ours(inner) for inner in self._module.modules())
        buffers = self._buffers.before()
        is_first = True

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return self._forward(*args, **kwargs)
            with buffers.again():
                return self._forward(*args, **kwargs)

        out = checkpoint(
            forward,
            *args,
            context=self._parallel.context,
            kind=self._kind,
            preserve_rng_state=self._draws_anything,
            offload=self._offload,
            title=_title(self._module),
            **kwargs,
        )
        buffers.keep_changed()
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
    """The buffers of a module and of those in it."""

    def __init__(self, module: nn.Module) -> None:
        self.places = [
            (owner, leaf) for owner in module.modules() for leaf, held in owner._buffers.items() if held is not None
        ]
        #: those that a forward has changed in place; before the first one any might be
        self.changing = set(self.places)
        self.is_known = False

    def before(self) -> _BufferValues:
        """Their values before a forward, as far as that may change them."""
        return _BufferValues(self)


class _BufferValues:
    """What buffers were before a forward: its recomputation sees that, and leaves no trace."""

    def __init__(self, buffers: _Buffers) -> None:
        self._buffers = buffers
        self._before: dict[tuple[nn.Module, str], Tensor] = {}
        self._versions: dict[tuple[nn.Module, str], tuple[Tensor, int]] = {}
        for owner, leaf in buffers.places:
            held = owner._buffers[leaf]
            if held is not None:
                self._versions[owner, leaf] = held, held._version
                self._before[owner, leaf] = held.detach().clone() if (owner, leaf) in buffers.changing else held

    def keep_changed(self) -> None:
        """After the forward: forget those that it has not changed."""
        written = set()
        for (owner, leaf), (held, version) in self._versions.items():
            if held._version != version:
                written.add((owner, leaf))
            elif owner._buffers[leaf] is held:
                del self._before[owner, leaf]
        self._versions.clear()
        buffers = self._buffers
        buffers.changing = buffers.changing | written if buffers.is_known else written
        buffers.is_known = True

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around the recomputation."""
        now = {place: place[0]._buffers[place[1]] for place in self._before}
        for (owner, leaf), before in self._before.items():
            owner._buffers[leaf] = before.clone()
        try:
            yield
        finally:
            for (owner, leaf), held in now.items():
                owner._buffers[leaf] = held
