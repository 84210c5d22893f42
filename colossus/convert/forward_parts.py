"""The pipeline blocks of a model that is not changed: what its forward does before, in and after a list of blocks.

Each rank runs the forward of the whole model with other functions in the place of modules. What lies before the first
block runs until that is called. What a block is called with beside the hidden states (masks, positions) is recorded in
a forward without blocks. What follows the last block runs in one where the last block returns what has arrived.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from colossus.convert.forward_flow import standing_in
from colossus.layers.pipeline_block import PipelineBlock

#: what goes from block to block: hidden states, the model's input, and `ForwardChain.before`'s record
Value = tuple[Tensor, Any, list[Any]]


class _Reached(Exception):
    """Ends a forward at a block."""

    def __init__(self, result: Any = None) -> None:
        super().__init__("the end of a part of a model was reached")
        self.result = result


@dataclass(frozen=True)
class BlockCall:
    """How the forward calls a block.

    Attributes:
        name: of the module.
        slot: of the hidden states among the leaves of (args, kwargs).
        extras: the block returns a tuple: how many elements follow the hidden states in it; None: it returns them.
    """

    name: str
    slot: int
    extras: int | None

    def result(self, hidden: Any) -> Any:
        """What stands for the block's result where only the hidden states matter."""
        return hidden if self.extras is None else (hidden, *(None,) * self.extras)


@dataclass(frozen=True)
class Discarded:
    """A module before the blocks whose result matters for the first block's hidden states alone."""

    name: str
    structure: TreeSpec

    def __deepcopy__(self, memo: dict[int, Any]) -> Discarded:
        return self  # torch warns where a structure is copied


class ForwardChain:
    """``model.pipeline_blocks`` of a model that is not changed: returns the blocks.

    Args:
        blocks: in order.
        discarded: not run but before the first block; elsewhere zeros of the same shapes take their results' place.
        parameters: names of those that are used outside of the blocks, before them and after them.
        buffers: the same of those that nothing else needs.
        shapes: of the parameters that are used before the blocks.

    Attributes:
        takes_names: the first block takes a dict of the forward's arguments.
    """

    takes_names = True

    def __init__(
        self,
        model: nn.Module,
        blocks: Sequence[BlockCall],
        discarded: Sequence[Discarded],
        owned: tuple[Sequence[str], Sequence[str]],
        shapes: Mapping[str, torch.Size],
    ) -> None:
        self._model, self._blocks, self._discarded = model, blocks, discarded
        self._owned, self._shapes = owned, shapes
        #: of the last record: its blocks' arguments
        self._record: list[Any] | None = None
        self._arguments: list[Any] = []

    def __call__(self) -> list[PipelineBlock]:
        before, after = self._owned
        blocks = [
            PipelineBlock(partial(self.block, number), self._model.get_submodule(block.name))
            for number, block in enumerate(self._blocks)
        ]
        first, last = self._blocks[0].name, self._blocks[-1].name
        return [
            PipelineBlock(self.before, *before, name=f"before {first}"),
            *blocks,
            PipelineBlock(self.after, *after, name=f"after {last}"),
        ]

    def before(self, inputs: Any) -> Value:
        """The hidden states that the first block is called with.

        The record says what shapes and dtypes the discarded results have, and the parameters' dtypes.
        """
        results: list[Any] = []

        def recorded(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            out = module(*args, **kwargs)
            results.append(
                [(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in tree_flatten(out)[0]]
            )
            return out

        first = self._blocks[0]

        def reached(*args: Any, **kwargs: Any) -> Any:
            raise _Reached(tree_flatten((args, kwargs))[0][first.slot])

        calls = {each.name: partial(recorded, self._model.get_submodule(each.name)) for each in self._discarded}
        hidden = self._run(inputs, {**calls, first.name: reached})
        dtypes = [parameter_of(self._model, name).dtype for name in self._shapes]
        return hidden, inputs, [results, dtypes]

    def block(self, number: int, value: Value) -> Value:
        """One block."""
        hidden, inputs, record = value
        if self._record is not record:
            self._arguments = self._replay(value, None)
            self._record = record
        block, (leaves, tree) = self._blocks[number], self._arguments[number]
        args, kwargs = tree_unflatten([*leaves[: block.slot], hidden, *leaves[block.slot + 1 :]], tree)
        out = self._model.get_submodule(block.name)(*args, **kwargs)
        return first_of(out), inputs, record

    def after(self, value: Value) -> Any:
        """The model's output."""
        return self._replay(value, lambda: value[0])

    def _replay(self, value: Value, final: Callable[[], Tensor] | None) -> Any:
        """A forward in which no block runs, and nothing that is discarded.

        Args:
            final: gives what the last block returns; None ends the forward there.

        Returns:
            The model's output, or of each block the leaves and the structure of its arguments.
        """
        arrived, inputs, (results, dtypes) = value
        arguments: list[Any] = []
        given = iter(results)

        def discarded(each: Discarded, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if len(arguments) == len(self._blocks):
                return module(*args, **kwargs)
            leaves = [self._zeros(arrived, *leaf) if isinstance(leaf, tuple) else leaf for leaf in next(given)]
            return tree_unflatten(leaves, each.structure)

        def block(number: int, *args: Any, **kwargs: Any) -> Any:
            each, (leaves, tree) = self._blocks[number], tree_flatten((args, kwargs))
            hidden, leaves[each.slot] = leaves[each.slot], None
            arguments.append((leaves, tree))
            if number < len(self._blocks) - 1:
                return each.result(self._passed(hidden))
            if final is None:
                raise _Reached(arguments)
            return each.result(final())

        calls: dict[str, Callable[..., Any]] = {
            each.name: partial(discarded, each, self._model.get_submodule(each.name)) for each in self._discarded
        }
        calls |= {each.name: partial(block, number) for number, each in enumerate(self._blocks)}
        with self._placeholders(dtypes, arrived), torch.set_grad_enabled(final is not None and torch.is_grad_enabled()):
            return self._run(inputs, calls)

    def _passed(self, hidden: Tensor) -> Tensor:
        """What a block returns that does not run."""
        return hidden

    def _zeros(self, like: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return like.new_zeros(shape, dtype=dtype)

    def _run(self, inputs: Any, calls: Mapping[str, Callable[..., Any]]) -> Any:
        """The forward, without the hooks of the model as a whole; what ends it early, or its output."""
        with standing_in(self._model, calls):
            try:
                return call_model(self._model.forward, inputs)
            except _Reached as reached:
                return reached.result

    @contextmanager
    def _placeholders(self, dtypes: Sequence[torch.dtype], like: Tensor) -> Iterator[None]:
        """Inside, zeros are in the place of parameters before the blocks that this rank does not hold."""
        with ExitStack() as stack:
            for (name, shape), dtype in zip(self._shapes.items(), dtypes, strict=True):
                path, _, leaf = name.rpartition(".")
                held = self._model.get_submodule(path)._parameters
                if leaf not in held:
                    held[leaf] = like.new_zeros((), dtype=dtype).expand(shape)  # type: ignore[assignment]
                    stack.callback(held.pop, leaf)
            yield


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """A model called with its input: a dict is its keyword arguments."""
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def first_of(out: Any) -> Any:
    """The hidden states in what a block returns."""
    return out[0] if isinstance(out, tuple) else out


def parameter_of(model: nn.Module, name: str) -> Tensor:
    path, _, leaf = name.rpartition(".")
    found: Tensor = getattr(model.get_submodule(path), leaf)
    return found
