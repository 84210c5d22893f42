"""`make_chain`: turns an unchanged model into a chain of blocks, or raises because its forward cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

from colossus.convert.forward_cuts import CutFinder, NotCarriedError, calls_in_turn
from colossus.convert.forward_parts import ForwardChain
from colossus.convert.forward_trace import Call, ForwardTrace, OnZeros, trace_forward
from colossus.convert.meta_run import copied_to_meta, trying
from colossus.error_place import add_place
from colossus.layers.pipeline_block import is_chain

_HOW = (
    "a pipeline cuts a forward between calls of its blocks: a tensor that is computed from parameters before a cut and "
    "used after it must be an argument or a result of a module, unchanged. Name other blocks (blocks=[names of "
    "modules], or the name of a list of them), define the model's blocks (def pipeline_blocks), or train it without "
    "parallel.pipeline"
)
#: a list of blocks has at least this fraction of the parameters of the largest list
_SMALLEST = 0.02


def make_chain(
    model: nn.Module, example: Any, blocks: str | Sequence[str] | None = None, *, trial: nn.Module | None = None
) -> None:
    """Give an unchanged model ``pipeline_blocks``, after running the forward of an equal model on zeros.

    Blocks are modules that its forward calls one after the other. The forward is cut before their calls, wherever each
    tensor that is needed from before the cut was an argument or a result of a module. A rank runs its part of the
    forward, and the parts before it without the modules that are called there, once for each microbatch and stage.

    Args:
        model: the model, on the meta device, as in the factory of a model, or with values; its modules may be swapped
            afterwards.
        example: an input of the model: a tensor, or a dict of its keyword arguments; a small one will do.
        blocks: the name of the list, or the names of the blocks in the order in which they are called; by default the
            modules of the largest ModuleList or Sequential of one class, with others called before or after it; without
            lists, the children of a module.
        trial: an equal model, which cannot be used afterwards; by default a copy.

    Raises:
        ValueError: the forward cannot be cut; the message says why.
    """
    if blocks is None and is_chain(model):
        return
    if example is None:
        refuse(model, "it must run once to be cut, and there is no example of its input (example=...)")
    trial = copied_to_meta(model) if trial is None else trial
    with trying(example) as example:
        try:
            trace, example, output, mode = trace_forward(trial, example)
        except Exception as error:
            add_place(error)
            refuse(model, f"its forward fails on the example with all parameters zero: {_in_words(error)}", error)
        chosen = _find_blocks(trial, trace, blocks)
        finder = CutFinder(trace, chosen)
        try:
            cuts = finder.find(*_parameters_and_buffers(trial, chosen))
        except NotCarriedError as error:
            refuse(model, str(error), error)
        if not any(0 < block < len(chosen) for block in cuts.first_blocks) and len(chosen) > 1:
            refuse(model, f"it cannot be cut {'; '.join(dict.fromkeys(finder.problems))}")
        try:
            _require_same_output(ForwardChain(trial, cuts), example, output, mode)
        except Exception as error:
            add_place(error)
            refuse(model, f"its forward fails where it is cut: {_in_words(error)}", error)
    model.pipeline_blocks = ForwardChain(model, cuts)  # type: ignore[assignment]


def _parameters_and_buffers(
    model: nn.Module, blocks: Sequence[Call]
) -> tuple[dict[str, tuple[torch.Size, torch.dtype]], list[str], set[str]]:
    """Return shapes and dtypes of parameters, names of buffers, and the names of both that are in blocks."""
    shapes = {name: (parameter.shape, parameter.dtype) for name, parameter in model.named_parameters()}
    buffers = [name for name, _ in model.named_buffers()]
    prefixes = tuple({f"{call.name}." for call in blocks})
    return shapes, buffers, {name for name in (*shapes, *buffers) if name.startswith(prefixes)}


def _require_same_output(chain: ForwardChain, example: Any, output: Any, mode: OnZeros) -> None:
    """Run the segments one by one, as ranks do, and raise if the output differs."""
    value = example
    with torch.no_grad(), mode:
        for block in chain():
            value = block(value)
    leaves, structure = tree_flatten(value)
    wanted, wanted_structure = tree_flatten(output)
    if structure != wanted_structure or list(map(_shape, wanted)) != list(map(_shape, leaves)):
        raise ValueError(
            "its parts together return another output than the whole forward; a forward that records the outputs of "
            "modules does (output_hidden_states, output_attentions)"
        )


# -- blocks -------------------------------------------------------------------------------------------------------


def _find_blocks(model: nn.Module, trace: ForwardTrace, blocks: str | Sequence[str] | None) -> list[Call]:
    if blocks is not None:
        if isinstance(blocks, str) and blocks not in dict(model.named_modules()):
            raise ValueError(f"blocks={blocks!r}: {type(model).__name__} has no module of this name")
        names = _children(model, blocks) if isinstance(blocks, str) else list(blocks)
        calls = [call for call in trace.calls if call.name in names]
        if [*dict.fromkeys(call.name for call in calls)] != names or not calls_in_turn(calls):
            refuse(model, f"blocks={names} are called as {[call.name for call in calls]}, not one after the other")
        return calls
    kinds = (_lists(model, same_class=True), _lists(model, same_class=False), _children_of_all(model))
    for kind, lists in enumerate(kinds):
        chosen: list[Call] = []
        largest = 0
        sized = [(_num_elements(model, names, beside_largest=kind == 2), names) for names in lists]
        for size, names in sorted(sized, key=lambda pair: -pair[0]):
            calls = [call for call in trace.calls if call.name in names]
            is_whole = kind > 0 or {call.name for call in calls} == {*names}
            if len(calls) > 1 and is_whole and calls_in_turn(calls) and size >= _SMALLEST * largest:
                together = sorted([*chosen, *calls], key=lambda call: call.began)
                if calls_in_turn(together):
                    chosen, largest = together, largest or size
        if chosen:
            return chosen
    refuse(model, "it has no modules that are called one after the other")


def _children(model: nn.Module, name: str) -> list[str]:
    children = model.get_submodule(name)._modules.items()
    return [f"{name}.{leaf}" for leaf, child in children if child is not None]


def _children_of_all(model: nn.Module) -> Iterator[list[str]]:
    for name, module in model.named_modules():
        yield [f"{name}.{leaf}".removeprefix(".") for leaf, child in module._modules.items() if child is not None]


def _lists(model: nn.Module, *, same_class: bool) -> Iterator[list[str]]:
    for name, module in model.named_modules():
        kinds = {type(child) for child in module.children()}
        if isinstance(module, nn.ModuleList | nn.Sequential) and name and kinds and (len(kinds) == 1 or not same_class):
            yield _children(model, name)


def _num_elements(model: nn.Module, names: Sequence[str], *, beside_largest: bool) -> int:
    """Return the elements of modules, optionally without those of the largest one, which no cut divides."""
    sizes = [sum(param.numel() for param in model.get_submodule(name).parameters()) for name in names]
    return sum(sizes) - (max(sizes, default=0) if beside_largest else 0)


def refuse(model: nn.Module, reason: str, cause: Exception | None = None) -> NoReturn:
    """Raise ValueError with the reason why a model cannot be cut."""
    raise ValueError(f"{type(model).__name__} under a pipeline: {reason}.\n{_HOW}") from cause


def _in_words(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, torch.Tensor) else type(leaf)
