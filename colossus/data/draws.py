"""Which global generators a user's data code draws from, so that only these are seeded for each of its samples.

To seed all three takes longer than to read a small sample. So the first samples are read with all of them seeded, and
with a look at what they did; afterwards only what was drawn from is seeded for each sample. The other generators stand
still, and are looked at when a batch has been read: where one was drawn from after all, those samples are read again.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
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


class Draws:
    """What is known of one piece of code. Its samples are to be read between `begin` and `learn`, or by `probed`."""

    def __init__(self) -> None:
        self.kinds: set[str] = set()
        #: samples that are still to be read by `probed`
        self.to_probe = PROBED
        self._torch_still = b""

    @property
    def is_probing(self) -> bool:
        """Whether the next sample is to be read by `probed`."""
        return self.to_probe > 0 and len(self.kinds) < len(KINDS)

    def seed_all(self) -> None:
        """From here on seed all generators for each sample."""
        self.kinds.update(KINDS)

    def probed(self, read: Callable[[], Any], seed: int, count: int = 1) -> Any:
        """What is read, one sample or ``count`` at once, with all generators seeded and a look at what they did."""
        self.to_probe = max(0, self.to_probe - count)
        result, kinds = watched(read, seed)
        self.kinds |= kinds
        return result

    def begin(self) -> list[Seeder]:
        """What is to be called with the seed of each sample. The generators are seeded anew."""
        seeders = _seeders()
        for kind in KINDS:
            if kind not in self.kinds:
                seeders[kind](_STILL)
        if TORCH not in self.kinds:
            self._torch_still = _torch_state()
        return [seeders[kind] for kind in KINDS if kind in self.kinds]

    def learn(self) -> bool:
        """Whether a generator was drawn from that was not seeded since `begin`; it is from here on."""
        moved = {
            TORCH: lambda: _torch_state() != self._torch_still,
            PYTHON: lambda: random.getrandbits(64) != _PYTHON_NEXT,
            NUMPY: lambda: np.random.bytes(8) != _NUMPY_NEXT,
        }
        new = {kind for kind in KINDS if kind not in self.kinds and moved[kind]()}
        self.kinds |= new
        return bool(new)


def watched(run: Callable[[], Any], seed: int) -> tuple[Any, set[str]]:
    """What a function returns that starts from this seed, and the generators it drew from (or asked for their state,
    as code does that seeds one of its own by it, or that puts the state back behind its draws)."""
    GLOBAL_RNG.seed(seed)
    before = GLOBAL_RNG.get_state()
    with _Asked() as asked:
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
    """Notes whether the state of a global generator is asked for while this is entered, by this thread."""

    def __init__(self) -> None:
        self.found = False

    def __enter__(self) -> _Asked:
        self._profile, self._of_numpy = sys.getprofile(), np.random.get_state
        np.random.get_state = self._numpy_asked  # what is compiled by Cython has no profile
        self._is_profiled = self._profile is not None and not callable(self._profile)
        if self._is_profiled:  # by a profiler in C (cProfile), which cannot be put back: nothing is known then
            self.found = True
        else:
            sys.setprofile(self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._is_profiled:
            sys.setprofile(self._profile)
        np.random.get_state = self._of_numpy

    def _note(self, frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in _ASKING:
            of = function.__self__
            self.found = self.found or of is torch.default_generator or of is _python_generator()

    def _numpy_asked(self, *args: Any, **options: Any) -> Any:
        self.found = True
        return self._of_numpy(*args, **options)


def _python_generator() -> Any:
    return getattr(random.getrandbits, "__self__", None)
