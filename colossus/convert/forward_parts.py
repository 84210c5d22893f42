"""The pipeline blocks of an unchanged model: its forward, cut between calls of its blocks.

A rank runs the forward of the whole model up to the end of its part. Modules whose calls belong to earlier parts do not
run: zeros take the place of their results, and of parameters that the rank does not have. Masks and positions, which
depend on no parameter, are computed anew, and random numbers are drawn anew. Tensors that are computed from parameters
and needed later arrive with the cut, and replace the zeros where a module took or returned them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from colossus.convert.forward_cuts import CONSTANTS, Carried, Cuts, Event
from colossus.convert.forward_flow import call_model, standing_in
from colossus.convert.zeros import zeros_of
from colossus.layers.pipeline_block import PipelineBlock
from colossus.random import drawing_aside

#: the tensors that cross a cut, the model's input, and the calls before the cut, which later stages skip: for each the
#: name of its module, and the shapes and dtypes of its results
Value = tuple[list[Tensor], Any, list[list[Any]]]

#: the module with the hooks that record hidden states in a forward of transformers' models
_RECORDING = "transformers.utils.output_capturing"


class _CutReached(Exception):
    """The end of a forward at a cut."""


class ForwardChain:
    """``model.pipeline_blocks`` of an unchanged model: it returns the segments of the forward as blocks.

    Attributes:
        takes_names: the first block takes a dict of the forward's arguments.
    """

    takes_names = True

    def __init__(self, model: nn.Module, cuts: Cuts) -> None:
        self.model, self.cuts = model, cuts
        self._placeholders: list[tuple[dict[str, Any], str, Tensor]] | None = None

    def __call__(self) -> list[PipelineBlock]:
        blocks, starts = self.cuts.blocks, self.cuts.first_blocks
        parts = []
        for segment, (start, stop) in enumerate(zip((0, *starts), (*starts, len(blocks)), strict=True)):
            names = list(dict.fromkeys(blocks[start:stop]))
            name = ", ".join(names) or (f"before {blocks[0]}" if segment == 0 else f"after {blocks[-1]}")
            modules = map(self.model.get_submodule, names)
            part = ForwardPart(self, segment, segment + 1)
            parts.append(PipelineBlock(part, *modules, *self.cuts.owned[segment], name=name))
        return parts

    @contextmanager
    def placeholders(self, device: torch.device) -> Iterator[None]:
        """Put zeros in place of parameters that this rank does not have, inside the context.

        A forward may ask for their dtype.
        """
        if self._placeholders is None:
            self._placeholders = list(self._make_placeholders(device))
        for parameters, leaf, zeros in self._placeholders:
            parameters[leaf] = zeros
        try:
            yield
        finally:
            for parameters, leaf, _ in self._placeholders:
                del parameters[leaf]

    def _make_placeholders(self, device: torch.device) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
        missing: list[tuple[dict[str, Any], str, torch.Size, torch.dtype]] = []
        dtypes: dict[torch.dtype, torch.dtype] = {}  # dtype in the model -> dtype in the run
        for name, (shape, dtype) in self.cuts.shapes.items():
            path, _, leaf = name.rpartition(".")
            parameters: dict[str, Any] = self.model.get_submodule(path)._parameters
            if leaf in parameters:
                dtypes.setdefault(dtype, getattr(self.model.get_submodule(path), leaf).dtype)
            elif not parameters or not path:  # a layer of colossus may have other parameters
                missing.append((parameters, leaf, shape, dtype))
        for parameters, leaf, shape, dtype in missing:
            yield parameters, leaf, zeros_of(shape, dtypes.get(dtype, dtype), device)


@dataclass(frozen=True)
class ForwardPart:
    """Consecutive segments of a forward: from ``start`` up to ``stop``, which is not included."""

    chain: ForwardChain
    start: int
    stop: int

    #: a stage draws its random numbers from the stream of the whole forward
    draws_as_whole = True

    def joined(self, after: Any) -> ForwardPart | None:
        """Return this part and ``after`` as one part if ``after`` is the next part of the same forward, else None."""
        is_next = isinstance(after, ForwardPart) and after.chain is self.chain and after.start == self.stop
        return replace(self, stop=after.stop) if is_next else None

    def __call__(self, value: Any) -> Any:
        return _Run(self.chain, self.start, self.stop, value).run()


class _Run:
    """One run of a part of a forward.

    Args:
        value: the model's input for the first part, else a `Value`.
    """

    def __init__(self, chain: ForwardChain, start: int, stop: int, value: Any) -> None:
        self._chain, self._model, self._cuts, self._start, self._stop = chain, chain.model, chain.cuts, start, stop
        carried, self._inputs, calls = value if start else ([], value, [])
        self._calls, self._skipped = list(calls), iter(calls)
        #: the tensors that arrived with the cut
        self._arrived = dict(zip(self._cuts.carried[start - 1] if start else (), carried, strict=True))
        #: the tensors that cross the cuts at both ends of the part
        self._wanted = {*self._arrived, *(self._cuts.carried[stop - 1] if not self._is_last else ())}
        self._seen: dict[Carried, Tensor] = {}
        self._numbers = Counter[str]()
        self._segment, self._is_inside = 0, False
        tensors = [tensor for tensor in (*carried, *tree_flatten(self._inputs)[0]) if isinstance(tensor, Tensor)]
        #: the device and dtype of zeros
        self._like = tensors[0] if tensors else torch.zeros(())

    @property
    def _is_last(self) -> bool:
        return self._stop > len(self._cuts.first_blocks)

    def run(self) -> Any:
        """Return the value of the cut at the end of the part, or the model's output."""
        names = dict.fromkeys(name for name, _ in self._cuts.events)
        calls: dict[str, Callable[..., Any]] = {
            name: partial(self._call, name, self._model.get_submodule(name)) for name in names
        }
        with self._chain.placeholders(self._like.device), standing_in(self._model, calls):
            try:
                out = call_model(self._model.forward, self._inputs)
            except _CutReached:
                return self._value()
        if not self._is_last:
            self._refuse("its forward ended before it called the blocks of the next stage")
        return out

    def _value(self) -> Value:
        carried = self._cuts.carried[self._stop - 1]
        if missing := [carrier for carrier in carried if carrier not in self._seen]:
            self._refuse(f"{missing[0].name} was not called")
        return [self._seen[carrier] for carrier in carried], self._inputs, self._calls

    # -- calls of modules -------------------------------------------------------------------------------------

    def _call(self, name: str, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside:
            return module(*args, **kwargs)
        event = self._cuts.events.get((name, self._numbers[name]))
        self._numbers[name] += 1
        if event is None:
            self._refuse(f"{name} is called more often than with the example")
        if event.block is not None:
            self._enter(event.block)
        arguments = tree_flatten((args, kwargs))[0]
        for carried in self._wanted_of(event, "argument"):
            if carried in self._arrived:
                _overwrite(arguments[carried.slot], self._arrived[carried])
            self._seen[carried] = arguments[carried.slot]
        if self._segment >= self._stop:
            raise _CutReached
        if self._segment >= self._start:
            out = self._run_module(event, module, args, kwargs)
        else:
            out = self._skip(event, arguments)
            for hook in module._forward_hooks.values():
                if hook.__module__ == _RECORDING:
                    hook(module, args, out)
        if event.block == len(self._cuts.blocks) - 1:
            self._enter(event.block + 1)
            if self._segment >= self._stop:
                raise _CutReached
        return out

    def _enter(self, block: int) -> None:
        if block in self._cuts.first_blocks:
            self._segment = self._cuts.first_blocks.index(block) + 1

    def _wanted_of(self, event: Event, side: str) -> list[Carried]:
        key = (event.name, event.number, side)
        return [carried for carried in self._wanted if (carried.name, carried.number, carried.side) == key]

    def _skip(self, event: Event, arguments: Sequence[Any]) -> Any:
        """Return the results of a call that an earlier stage has run: tensors that arrived, else zeros."""
        name, *results = next(self._skipped, [""])
        if name != event.name:
            self._refuse(f"it calls {event.name} where another stage has called {name or 'nothing'}")
        leaves: list[Any] = []
        for slot, leaf in enumerate(results):
            carried = Carried(event.name, event.number, "result", slot)
            arrived, alias = self._arrived.get(carried), event.aliases.get(slot)
            if alias is not None:
                result = (arguments if alias[0] == "argument" else leaves)[alias[1]]
                if arrived is not None and alias[0] == "argument":
                    _overwrite(result, arrived)
            elif arrived is not None:
                result = arrived
            elif slot in event.records:
                result = event.records[slot]()
            else:
                result = self._like.new_zeros(leaf[0], dtype=leaf[1]) if isinstance(leaf, tuple) else leaf
            leaves.append(result)
            if carried in self._wanted:
                self._seen[carried] = result
        return tree_unflatten(leaves, event.structure)

    def _run_module(self, event: Event, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._is_inside = True
        try:
            # a block draws from a stream of its own, on any stage; code before the blocks draws as without a pipeline
            with drawing_aside(event.name, event.number, self._like.device) if self._segment else nullcontext():
                out = module(*args, **kwargs)
        finally:
            self._is_inside = False
        leaves, structure = tree_flatten(out)
        described: list[Any] = []
        for slot, leaf in enumerate(leaves):
            is_expected = isinstance(leaf, (Tensor, *CONSTANTS)) or slot in event.records
            if not is_expected or structure != event.structure:
                self._refuse(f"{event.name} returned values of other types than with the example ({structure})")
            described.append((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf)
        for slot in event.records:
            described[slot] = None  # later stages make an empty one of their own
        self._calls.append([event.name, *described])
        for carried in self._wanted_of(event, "result"):
            self._seen[carried] = leaves[carried.slot]
        return out

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{type(self._model).__name__} under a pipeline: {what}. For each batch and on each rank its forward must "
            f"call the same modules in the same order (no layerdrop, no early exit) as with the example in training "
            f"mode"
        )


def _overwrite(zeros: Tensor, arrived: Tensor) -> None:
    """Give a tensor, which other code may refer to, the values and the graph of the tensor that has arrived."""
    if zeros.shape != arrived.shape:
        raise ValueError(f"a tensor of shape {list(zeros.shape)} arrived as {list(arrived.shape)}")
    if zeros.requires_grad and not zeros._is_view():
        zeros.detach_()  # it does not depend on the other tensors that have arrived
    zeros.copy_(arrived)
