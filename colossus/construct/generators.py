"""The generators of a user's own in a constructor that is traced: what draws from one is replayed in its order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map


@dataclass(frozen=True, eq=False)
class GeneratorRef:
    """A generator as an operation met it.

    Attributes:
        key: connects all operations that draw from it, as a storage does those that touch it.
        state: what the constructor has set it to since the operation before (a seed); None where it has gone on.
    """

    key: int
    state: Tensor | None


class TracedGenerators:
    """Stands for each generator by a copy, from which recorded operations draw when they run.

    The generator itself draws a number at each operation, only so that a constructor that seeds it again, with the same
    seed even, is noticed. At the end it has the state that the constructor or its caller gave it last: a second build
    finds what the first one found, whatever a plan has built and replayed on this rank.
    """

    def __init__(self) -> None:
        self._originals: dict[int, torch.Generator] = {}
        self._copies: dict[int, torch.Generator] = {}
        self._given: dict[int, Tensor] = {}
        self._left: dict[int, Tensor] = {}

    def refer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of an operation, with a `GeneratorRef` in the place of a generator."""
        if not any(isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))):
            return args, kwargs
        with _disable_current_modes():
            args, kwargs = tree_map(self._refer, (args, kwargs))
        return args, kwargs

    def _refer(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Generator) or leaf is torch.default_generator:
            return leaf
        key, state = id(leaf), leaf.get_state()
        has_gone_on = key in self._left and torch.equal(state, self._left[key])
        if not has_gone_on:
            self._originals[key] = leaf  # kept, so that no other object gets its id
            self._given[key] = state
        torch.rand((), generator=leaf, device=leaf.device)
        self._left[key] = leaf.get_state()
        return GeneratorRef(key, None if has_gone_on else state)

    def draw_from(self, ref: GeneratorRef) -> torch.Generator:
        """What the operation of this reference draws from, now that all before it have."""
        copy = self._copies.get(ref.key)
        if copy is None:
            copy = self._copies[ref.key] = torch.Generator(self._originals[ref.key].device)
        if ref.state is not None:
            copy.set_state(ref.state)
        return copy

    def restore(self) -> None:
        """Give every generator the state that it was given last, unless it was given another one since."""
        for key, generator in self._originals.items():
            if torch.equal(generator.get_state(), self._left[key]):
                generator.set_state(self._given[key])
