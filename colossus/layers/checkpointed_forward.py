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

#: (module, name) of a buffer
Place = tuple[nn.Module, str]
#: bytes of a buffer that is copied rather than looked at
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
        buffers, before = self._buffers, self._buffers.values()
        is_first = True

        def forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_first
            if is_first:
                is_first = False
                return self._forward(*args, **kwargs)
            with buffers.again(before):
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
        buffers.forget_unchanged(before)
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
    """Buffers in which a module or one in it may keep running statistics; ours keep none."""

    def __init__(self, module: nn.Module) -> None:
        owners = [owner for owner in module.modules() if not _is_ours(owner)]
        self._places = [(owner, leaf) for owner in owners for leaf, held in owner._buffers.items() if held is not None]
        #: larger ones that a forward has changed; None before the first one, after which their values are compared,
        #: since batch normalisation does not count what it writes as a change
        self._changing: set[Place] | None = None

    def held(self) -> dict[Place, Tensor]:
        found = {place: place[0]._buffers[place[1]] for place in self._places}
        return {place: held for place, held in found.items() if held is not None}

    def values(self) -> dict[Place, Tensor]:
        """Copies of the small ones, and of those that change."""
        return {place: held.detach().clone() for place, held in self.held().items() if self._is_copied(place, held)}

    def _is_copied(self, place: Place, held: Tensor) -> bool:
        return held.nbytes <= _SMALL or self._changing is None or place in self._changing

    def forget_unchanged(self, before: dict[Place, Tensor]) -> None:
        """After a forward: no copies of large ones that it has not changed."""
        held = self.held()
        if self._changing is None:
            large = [place for place, value in before.items() if value.nbytes > _SMALL]
            self._changing = {place for place in large if place in held and not torch.equal(before[place], held[place])}
        for place in [place for place in before if place in held and not self._is_copied(place, held[place])]:
            del before[place]

    @contextmanager
    def again(self, before: dict[Place, Tensor]) -> Iterator[None]:
        """Around a recomputation: it sees them as they were, and leaves no trace."""
        now = self.held()
        for (owner, leaf), held in now.items():
            owner._buffers[leaf] = before.get((owner, leaf), held).detach().clone()
        try:
            yield
        finally:
            for (owner, leaf), held in now.items():
                owner._buffers[leaf] = held
