"""A model as a chain of blocks, each with the parameters it owns: the units that a pipeline splits into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from colossus.registry import nearest

#: names of unowned parameters that an error lists
_MAX_NAMES = 5

_HOW = """\
  an nn.Sequential is a chain as it is; any other model says what its blocks are:
    def pipeline_blocks(self):
        return [PipelineBlock(self.embed, self.tokens, self.positions), *self.layers, PipelineBlock(self.top, "head")]
  each block takes what the one before returned; a PipelineBlock names the modules and parameters that its call uses"""


class PipelineBlock:
    """One block of a model that is a chain.

    Args:
        call: computes the block: takes what the block before returned (one argument, any nest of tensors; the first
            block takes the model's input) and returns what the next one takes. It must look its parameters up when
            called (``self.positions``), not hold them: they are allocated after the blocks are known.
        owns: the modules, parameters and buffers that ``call`` uses, or their names relative to the model; a module
            includes its submodules. None is skipped. A ``call`` that is a module owns itself.
        name: shown in ``--dry-run`` and in errors; by default that of the first thing owned.
    """

    def __init__(self, call: Callable[[Any], Any], *owns: nn.Module | Tensor | str | None, name: str | None = None):
        if not callable(call):
            raise ValueError(f"PipelineBlock({call!r}): the first argument is what computes the block, a callable")
        for item in owns:
            if not isinstance(item, nn.Module | Tensor | str | None):
                raise ValueError(
                    f"PipelineBlock owns {item!r}, a {type(item).__name__}: give modules, parameters, or their names"
                )
        self.call, self.name = call, name
        itself = (call,) if isinstance(call, nn.Module) else ()
        self.owns = (*itself, *(item for item in owns if item is not None))

    def __call__(self, x: Any) -> Any:
        return self.call(x)


@dataclass(frozen=True)
class NamedBlock:
    """A block of a model, with all it owns by full name. A shared module, parameter or buffer has its first name.

    Attributes:
        call: computes the block.
        modules: the modules owned and their submodules.
        parameters: as ``named_parameters`` names them: blocks that share a parameter list the same name.
        buffers: as ``named_buffers`` names them.
    """

    name: str
    call: Callable[[Any], Any]
    modules: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]


def run_blocks(blocks: Iterable[Callable[[Any], Any]], x: Any) -> Any:
    """What the last block returns when each takes what the one before returned."""
    for block in blocks:
        x = block(x)
    return x


def pipeline_blocks(model: nn.Module) -> list[NamedBlock]:
    """The blocks of a model that is a chain, in order; a module that comes twice is two blocks.

    A model is a chain when it has a method ``pipeline_blocks`` that returns its blocks (modules, called as they are,
    and `PipelineBlock`; an nn.Sequential or ModuleList stands for its children), or when it is an nn.Sequential: its
    children are the blocks, and nested Sequentials are taken apart. Buffers, and modules without parameters, that no
    block owns belong to all blocks.

    Raises:
        ValueError: for a model that is no chain, a block that is neither a module nor a `PipelineBlock`, a name that
            does not exist, and parameters that no block owns.
    """
    names = _Names(model)
    blocks = [_with_names(block, number, names) for number, block in enumerate(_blocks_of(model))]
    if not blocks:
        raise ValueError(f"{type(model).__name__} has no block: its chain is empty\n{_HOW}")
    _require_all_owned(model, blocks)
    return _with_distinct_names(blocks)


def is_chain(model: nn.Module) -> bool:
    """Whether a model says what its blocks are, or is an nn.Sequential."""
    return hasattr(model, "pipeline_blocks") or _is_sequential(model)


def _blocks_of(model: nn.Module) -> list[PipelineBlock]:
    method = getattr(model, "pipeline_blocks", None)
    if method is None:
        if _is_sequential(model):
            return [PipelineBlock(child) for child in _children(model)]
        raise ValueError(f"{type(model).__name__} does not say what its pipeline blocks are:\n{_HOW}")
    given = method()
    if isinstance(given, nn.Sequential):
        return [PipelineBlock(child) for child in _children(given)]
    if (isinstance(given, str | nn.Module) and not isinstance(given, nn.ModuleList)) or not isinstance(given, Iterable):
        raise ValueError(f"{type(model).__name__}.pipeline_blocks() returned {_kind(given)}, not a list:\n{_HOW}")
    out: list[PipelineBlock] = []
    for number, item in enumerate(given):
        if isinstance(item, PipelineBlock):
            out.append(item)
        elif isinstance(item, nn.ModuleList):
            out += map(PipelineBlock, item)
        elif isinstance(item, nn.Module):
            out.append(PipelineBlock(item))
        else:
            raise ValueError(
                f"block {number} of {type(model).__name__}.pipeline_blocks() is {_kind(item)}, neither a module nor a "
                f"PipelineBlock:\n{_HOW}"
            )
    return out


def _is_sequential(module: nn.Module) -> bool:
    """Whether calling it is calling its children in turn."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _children(chain: nn.Module) -> Iterator[nn.Module]:
    for child in chain._modules.values():  # children() leaves out one that comes twice
        hooks = child is not None and has_hooks(child)
        if child is not None and _is_sequential(child) and not hooks:
            yield from _children(child)
        elif child is not None:
            yield child


def has_hooks(module: nn.Module) -> bool:
    kinds = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(kinds)


class _Names:
    """The first name of every module, parameter and buffer of a model, by id."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = {id(module): name for name, module in model.named_modules()}
        self.parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self.buffers = {id(buffer): name for name, buffer in model.named_buffers()}

    def find(self, item: nn.Module | Tensor | str, block: str) -> nn.Module | Tensor:
        """The module, parameter or buffer itself, which must be the model's."""
        if isinstance(item, str):
            return self._look_up(item, block)
        held = self.modules if isinstance(item, nn.Module) else {**self.parameters, **self.buffers}
        if id(item) not in held:
            what = "" if isinstance(item, nn.Module) else f" of shape {tuple(item.shape)}"
            raise ValueError(
                f"{block} owns a {type(item).__name__}{what} that {type(self.model).__name__} does not hold: "
                f"make it an attribute of the model"
            )
        return item

    def _look_up(self, name: str, block: str) -> nn.Module | Tensor:
        known: dict[str, nn.Module | Tensor] = dict(self.model.named_modules(remove_duplicate=False))
        known.update(self.model.named_parameters(remove_duplicate=False))
        known.update(self.model.named_buffers(remove_duplicate=False))
        if name in known:
            return known[name]
        near = nearest(name, [other for other in known if other])
        hint = f"; did you mean {near!r}?" if near else ""
        raise ValueError(
            f"{block} owns {name!r}, but {type(self.model).__name__} has no module, parameter or buffer of that "
            f"name{hint}"
        )


def _with_names(block: PipelineBlock, number: int, names: _Names) -> NamedBlock:
    where = f"block {number}" + (f" ({block.name})" if block.name else "")
    modules: dict[str, None] = {}
    parameters: dict[str, None] = {}
    buffers: dict[str, None] = {}
    first = ""
    for item in block.owns:
        found = names.find(item, where)
        if isinstance(found, nn.Module):
            first = first or names.modules[id(found)]
            modules.update(dict.fromkeys(names.modules[id(module)] for module in found.modules()))
            parameters.update(dict.fromkeys(names.parameters[id(parameter)] for parameter in found.parameters()))
            buffers.update(dict.fromkeys(names.buffers[id(buffer)] for buffer in found.buffers()))
        elif id(found) in names.parameters:
            first = first or names.parameters[id(found)]
            parameters[names.parameters[id(found)]] = None
        else:
            first = first or names.buffers[id(found)]
            buffers[names.buffers[id(found)]] = None
    name = block.name or first or str(getattr(block.call, "__name__", f"block {number}"))
    return NamedBlock(name, block.call, tuple(modules), tuple(parameters), tuple(buffers))


def _with_distinct_names(blocks: list[NamedBlock]) -> list[NamedBlock]:
    """The blocks, with "(2)" appended to a name that comes a second time."""
    counts: dict[str, int] = {}
    out = []
    for block in blocks:
        counts[block.name] = count = counts.get(block.name, 0) + 1
        name = block.name if count == 1 else f"{block.name} ({count})"
        out.append(NamedBlock(name, block.call, block.modules, block.parameters, block.buffers))
    return out


def _require_all_owned(model: nn.Module, blocks: list[NamedBlock]) -> None:
    owned = {name for block in blocks for name in block.parameters}
    unowned = [name for name, _ in model.named_parameters() if name not in owned]
    if unowned:
        listing = ", ".join(unowned[:_MAX_NAMES])
        if len(unowned) > _MAX_NAMES:
            listing += f" and {len(unowned) - _MAX_NAMES} more"
        them = "them" if len(unowned) > 1 else "it"
        raise ValueError(
            f"no pipeline block of {type(model).__name__} owns {listing}: name {them} in the block that uses {them}, "
            f"PipelineBlock(call, {unowned[0]!r}, ...)"
        )


def _kind(value: Any) -> str:
    return f"a {type(value).__name__}"
