"""The modules of a model that recompute their activations in backward (``train.activation_checkpoint``)."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase

from torch import nn

from colossus.config import ConfigError
from colossus.config.training import ActivationCheckpoint
from colossus.context.parallel_context import current_context
from colossus.data_parallel.zero.blocks import modules_of_blocks
from colossus.layers.block import TransformerBlock
from colossus.layers.checkpointing import checkpoint_module, has_forward, is_checkpointed
from colossus.layers.pipeline_block import is_chain, pipeline_blocks

_KEY = "train.activation_checkpoint"


def with_activation_checkpoint(
    factory: Callable[[], nn.Module], wanted: ActivationCheckpoint
) -> Callable[[], nn.Module]:
    """Return a factory of the same model with checkpointed modules.

    The factory raises ConfigError if there is nothing to checkpoint, or the model checkpoints itself.
    """
    if wanted.type == "none":
        return factory

    def make() -> nn.Module:
        model = factory()
        if isinstance(model, nn.Module):  # else the build refuses it
            for name in chosen_modules(model, wanted):
                checkpoint_module(model.get_submodule(name), wanted.type, current_context())
        return model

    return make


def chosen_modules(model: nn.Module, wanted: ActivationCheckpoint) -> list[str]:
    """Return the names of the modules to checkpoint, in the order of the whole model, before a pipeline splits it.

    With ``modules`` these are the modules whose names match, the outermost of nested ones. Else they are the blocks:
    TransformerBlocks, or, if there are none, those of `colossus.data_parallel.zero.blocks.modules_of_blocks` that have
    parameters. Of these every k-th is chosen, from the first on.

    Raises:
        ConfigError: see `with_activation_checkpoint`.
    """
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        if is_checkpointed(module):
            raise ConfigError(
                f"{_KEY} = {wanted.type!r}, but {names[id(module)] or 'the model'} checkpoints itself "
                f"(activation_checkpoint= of the model or of its blocks): keep one of the two"
            )
    if wanted.modules is None:
        blocks: list[nn.Module] = [module for module in model.modules() if isinstance(module, TransformerBlock)]
        if not blocks:
            parts = modules_of_blocks(model, pipeline_blocks(model) if is_chain(model) else None)
            blocks = [block for block in parts if any(True for _ in block.parameters())]
        if not blocks:
            raise ConfigError(
                f"{_KEY} = {wanted.type!r}, but {type(model).__name__} has no blocks (no TransformerBlock, no chain, "
                f"no ModuleList or Sequential): name the modules, {_KEY} = dict(type={wanted.type!r}, modules=[..])"
            )
        return [names[id(module)] for module in blocks][:: wanted.every]
    matched: list[str] = []
    unused = set(wanted.modules)
    for name, module in model.named_modules():
        patterns = {
            pattern for pattern in wanted.modules if name and fnmatchcase(name, pattern) and has_forward(module)
        }
        unused -= patterns
        if patterns and not (matched and name.startswith(f"{matched[-1]}.")):
            matched.append(name)
    if unused:
        raise ConfigError(f"{_KEY}.modules: {sorted(unused)} match no module that the model calls")
    return matched[:: wanted.every]
