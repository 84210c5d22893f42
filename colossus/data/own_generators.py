"""The random generators that a loader, its sampler or its dataset keeps for itself."""

from __future__ import annotations

import logging
import pickle
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from colossus.data.draws import python_generator

log = logging.getLogger("colossus.data")

_Generator = torch.Generator | random.Random | np.random.Generator | np.random.RandomState
#: may be an attribute, too (of what sklearn's ``check_random_state(None)`` gives); seeded for each sample
_GLOBAL = (torch.default_generator, np.random.mtrand._rand, python_generator())


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
    """What a user's data code (a dataset, a ``collate_fn``) holds for itself, as far as its attributes and the
    generators among them tell; of a dataset that is wrapped (``Subset``), too.

    Nothing seeds these generators, which is told when one of them moves.

    Args:
        looks: number of samples (or batches) that are looked at for this.
    """

    def __init__(self, owner: Any, name: str, *, looks: int) -> None:
        self._owner, self._name, self._looks = owner, name, looks
        self._states = self._states_now()

    def attributes(self) -> dict[str, dict[str, Any]]:
        """Those of each part, as they are now."""
        parts = parts_of_loader(self._owner)
        return {name: dict(getattr(part, "__dict__", ())) for name, part in parts.items()}

    def has_changed(self, since: dict[str, dict[str, Any]]) -> bool:
        """Whether an attribute is another object than it was, or a generator has moved since the first sample: to
        compare with each batch would take longer than to read a small one."""
        now = self.attributes()
        is_same = now.keys() == since.keys() and all(
            now[part].keys() == held.keys() and all(now[part][name] is value for name, value in held.items())
            for part, held in since.items()
        )
        return not is_same or self._states_now() != self._states

    def look(self, count: int = 1) -> None:
        """``count`` more were read: warn when a generator has moved, once."""
        if self._looks <= 0:
            return
        self._looks -= count
        moved = dict(self._states_now().items() - self._states.items())
        if moved:
            self._looks = 0
            log.warning(
                "%s draws from a random generator of its own (%s), which colossus does not seed: unless its code does "
                "so each time, what it draws is the same on all data ranks and in all workers, and starts over when a "
                "run goes on from a checkpoint. Draw from the global generators of torch, random or numpy.random: "
                "these are seeded for each sample",
                self._name, ", ".join(name.strip(".") for name in moved),
            )  # fmt: skip

    def _states_now(self) -> dict[str, bytes]:
        return {name: pickle.dumps(state) for name, state in generator_states(self._owner).items()}


def _generators(loader: Any) -> Iterator[tuple[str, _Generator]]:
    seen = {id(generator) for generator in _GLOBAL}
    for part_name, part in parts_of_loader(loader).items():
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, _Generator) and not isinstance(value, random.SystemRandom) and id(value) not in seen:
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
