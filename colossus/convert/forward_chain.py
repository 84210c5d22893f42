"""`make_chain`: a model that is not changed is made a chain of blocks, or refused because its forward is none."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, keystr, tree_flatten, tree_flatten_with_path

from colossus.convert.forward_flow import ForwardFlow, standing_in
from colossus.convert.forward_parts import BlockCall, Discarded, ForwardChain, call_model, first_of
from colossus.convert.meta_run import running_on_meta
from colossus.layers.pipeline_block import is_chain

_HOW = (
    "a pipeline needs a forward that calls its blocks as one chain: each takes what the one before returned, and "
    "beside it what is computed from the model's input alone; what follows the blocks takes what the last one "
    "returned. Name other blocks (blocks=[names of modules], or the name of a list of them), let the model say what "
    "its blocks are (def pipeline_blocks), or train it without parallel.pipeline"
)
#: what a block may be called with
_PASSED = (Tensor, int, float, complex, str, type(None), torch.dtype, torch.device, torch.Size)


def make_chain(
    model: nn.Module, example: Any, blocks: str | Sequence[str] | None = None, *, trial: nn.Module | None = None
) -> None:
    """Give a model that is not changed ``pipeline_blocks``, by running the forward of one like it on the meta device.

    The blocks are the modules of its largest ModuleList or Sequential of one class, each called once and in order;
    the first block is what the forward does before them, the last one what it does after them. Modules keep their
    names. On a rank of a pipeline its forward runs with zeros in the place of what other ranks compute, once for each
    microbatch and stage, to find what blocks are called with (masks, positions).

    Args:
        model: on the meta device, as in the factory of a model, or with values; its modules may be swapped afterwards.
        example: an input of the model: a tensor, or a dict of its keyword arguments; a small one will do.
        blocks: the name of the list, or the names of the blocks in the order in which they are called.
        trial: a model like it, which runs, and of which nobody needs to know what that leaves in it; by default the
            model itself.

    Raises:
        ValueError: for a model whose forward is more than a chain over its blocks, with what was found.
    """
    if blocks is None and is_chain(model):
        return
    trial = model if trial is None else trial
    with torch.no_grad(), running_on_meta(example) as example:
        seen = _Forward(trial, example)
        wanted = seen.find_blocks(blocks)
        calls = seen.block_calls(wanted)
        discarded = seen.discarded(wanted)
        owned = seen.parameters(wanted, discarded)
        used = {id(trial.get_parameter(name)) for name in owned[0]}
        every = trial.named_parameters(remove_duplicate=False)
        shapes = {name: parameter.shape for name, parameter in every if id(parameter) in used}
        tried = _Trial(trial, calls, discarded, owned, shapes)
        tried.require_same_output(example, seen.output, wanted[-1])
        buffers = seen.buffers(wanted, tried.needed)
    both = tuple([*names, *of_buffers] for names, of_buffers in zip(owned, buffers, strict=True))
    model.pipeline_blocks = ForwardChain(model, calls, discarded, both, shapes)  # type: ignore[assignment, arg-type]


@dataclass(frozen=True)
class _Call:
    """A call of a module.

    Attributes:
        began, ended: on the clock of `_Forward`.
        given: (path, leaf) of its (args, kwargs).
        depends: all tensors of its result depend on parameters, and there are some.
    """

    name: str
    began: int
    ended: int
    given: list[tuple[str, Any]]
    out: Any
    structure: TreeSpec
    depends: bool


class _Forward:
    """A forward of a model, with all calls of modules and all uses of parameters and buffers in their order."""

    def __init__(self, model: nn.Module, example: Any) -> None:
        self.model, self.flow = model, ForwardFlow(model)
        self.calls: list[_Call] = []
        self._clock = 0
        watched: dict[str, Callable[..., Any]] = {
            name: partial(self._call, name, module) for name, module in model.named_modules() if name
        }
        with standing_in(model, watched), self.flow:
            self.output = call_model(model.forward, example)
        self.calls.sort(key=lambda call: call.began)

    def _call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        began = self._tick()
        out = module(*args, **kwargs)
        leaves, structure = tree_flatten(out)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        depends = bool(tensors) and all(map(self.flow.depends, tensors))
        names = list(inspect.signature(module.forward).parameters)
        given = [(_argument(path, names), leaf) for path, leaf in tree_flatten_with_path((args, kwargs))[0]]
        self.calls.append(_Call(name, began, self._tick(), given, out, structure, depends))
        return out

    def _tick(self) -> int:
        self._clock += 1
        self.flow.time = self._clock
        return self._clock

    # -- blocks -------------------------------------------------------------------------------------------

    def find_blocks(self, given: str | Sequence[str] | None) -> list[_Call]:
        """The calls of the blocks."""
        if given is not None:
            if isinstance(given, str) and given not in dict(self.model.named_modules()):
                raise ValueError(f"blocks={given!r}: {type(self.model).__name__} has no module of this name")
            names = self._children(given) if isinstance(given, str) else list(given)
            found = self._in_order(names)
            if found is None:
                called = [call.name for call in self.calls if call.name in names]
                self._refuse(f"blocks={names} are called as {called}, not each once and in this order")
            return found
        lists = list(self._lists())
        for names in sorted(lists, key=self._num_elements, reverse=True):
            if found := self._in_order(names):
                return found
        kinds = [f"{names[0].rpartition('.')[0]} ({len(names)})" for names in lists]
        self._refuse(
            f"no ModuleList or Sequential holds modules of one class that are called in order, each once (lists of one "
            f"class: {', '.join(kinds) or 'none'})"
        )

    def _children(self, name: str) -> list[str]:
        children = self.model.get_submodule(name)._modules.items()
        return [f"{name}.{leaf}" for leaf, child in children if child is not None]

    def _lists(self) -> Iterator[list[str]]:
        for name, module in self.model.named_modules():
            kinds = [type(child) for child in module.children()]
            if isinstance(module, nn.ModuleList | nn.Sequential) and len(kinds) > 1 and len({*kinds}) == 1 and name:
                yield self._children(name)

    def _num_elements(self, names: Sequence[str]) -> int:
        return sum(param.numel() for name in names for param in self.model.get_submodule(name).parameters())

    def _in_order(self, names: Sequence[str]) -> list[_Call] | None:
        calls = [call for call in self.calls if call.name in names]
        in_turn = all(call.ended < after.began for call, after in itertools.pairwise(calls))
        return calls if in_turn and [call.name for call in calls] == list(names) else None

    def block_calls(self, blocks: Sequence[_Call]) -> list[BlockCall]:
        """How the blocks are called, where that is a chain."""
        calls: list[BlockCall] = []
        hidden: Tensor | None = None
        for block in blocks:
            dependent = [
                slot
                for slot, (_, leaf) in enumerate(block.given)
                if isinstance(leaf, Tensor) and (leaf is hidden or self.flow.depends(leaf))
            ]
            if hidden is None:  # of a model that begins with its blocks, its input
                slots = dependent or [slot for slot, (_, leaf) in enumerate(block.given) if isinstance(leaf, Tensor)]
            else:
                slots = [slot for slot in dependent if block.given[slot][1] is hidden]
            if not slots:
                self._refuse(
                    f"{block.name} does not take what {calls[-1].name if calls else 'the model'} returned as it is"
                )
            others = [path for slot, (path, _) in enumerate(block.given) if slot in dependent and slot != slots[0]]
            if others:
                self._refuse(
                    f"{block.name} takes {', '.join(others)}, which is computed from parameters, beside its "
                    f"{block.given[slots[0]][0]} (a decoder takes what its encoder returned: that is two chains; "
                    f"others share a bias of positions)"
                )
            for path, leaf in block.given:
                if not isinstance(leaf, _PASSED):
                    self._refuse(
                        f"{block.name} takes a {type(leaf).__name__} ({path}), which may hold what other blocks have "
                        f"computed (of a cache of keys and values: config.use_cache = False)"
                    )
            extras = len(block.out) - 1 if isinstance(block.out, tuple) else None
            hidden = first_of(block.out)
            if not isinstance(hidden, Tensor):
                self._refuse(f"{block.name} returns a {type(block.out).__name__}, neither a tensor nor a tuple of one")
            calls.append(BlockCall(block.name, slots[0], extras))
        return calls

    # -- what lies around them ----------------------------------------------------------------------------

    def discarded(self, blocks: Sequence[_Call]) -> list[Discarded]:
        """The outermost modules that run before the blocks alone, of whose results all depends on parameters."""
        before = [call for call in self.calls if call.ended < blocks[0].began]
        kept = {call.name for call in before if not call.depends}
        for block, after in itertools.pairwise(blocks):
            kept |= {call.name for call in self.calls if block.ended < call.began and call.ended < after.began}
        names = {call.name for call in before} - kept
        found = {
            call.name: call.structure for call in before if call.name in names and not _is_inside(call.name, names)
        }
        return [Discarded(name, structure) for name, structure in found.items()]

    def parameters(self, blocks: Sequence[_Call], discarded: Sequence[Discarded]) -> tuple[list[str], list[str]]:
        """Names of those that are used before and after the blocks. What nothing uses goes with its neighbours."""
        first, last = blocks[0].began, blocks[-1].ended
        names_of_blocks, names_before = {call.name for call in blocks}, {each.name for each in discarded}
        before: list[str] = []
        after: list[str] = []
        for name, _ in self.model.named_parameters():
            times = self.flow.uses.get(name, ())
            is_before, is_after = any(time < first for time in times), any(time >= last for time in times)
            if not is_before and not is_after and not _is_inside(name, names_of_blocks):
                is_before = _is_inside(name, names_before)
                is_after = not is_before
            before += [name] if is_before else []
            after += [name] if is_after else []
        return before, after

    def buffers(self, blocks: Sequence[_Call], needed: set[str]) -> tuple[list[str], list[str]]:
        """Names of those that are used before and after the blocks alone; ``needed`` are those of every rank."""
        first, last = blocks[0].began, blocks[-1].ended
        uses = [(name, self.flow.uses[name]) for name, _ in self.model.named_buffers() if name in self.flow.uses]
        before = [name for name, times in uses if name not in needed and max(times) < first]
        after = [name for name, times in uses if name not in needed and min(times) >= last]
        return before, after

    def _refuse(self, found: str) -> NoReturn:
        refuse(self.model, found)


class _Trial(ForwardChain):
    """The chain run on the example: what it discards must not reach the model's output.

    Attributes:
        needed: parameters and buffers that every rank uses to find what blocks are called with.
    """

    def require_same_output(self, example: Any, output: Any, last_call: _Call) -> None:
        """That the output has the same shapes as that of the model, and nothing in it is computed from zeros."""
        hidden = torch.empty_like(first_of(last_call.out), device="meta")
        with ForwardFlow(self._model) as flow:
            value = self.before(example)
        self.flow = flow = ForwardFlow(self._model)

        def last() -> Tensor:
            flow.after_last, self.needed = True, set(flow.uses)
            return flow.mark(hidden, stale=False)

        try:
            with flow:
                out = self._replay(value, last)
        except Exception as error:
            refuse(
                self._model,
                f"what it does outside of its blocks fails where they return hidden states alone ({error})",
                error,
            )
        found, structure = tree_flatten_with_path(out)
        wanted, wanted_structure = tree_flatten(output)
        if structure != wanted_structure or list(map(_shape, wanted)) != [_shape(leaf) for _, leaf in found]:
            refuse(self._model, "its output holds what is recorded of single blocks (hidden states, attention weights)")
        stale = [keystr(path) for path, leaf in found if isinstance(leaf, Tensor) and flow.is_stale(leaf)]
        if stale:
            what = ", ".join(path or "all of it" for path in stale)
            refuse(
                self._model,
                f"its output ({what}) is computed from what the last block ({self._blocks[-1].name}) did not return: "
                f"a connection that skips blocks",
            )

    def _passed(self, hidden: Tensor) -> Tensor:
        return self._zeros(hidden, hidden.shape, hidden.dtype)

    def _zeros(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return self.flow.mark(torch.zeros(shape, dtype=dtype), stale=True)


def refuse(model: nn.Module, found: str, cause: Exception | None = None) -> NoReturn:
    raise ValueError(f"{type(model).__name__} is no chain of blocks: {found}.\n{_HOW}") from cause


def _shape(leaf: Any) -> Any:
    return leaf.shape if isinstance(leaf, Tensor) else type(leaf)


def _is_inside(name: str, modules: set[str]) -> bool:
    return any(name.startswith(f"{module}.") for module in modules)


def _argument(path: Any, parameters: Sequence[str]) -> str:
    """How errors name an argument: ``attention_mask``, ``position_embeddings[0]``."""
    which, first, *rest = path
    name = first.key if which.idx else parameters[min(first.idx, len(parameters) - 1)]
    return f"{name}{keystr(tuple(rest))}"
