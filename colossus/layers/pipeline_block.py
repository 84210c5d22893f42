"""A model as a chain of blocks, each with the parameters it owns: the units that a pipeline splits into stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

_HOW = """\
  an nn.Sequential is a chain as it is; any other model defines its blocks:
    def pipeline_blocks(self):
        return [PipelineBlock(self.embed, self.tokens, self.positions), *self.layers, PipelineBlock(self.top, "head")]
  each block takes the result of the one before; a PipelineBlock names the modules and parameters that its call uses"""


class PipelineBlock:
    """One block of a model that is a chain.

    Args:
        call: computes the block: takes the result of the block before (one argument, any nest of tensors; the first
            block takes the model's input) and returns the input of the next one. It must look its parameters up when
            called (``self.positions``), not store them: they are allocated after the blocks are known.
        owns: the modules, parameters and buffers that ``call`` uses, or their names relative to the model; a module
            includes its submodules. None is skipped. A ``call`` that is a module owns itself.
        name: name in ``--dry-run`` and in errors; by default that of the first item in ``owns``.
        units: modules of ``owns`` that have all its parameters, and which ``call`` calls as they are: under ZeRO-3 each
            is gathered while it runs. By default the block is, if it is one module.
    """

    def __init__(
        self,
        call: Callable[[Any], Any],
        *owns: nn.Module | Tensor | str | None,
        name: str | None = None,
        units: Sequence[nn.Module] = (),
    ) -> None:
        if not callable(call):
            raise ValueError(f"PipelineBlock({call!r}): the first argument must be a callable that computes the block")
        self.call, self.name, self.units = call, name, tuple(units)
        itself = (call,) if isinstance(call, nn.Module) else ()
        self.owns = (*itself, *(item for item in owns if item is not None))

    def __call__(self, x: Any) -> Any:
        return self.call(x)


@dataclass(frozen=True)
class NamedBlock:
    """A block of a model, with all it owns by full name. A shared module, parameter or buffer has its first name.

    Attributes:
        call: computes the block.
        modules: the owned modules and their submodules.
        parameters: names as in ``named_parameters``: blocks that share a parameter list the same name.
        buffers: names as in ``named_buffers``.
        units: see `PipelineBlock`.
    """

    name: str
    call: Callable[[Any], Any]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    units: tuple[str, ...] = ()


def joined_blocks(calls: Iterable[Callable[[Any], Any]]) -> list[Callable[[Any], Any]]:
    """Return callables that compute blocks one after the other; blocks that can (``joined``) run together."""
    joined: list[Callable[[Any], Any]] = []
    for call in calls:
        both = joined[-1].joined(call) if joined and hasattr(joined[-1], "joined") else None
        joined[-1:] = [*joined[-1:], call] if both is None else [both]
    return joined


def run_blocks(blocks: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    """Return the result of the last block when each takes the result of the one before."""
    for block in joined_blocks(blocks):
        x = block(x)
    return x


def pipeline_blocks(model: nn.Module) -> list[NamedBlock]:
    """Return the blocks of a model that is a chain, in order; a module that comes twice is two blocks.

    A model is a chain if it has a method ``pipeline_blocks`` that returns its blocks (modules and `PipelineBlock`; an
    nn.Sequential or ModuleList stands for its children), or if it is an nn.Sequential: its children are the blocks, and
    nested Sequentials are taken apart. Buffers, and modules without parameters, that no block owns belong to all
    blocks.

    Raises:
        ValueError: the model is no chain, a block is neither a module nor a `PipelineBlock`, a name does not exist, or
            no block owns a parameter.
    """
    every = (model.named_modules, model.named_parameters, model.named_buffers)
    by_name = {name: item for named in every for name, item in named(remove_duplicate=False)}
    names: dict[int, str] = {}
    for name, item in by_name.items():
        names.setdefault(id(item), name)
    blocks: list[NamedBlock] = []
    counts: Counter[str] = Counter()
    for number, entry in enumerate(_blocks_of(model)):
        block = _with_names(entry, number, type(model).__name__, by_name, names)
        counts[block.name] += 1
        blocks.append(block if counts[block.name] == 1 else replace(block, name=f"{block.name} ({counts[block.name]})"))
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no block: its chain is empty\n{_HOW}")
    owned = {name for block in blocks for name in block.parameters}
    unowned = [name for name, _ in model.named_parameters() if name not in owned]
    if unowned:
        raise ValueError(
            f"no pipeline block of {type(model).__name__} owns {', '.join(unowned)}: list them in the blocks that use "
            f"them, PipelineBlock(call, {unowned[0]!r}, ...)"
        )
    return blocks


def is_chain(model: nn.Module) -> bool:
    """Return whether a model defines its blocks, or is an nn.Sequential."""
    return hasattr(model, "pipeline_blocks") or _is_sequential(model)


def _blocks_of(model: nn.Module) -> list[PipelineBlock]:
    method = getattr(model, "pipeline_blocks", None)
    if method is None:
        if _is_sequential(model):
            return [PipelineBlock(child) for child in _children(model)]
        raise ValueError(f"{type(model).__name__} does not define its pipeline blocks:\n{_HOW}")
    returned = method()
    if isinstance(returned, nn.Sequential):
        return [PipelineBlock(child) for child in _children(returned)]
    if not isinstance(returned, list | tuple | nn.ModuleList):
        what = type(returned).__name__
        raise ValueError(f"{type(model).__name__}.pipeline_blocks() returned a {what}, not a list:\n{_HOW}")
    out: list[PipelineBlock] = []
    for number, item in enumerate(returned):
        if isinstance(item, nn.ModuleList):
            out += map(PipelineBlock, item)
        elif isinstance(item, nn.Module | PipelineBlock):
            out.append(item if isinstance(item, PipelineBlock) else PipelineBlock(item))
        else:
            raise ValueError(
                f"block {number} of {type(model).__name__}.pipeline_blocks() is a {type(item).__name__}, neither a "
                f"module nor a PipelineBlock:\n{_HOW}"
            )
    return out


def _is_sequential(module: nn.Module) -> bool:
    """Return whether calling a module is calling its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _children(chain: nn.Module) -> Iterator[nn.Module]:
    for child in chain._modules.values():  # children() drops a repeated child
        hooks = child is not None and has_hooks(child)
        if child is not None and _is_sequential(child) and not hooks:
            yield from _children(child)
        elif child is not None:
            yield child


def has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


def _with_names(
    block: PipelineBlock, number: int, model: str, by_name: dict[str, nn.Module | Tensor], names: dict[int, str]
) -> NamedBlock:
    """Return a block with all that it owns, by the names in the model.

    Args:
        names: id of a module, parameter or buffer -> its first name.
    """
    owned: dict[nn.Module | Tensor, None] = {}
    for item in block.owns:
        entry = by_name.get(item) if isinstance(item, str) else item
        if entry is None or id(entry) not in names:
            what = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise ValueError(
                f"block {number}{f' ({block.name})' if block.name else ''} owns {what} that {model} does not have: "
                f"list modules, parameters and buffers of the model, or their names"
            )
        inner = (entry,) if isinstance(entry, Tensor) else (*entry.modules(), *entry.parameters(), *entry.buffers())
        owned.update(dict.fromkeys(inner))
    modules = tuple(names[id(item)] for item in owned if isinstance(item, nn.Module))
    parameters = tuple(names[id(item)] for item in owned if isinstance(item, nn.Parameter))
    buffers = tuple(names[id(item)] for item in owned if not isinstance(item, nn.Module | nn.Parameter))
    first = names[id(next(iter(owned)))] if owned else getattr(block.call, "__name__", f"block {number}")
    units = tuple(names[id(item)] for item in block.units)
    return NamedBlock(block.name or first, block.call, modules, parameters, buffers, units)
