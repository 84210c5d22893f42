"""The blocks of a model: the modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch import nn

from colossus.comm.flat_buffer import chunks
from colossus.comm.shared_memory import piece_bytes
from colossus.data_parallel.zero.sharded_block import Place, PlacedParameter
from colossus.layers import Classifier, Embedding, Linear, LMHead
from colossus.layers.checkpointing import has_forward
from colossus.layers.moe import Experts
from colossus.layers.pipeline_block import NamedBlock
from colossus.layers.routed_experts import RoutedExperts

B = TypeVar("B")
M = TypeVar("M")
#: number of the root block
ROOT = -1


def placed_parameters(model: nn.Module) -> list[PlacedParameter]:
    """Return the parameters of a model that have rows, each once, with all of their places in modules."""
    places_of: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None and param.dim():
                places_of.setdefault(param, []).append((module, leaf))
    return [
        PlacedParameter(param, places, all(_is_used_in_product(*place) for place in places))
        for param, places in places_of.items()
    ]


_LINEAR = ("weight", "bias")
#: forward of a module -> the parameters that it uses in products only, or of which it returns rows
_PRODUCTS: dict[Callable[..., Any], Sequence[str]] = {
    **{
        kind.forward: _LINEAR
        for kind in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Linear, LMHead, Classifier, Embedding)
    },
    Experts.forward: ("gate", "up", "down", "gate_bias", "up_bias", "down_bias"),
    RoutedExperts.forward: ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"),
}


def _is_used_in_product(module: nn.Module, leaf: str) -> bool:
    return leaf in _PRODUCTS.get(type(module).forward, ())


def by_block(
    model: nn.Module, chain: Sequence[NamedBlock] | None, takes: Callable[[nn.Parameter], bool]
) -> tuple[list[tuple[nn.Module, list[PlacedParameter]]], list[PlacedParameter]]:
    """Return each block of a model as its module and parameters, and the parameters of the root block.

    Blocks are those blocks of the model's chain that are one module each, or their units. Where the model is no chain
    (None), blocks are the children of its outermost ModuleLists and Sequentials, or the modules in such a child that
    has no forward. Parameters of no block, or of several, belong to the root block.

    Args:
        model: this rank's part of the model.
        chain: its blocks, or None.
        takes: returns whether a parameter is to belong to a block at all.
    """
    modules = modules_of_blocks(model, chain)
    blocks_of = blocks_of_modules(modules)
    of_block: list[list[PlacedParameter]] = [[] for _ in modules]
    root: list[PlacedParameter] = []
    for member in placed_parameters(model):
        if not takes(member.param):
            continue
        number = only_block(users_of(member, blocks_of))
        (root if number == ROOT else of_block[number]).append(member)
    return [(module, params) for module, params in zip(modules, of_block, strict=True) if params], root


def modules_of_blocks(model: nn.Module, chain: Sequence[NamedBlock] | None) -> list[nn.Module]:
    """Return the module of each block of `by_block`, also of blocks without parameters."""
    return list(dict.fromkeys(_of_containers(model) if chain is None else _of_chain(model, chain)))


def blocks_of_modules(modules: Sequence[nn.Module]) -> dict[int, set[int]]:
    """Return the numbers of the blocks that each module is in, by the module's id.

    Args:
        modules: module of each block.
    """
    numbers: dict[int, set[int]] = {}
    for number, module in enumerate(modules):
        for inner in module.modules():
            numbers.setdefault(id(inner), set()).add(number)
    return numbers


def users_of(member: PlacedParameter, blocks_of: Mapping[int, set[int]]) -> set[int]:
    """Return the blocks that use a parameter, with `ROOT` if a module outside of them does."""
    return {number for module, _ in member.places for number in blocks_of.get(id(module), {ROOT})}


def only_block(users: set[int]) -> int:
    """Return the block that a parameter belongs to by its users: the only one, or `ROOT`."""
    return next(iter(users)) if len(users) == 1 else ROOT


def in_buckets(
    blocks: Iterable[tuple[B, Sequence[M]]], nbytes_of: Callable[[M], int], *, stays: bool
) -> list[tuple[list[B], list[M]]]:
    """Join small consecutive blocks for fewer collectives, if they stay whole for a step.

    Args:
        blocks: each block with its parameters.
        nbytes_of: returns the bytes of a parameter.
        stays: whether blocks stay whole for a step; otherwise each is on its own.
    """
    joined = chunks(blocks, lambda block: sum(map(nbytes_of, block[1])), piece_bytes() if stays else 0)
    return [([block for block, _ in run], [member for _, members in run for member in members]) for run in joined]


def _of_chain(model: nn.Module, chain: Sequence[NamedBlock]) -> Iterator[nn.Module]:
    modules = dict(model.named_modules())
    for block in chain:
        if block.units:
            yield from (modules[name] for name in block.units)
            continue
        first = block.modules[0] if block.modules else ""
        names = (*block.modules[1:], *block.parameters, *block.buffers)
        if first and all(name.startswith(f"{first}.") for name in names) and has_forward(modules[first]):
            yield modules[first]


def _of_containers(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if isinstance(child, nn.ModuleList | nn.Sequential):
            for inner in child.children():
                yield from _called(inner)
        else:
            yield from _of_containers(child)


def _called(module: nn.Module) -> Iterator[nn.Module]:
    if has_forward(module):
        yield module
    else:
        for child in module.children():
            yield from _called(child)
