"""Hooks and mode of a module, for the module that replaces it."""

from __future__ import annotations

from typing import Any

from torch import nn

#: the dicts of a module with its hooks, or with options of hooks under the same keys
_HOOKS = tuple(name for name in vars(nn.Module()) if "_hooks" in name)


def hooks_of(module: nn.Module) -> list[dict[int, Any]]:
    return [getattr(module, name) for name in _HOOKS]


def take_mode_and_hooks(new: nn.Module, module: nn.Module) -> None:
    """Give a new module the training mode and the hooks of the module that it replaces."""
    new.training = module.training
    for hooks, others in zip(hooks_of(new), hooks_of(module), strict=True):
        hooks.update(others)
