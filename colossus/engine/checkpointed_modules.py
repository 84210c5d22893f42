"""Which modules of a model compute their activations again in backward, as ``train.activation_checkpoint`` says."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from colossus.config import ConfigError
from colossus.config.training import ActivationCheckpoint
from colossus.context.parallel_context import current_context
from colossus.data_parallel.zero.blocks import modules_of_blocks
from colossus.layers.block import TransformerBlock
from colossus.layers.checkpointed_forward import checkpoint_module, has_forward, is_checkpointed
from colossus.layers.pipeline_block import is_chain, pipeline_blocks

_KEY = "train.activation_checkpoint"
#: names that an error offers
_MOST = 3


def with_activation_checkpoint(
    factory: Callable[[], nn.Module], wanted: ActivationCheckpoint
) -> Callable[[], nn.Module]:
    """A factory of the same model, whose chosen modules are checkpointed.

    Raises, when it is called:
        ConfigError: where there is nothing to checkpoint, or the model does it already.
    """
    if wanted.type == "none":
        return factory

    def make() -> nn.Module:
        model = factory()
        if isinstance(model, nn.Module):  # else the build refuses it
            for name in chosen_modules(model, wanted):
                checkpoint_module(model.get_submodule(name), wanted.type, current_context(), offload=wanted.offload)
        return model

    return make


def chosen_modules(model: nn.Module, wanted: ActivationCheckpoint) -> list[str]:
    """Names of the modules to checkpoint, in the model's order: of the whole model, before a pipeline cuts it.

    With ``modules`` those whose names match, of nested ones the outermost; else the blocks: TransformerBlocks, where
    there are none those of `colossus.data_parallel.zero.blocks.modules_of_blocks` that have parameters. Of these
    the first, and every k-th after it.

    Raises:
        ConfigError: see `with_activation_checkpoint`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if is_checkpointed(module):
            where = f"{names[id(module)] or 'the model'} ({type(module).__name__})"
            raise ConfigError(
                f"{_KEY} = {wanted.type!r}, but {where} is told to checkpoint itself (activation_checkpoint= of the "
                f"model or of its blocks): keep one of the two"
            )
    if wanted.modules is not None:
        found = _matching(dict(model.named_modules()), wanted.modules)
    else:
        found = [names[id(module)] for module in _blocks(model)]
    if not found:
        raise ConfigError(
            f"{_KEY} = {wanted.type!r}, but {type(model).__name__} has no blocks (no TransformerBlock, no chain, no "
            f"ModuleList or Sequential): say which modules, {_KEY} = dict(type={wanted.type!r}, modules=[..])"
        )
    return found[:: wanted.every]


def _blocks(model: nn.Module) -> list[nn.Module]:
    ours: list[nn.Module] = [module for module in model.modules() if isinstance(module, TransformerBlock)]
    if ours:
        return ours
    blocks = modules_of_blocks(model, pipeline_blocks(model) if is_chain(model) else None)
    return [block for block in blocks if any(True for _ in block.parameters())]


def _matching(modules: dict[str, nn.Module], patterns: Sequence[str]) -> list[str]:
    matched: dict[str, None] = {}
    for pattern in patterns:
        names = [name for name in modules if name and fnmatchcase(name, pattern)]
        if not names:
            near = _nearest(pattern, modules)
            raise ConfigError(f"{_KEY}.modules: {pattern!r} matches no module of the model{near}")
        called = [name for name in names if has_forward(modules[name])]
        if not called:
            kind = type(modules[names[0]]).__name__
            raise ConfigError(
                f"{_KEY}.modules: {pattern!r} matches {names[0]}, a {kind}, which is never called itself: take "
                f"{names[0] + '.*'!r}, the modules in it"
            )
        matched.update(dict.fromkeys(called))
    return [name for name in modules if name in matched and not _is_inside(name, matched)]


def _is_inside(name: str, others: dict[str, None]) -> bool:
    parts = name.split(".")
    return any(".".join(parts[:count]) in others for count in range(1, len(parts)))


def _nearest(pattern: str, modules: dict[str, nn.Module]) -> str:
    """Names like it, the numbers in them as ``*``."""
    known = dict.fromkeys(
        ".".join("*" if part.isdigit() else part for part in name.split(".")) for name in modules if name
    )
    near = difflib.get_close_matches(pattern, list(known), n=_MOST, cutoff=0.4) or list(known)[:_MOST]
    return f"; it has {', '.join(map(repr, near))}" if near else ""
