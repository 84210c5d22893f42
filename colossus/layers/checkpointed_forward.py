"""A module whose activations are computed again in backward, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.layers.activation_checkpoint import KINDS, checkpoint
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import model_parallel_of

#: bytes of a buffer whose copy is always kept
_SMALL = 1 << 16


def checkpoint_module(module: nn.Module, kind: str, context: ParallelContext, *, offload: bool = False) -> None:
    """Let a module compute its activations again in backward: its ``forward``, not its hooks, which run once.

    In training only: not in evaluation, nor where no gradients are wanted. Buffers that the forward changes (running
    statistics) are changed once.

    Args:
        kind, offload: as of `colossus.layers.checkpoint`.

    Raises:
        ValueError: for another kind, for a module that is checkpointed already, and for one that has no forward.
    """
    if kind not in KINDS:
        raise located_error(f"activation checkpointing {kind!r}: use 'none', 'full' or 'selective'")
    if is_checkpointed(module):
        raise located_error(f"{type(module).__name__}: its activations are checkpointed already; once is enough")
    if not has_forward(module):
        raise located_error(
            f"{type(module).__name__} has no forward, so that it is never called, only what it holds: checkpoint the "
            f"modules in it"
        )
    module.__dict__["forward"] = CheckpointedForward(module, kind, context, offload)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called: a ModuleList, a ModuleDict or a bare nn.Module only holds others."""
    return "forward" in module.__dict__ or type(module).forward is not nn.Module.forward


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
        self._modules = list(modules)
        #: of each module; None as the value of a buffer that has none yet
        self._before: list[dict[str, Tensor | None]] = [_copies(module._buffers) for module in self._modules]
        self._versions = [
            {leaf: (held, held._version) for leaf, held in module._buffers.items() if held is not None}
            for module in self._modules
        ]

    def forget_unchanged(self) -> None:
        """After the forward: no copies of large ones (masks, tables) that it has not changed.

        Of small ones they stay: batch normalisation does not count what it writes as a change.
        """
        for module, before, versions in zip(self._modules, self._before, self._versions, strict=True):
            for leaf, (held, version) in versions.items():
                if module._buffers.get(leaf) is held and version == held._version and held.nbytes > _SMALL:
                    before[leaf] = held
        self._versions.clear()

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around a recomputation: it sees them as they were, and leaves no trace."""
        now = [dict(module._buffers) for module in self._modules]
        for module, before in zip(self._modules, self._before, strict=True):
            _replace(module._buffers, _copies(before))
        try:
            yield
        finally:
            for module, held in zip(self._modules, now, strict=True):
                _replace(module._buffers, held)


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {leaf: None if held is None else held.detach().clone() for leaf, held in buffers.items()}


def _replace(buffers: dict[str, Tensor | None], others: Mapping[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(others)
