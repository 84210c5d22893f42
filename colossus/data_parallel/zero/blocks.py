"""The blocks of a model: the modules whose parameters are gathered together."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from torch import nn

from colossus.data_parallel.zero.sharded_block import HeldParameter, Place
from colossus.layers import Classifier, Embedding, Linear, LMHead
from colossus.layers.checkpointing import has_forward
from colossus.layers.pipeline_block import NamedBlock


def _held_parameters(model: nn.Module) -> list[HeldParameter]:
    """The parameters of a model that have rows, each once, with all places where modules hold them."""
    found: dict[nn.Parameter, list[Place]] = {}
    for module in model.modules():
        for leaf, param in module._parameters.items():
            if param is not None and param.dim():
                found.setdefault(param, []).append((module, leaf))
    return [HeldParameter(param, places, all(_takes_product(*at) for at in places)) for param, places in found.items()]


#: whose forward takes nothing but products of ``weight`` and ``bias``, or gives rows of ``weight``
_PRODUCTS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, Linear, LMHead, Classifier, Embedding)


def _takes_product(module: nn.Module, leaf: str) -> bool:
    forward = type(module).forward
    return leaf in ("weight", "bias") and any(forward is product.forward for product in _PRODUCTS)


def by_block(
    model: nn.Module, chain: Sequence[NamedBlock] | None, takes: Callable[[nn.Parameter], bool] = lambda param: True
) -> tuple[list[tuple[nn.Module, list[HeldParameter]]], list[HeldParameter]]:
    """The parameters of each block of a model, with the module that uses them, and those of the root block.

    Blocks are those of the model's chain that are one module each; of a model that is no chain (None), the children of
    its outermost ModuleLists and Sequentials (of one without a forward, a ModuleList in the list, the modules in it).
    What belongs to none of them, or to several, is the root's.
    """
    modules = modules_of_blocks(model, chain)
    block_of: dict[int, set[int]] = {}
    for number, module in enumerate(modules):
        for inner in module.modules():
            block_of.setdefault(id(inner), set()).add(number)
    of_block: list[list[HeldParameter]] = [[] for _ in modules]
    root: list[HeldParameter] = []
    for held in _held_parameters(model):
        if not takes(held.param):
            continue
        users = {number for module, _ in held.places for number in block_of.get(id(module), {-1})}
        (of_block[users.pop()] if len(users) == 1 and -1 not in users else root).append(held)
    return [(module, params) for module, params in zip(modules, of_block, strict=True) if params], root


def modules_of_blocks(model: nn.Module, chain: Sequence[NamedBlock] | None) -> list[nn.Module]:
    """The module of each block, as `by_block` takes them, those without parameters too."""
    return list(dict.fromkeys(_of_containers(model) if chain is None else _of_chain(model, chain)))


def in_buckets(
    blocks: Iterable[tuple[nn.Module, list[HeldParameter]]], limit: int
) -> list[tuple[list[nn.Module], list[HeldParameter]]]:
    """Blocks that follow each other, together while they have at most ``limit`` bytes: fewer collectives."""
    buckets: list[tuple[list[nn.Module], list[HeldParameter]]] = []
    size = 0
    for module, held in blocks:
        nbytes = sum(one.param.nbytes for one in held)
        if not buckets or size + nbytes > limit:
            buckets.append(([], []))
            size = 0
        buckets[-1][0].append(module)
        buckets[-1][1].extend(held)
        size += nbytes
    return buckets


def _of_chain(model: nn.Module, chain: Sequence[NamedBlock]) -> Iterator[nn.Module]:
    known = dict(model.named_modules())
    for block in chain:
        first = block.modules[0] if block.modules else ""
        names = (*block.modules[1:], *block.parameters, *block.buffers)
        if first and all(name.startswith(f"{first}.") for name in names) and has_forward(known[first]):
            yield known[first]


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
