"""Hooks and mode of a module that another takes the place of."""

from __future__ import annotations

from typing import Any

from torch import nn

#: the dicts of a module whose values are its hooks, or say more of them by the same keys
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]


def take_mode_and_hooks(made: nn.Module, module: nn.Module) -> None:
    """Let ``made`` train or evaluate as ``module`` does, with the same hooks."""
    made.training = module.training
    for hooks, others in zip(hooks_of(made), hooks_of(module), strict=True):
        hooks.update(others)
