"""Which global generators a user's data code draws from, so that only these are seeded for each of its samples.

To seed all three takes longer than to read a small sample. So the first samples are read with all of them seeded, and
with a look at what they did; afterwards only what was drawn from is seeded for each sample. The other generators stand
still, and are looked at when a batch has been read: whether one was drawn from after all, or asked for its state.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, wraps
from types import FrameType, TracebackType
from typing import Any

import numpy as np
import torch

from colossus.random import GLOBAL_RNG, RngState

TORCH, PYTHON, NUMPY = KINDS = ("torch", "random", "numpy.random")
#: samples that are read with a look at what each of them does
PROBED = 32
_STILL = 0
_PYTHON_NEXT = random.Random(_STILL).getrandbits(64)
_NUMPY_NEXT = np.random.RandomState(_STILL).bytes(8)
#: functions of generators that tell a state without changing it
_ASKING = frozenset(("initial_seed", "get_state", "getstate"))

Seeder = Callable[[int], object]


def _seed_numpy(seed: int) -> None:
    np.random.seed(seed % 2**32)


def _seeders() -> dict[str, Seeder]:
    return {TORCH: torch.default_generator.manual_seed, PYTHON: random.seed, NUMPY: _seed_numpy}


@dataclass
class Reading:
    """Of samples that are read together.

    Attributes:
        seeders: what is to be called with the seed of each sample.
        missed: at the end, the generators that should have been among them.
    """

    seeders: list[Seeder]
    missed: set[str]


class Draws:
    """What is known of one piece of code. Its samples are to be read by `probed`, or in `reading`."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        #: samples that are still to be read by `probed`
        self.to_probe = PROBED

    @property
    def is_probing(self) -> bool:
        """Whether the next sample is to be read by `probed`."""
        return self.to_probe > 0 and len(self.kinds) < len(KINDS)

    def probed(self, read: Callable[[], Any], seed: int, count: int = 1) -> Any:
        """What is read, one sample or ``count`` at once, with all generators seeded and a look at what they did."""
        self.to_probe = max(0, self.to_probe - count)
        result, kinds = watched(read, seed)
        self.kinds |= kinds
        return result

    @contextmanager
    def reading(self) -> Iterator[Reading]:
        """Samples are read inside, the generators seeded anew. What is missed once is not missed the next time."""
        seeders = _seeders()
        reading = Reading([seeders[kind] for kind in KINDS if kind in self.kinds], set())
        still = [kind for kind in KINDS if kind not in self.kinds]
        if not still:
            yield reading
            return
        for kind in still:
            seeders[kind](_STILL)
        of_torch = _torch_state() if TORCH in still else b""
        with _Asked() as asked:
            yield reading
        moved = {
            TORCH: lambda: _torch_state() != of_torch,
            PYTHON: lambda: random.getrandbits(64) != _PYTHON_NEXT,
            NUMPY: lambda: np.random.bytes(8) != _NUMPY_NEXT,
        }
        reading.missed = {kind for kind in still if asked.found or moved[kind]()}
        self.kinds |= reading.missed


def watched(run: Callable[[], Any], seed: int, *, closely: bool = True) -> tuple[Any, set[str]]:
    """What a function returns that starts from this seed, and the generators it drew from (or asked for their state,
    as code does that seeds one of its own by it, or that puts the state back behind its draws).

    Args:
        closely: also with a look at every call, which takes time, and finds out who asks by another name than that in
            the generator's module.
    """
    GLOBAL_RNG.seed(seed)
    before = GLOBAL_RNG.get_state()
    with _Asked(closely=closely) as asked:
        result = run()
    return result, set(KINDS) if asked.found else _moved(before, GLOBAL_RNG.get_state())


def _torch_state() -> bytes:
    return torch.default_generator.get_state().numpy().tobytes()


def _moved(before: RngState, after: RngState) -> set[str]:
    of_numpy = [(state[0], state[1].tobytes(), *state[2:]) for state in (before[2], after[2])]
    same = {
        TORCH: before[0][0].numpy().tobytes() == after[0][0].numpy().tobytes(),
        PYTHON: before[1] == after[1],
        NUMPY: of_numpy[0] == of_numpy[1],
    }
    return {kind for kind in KINDS if not same[kind]}


class _Asked:
    """Notes whether the state of a global generator is asked for by this thread while this is entered.

    Args:
        closely: look at every call of this thread besides. A profiler in C (cProfile), which could not be put back,
            is left alone.
    """

    def __init__(self, *, closely: bool = False) -> None:
        self.found = False
        self._closely = closely

    def __enter__(self) -> _Asked:
        _NOTING.begin()
        self._outer = getattr(_OF_THREAD, "asked", None)
        _OF_THREAD.asked = self
        self._profile = sys.getprofile()
        self._closely = self._closely and (self._profile is None or callable(self._profile))
        if self._closely:
            sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._closely:
            sys.setprofile(self._profile)
        _OF_THREAD.asked = self._outer
        if self._outer is not None:
            self._outer.found |= self.found
        _NOTING.end()

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in _ASKING:
            of = function.__self__
            self.found = self.found or of is torch.default_generator or of is python_generator()


#: ``asked``: the `_Asked` that each thread is in
_OF_THREAD = threading.local()


class _Noting:
    """The functions that tell the state of a global generator, replaced by others that note it, too, while a thread is
    in an `_Asked`. Who keeps one of the others (a module that is imported meanwhile) keeps what tells the same."""

    #: ``torch.random.fork_rng`` asks by the name in ``torch``
    _TELLING = (
        (random, "getstate"),
        (np.random, "get_state"),
        *((module, name) for module in (torch, torch.random) for name in ("get_rng_state", "initial_seed")),
    )

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._count = 0
        self._told_by: list[Callable[..., Any]] = []
        # a worker that is forked finds it free
        os.register_at_fork(
            before=self._lock.acquire, after_in_parent=self._lock.release, after_in_child=self._lock.release
        )

    def begin(self) -> None:
        with self._lock:
            if not self._count:
                self._told_by = [getattr(module, name) for module, name in self._TELLING]
                self._set([_noting(function) for function in self._told_by])
            self._count += 1

    def end(self) -> None:
        with self._lock:
            self._count -= 1
            if not self._count:
                self._set(self._told_by)

    def _set(self, functions: list[Callable[..., Any]]) -> None:
        for (module, name), function in zip(self._TELLING, functions, strict=True):
            setattr(module, name, function)


@cache
def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def noting(*args: Any, **options: Any) -> Any:
        asked = getattr(_OF_THREAD, "asked", None)
        if asked is not None:
            asked.found = True
        return function(*args, **options)

    return noting


_NOTING = _Noting()


def python_generator() -> Any:
    return getattr(random.getrandbits, "__self__", None)
