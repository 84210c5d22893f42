"""A module whose activations are computed again in backward, whoever calls it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from colossus.context.parallel_context import ParallelContext
from colossus.error_place import located_error
from colossus.layers.checkpointing import check_kind, recompute

#: bytes up to which the copy of a buffer is kept even if it seems unchanged: batch normalisation does not count what it
#: writes as a change
_SMALL = 1 << 16


def checkpoint_module(module: nn.Module, kind: str, context: ParallelContext) -> None:
    """Let a module compute its activations again in backward: its ``forward``, not its hooks, which run once.

    In training only: not in evaluation, nor where no gradients are wanted. Buffers that the forward changes (running
    statistics) are changed once.

    Args:
        kind: as of `colossus.layers.recompute`.

    Raises:
        ValueError: for what `colossus.layers.recompute` does not know, for a module that is checkpointed already, and
            for one that has no forward.
    """
    check_kind(kind)
    if is_checkpointed(module):
        raise located_error(f"{type(module).__name__}: its activations are checkpointed already; once is enough")
    if not has_forward(module):
        raise located_error(
            f"{type(module).__name__} has no forward, so that it is never called, only what it holds: checkpoint the "
            f"modules in it"
        )
    module.__dict__["forward"] = CheckpointedForward(module, kind, context)


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

    def __init__(self, module: nn.Module, kind: str, context: ParallelContext) -> None:
        self._module, self._kind, self._context = module, kind, context
        #: a ``forward`` that somebody has given to this module alone
        self._replaced = module.__dict__.get("forward")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self._module
        if not module.training or not torch.is_grad_enabled():
            return self._forward(args, kwargs)
        foreign = [inner for inner in module.modules() if not _is_ours(inner)]
        buffers = _Buffers(foreign)

        def forward(args: Any, kwargs: Any) -> Any:
            with buffers.around_a_pass():
                return self._forward(args, kwargs)

        return recompute(
            forward,
            args,
            kwargs,
            context=self._context,
            kind=self._kind,
            preserve_rng_state=bool(foreign),
            title=getattr(module, "title", type(module).__name__),
        )

    def _forward(self, args: Any, kwargs: Any) -> Any:
        if self._replaced is not None:
            return self._replaced(*args, **kwargs)
        return type(self._module).forward(self._module, *args, **kwargs)


def _is_ours(module: nn.Module) -> bool:
    """Whether a module draws from the streams of the context only, if at all, and changes no buffer."""
    replaced = module.__dict__.get("forward")
    mine = type(module).__module__.startswith("colossus.")
    return mine and (replaced is None or isinstance(replaced, CheckpointedForward))


class _Buffers:
    """Buffers in which modules may keep running statistics. The first pass changes them; recomputations see them as
    they were before it, and leave no trace."""

    def __init__(self, modules: list[nn.Module]) -> None:
        self._modules = modules
        #: of each module, before the first pass; the value of a buffer that has none yet is None
        self._before: list[dict[str, Tensor | None]] = []

    @contextmanager
    def around_a_pass(self) -> Iterator[None]:
        held = [dict(module._buffers) for module in self._modules]
        if len(self._before) < len(held):
            self._before = [_copies(buffers) for buffers in held]
            tensors = [(x, x._version) for buffers in held for x in buffers.values() if x is not None]
            yield
            unchanged = {id(x) for x, version in tensors if x._version == version and x.nbytes > _SMALL}
            for buffers, before in zip(held, self._before, strict=True):
                before.update({name: x for name, x in buffers.items() if id(x) in unchanged})
            return
        for module, before in zip(self._modules, self._before, strict=True):
            _replace(module._buffers, _copies(before))
        try:
            yield
        finally:
            for module, buffers in zip(self._modules, held, strict=True):
                _replace(module._buffers, buffers)


def _copies(buffers: Mapping[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name: None if x is None else x.detach().clone() for name, x in buffers.items()}


def _replace(buffers: dict[str, Tensor | None], others: Mapping[str, Tensor | None]) -> None:
    buffers.clear()
    buffers.update(others)
