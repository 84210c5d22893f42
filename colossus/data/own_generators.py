"""The random generators that a loader, its sampler or its dataset keeps for itself."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState


def parts_of_loader(loader: Any) -> dict[str, Any]:
    """A loader (or any iterable), its samplers and its dataset, by name; those that it has, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    parts = {
        "": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
        "dataset": getattr(loader, "dataset", None),
    }
    found: dict[str, Any] = {}
    for name, part in parts.items():
        if part is not None and not any(part is other for other in found.values()):
            found[name] = part
    return found


def generator_states(loader: Any) -> dict[str, Any]:
    """The state of every generator that is an attribute of a part of the loader, by the attribute's name."""
    return {name: _get_state(generator) for name, generator in _generators(loader)}


def set_generator_states(loader: Any, states: dict[str, Any]) -> None:
    """Put generators into these states; those without one stay as they are."""
    for name, generator in _generators(loader):
        if name in states:
            _set_state(generator, states[name])


class OwnState:
    """What a dataset holds at a moment, as far as its attributes and the generators among them tell; of one that is
    wrapped (``Subset``), too."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._held, self._states = self._now()

    def has_changed(self) -> bool:
        """Whether an attribute is another object now, or a generator another state."""
        held, states = self._now()
        if states != self._states or held.keys() != self._held.keys():
            return True
        return any(held[key] is not self._held[key] for key in held)

    def has_drawn(self) -> bool:
        """Whether a generator among its attributes has another state now."""
        return self._now()[1] != self._states

    def _now(self) -> tuple[dict[tuple[str, str], Any], bytes]:
        parts = parts_of_loader(self._dataset)
        held = {(part, name): value for part in parts for name, value in getattr(parts[part], "__dict__", {}).items()}
        states = generator_states(self._dataset)
        return held, pickle.dumps(states) if states else b""


def _generators(loader: Any) -> Iterator[tuple[str, _Generator]]:
    seen: set[int] = set()
    for part_name, part in parts_of_loader(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _Generator) and id(value) not in seen:
                seen.add(id(value))
                yield f"{part_name}.{name}", value


def _get_state(generator: _Generator) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state()


def _set_state(generator: _Generator, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)
