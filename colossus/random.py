"""Keys of random numbers, and the global generators of this process. Importing it loads no torch.

`hash_key` makes one key from printable parts; `seed_words` makes many at once from integers, for samples.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

DATA_KEY = 0x64617461  # "data": keeps the words apart from other users of numpy's SeedSequence with the run's seed


def hash_key(*parts: object) -> int:
    """Return a 63-bit key that depends on the type and text of every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def seed_words(seed: int, key: Sequence[int], count: int) -> np.ndarray:
    """Return ``[count]`` uint64 words, a pure function of ``seed`` and ``key``; the first do not depend on ``count``.

    Raises:
        ValueError: a negative seed.
    """
    check_seed(seed)
    return np.random.SeedSequence(seed, spawn_key=(DATA_KEY, *key)).generate_state(count, np.uint64)


def derive_seeds(seed: int, key: Sequence[int], count: int = 1) -> list[int]:
    """Return ``count`` 63-bit seeds, a pure function of ``seed`` and ``key``, for places in the data."""
    seeds: list[int] = (seed_words(seed, (1, *key), count) >> np.uint64(1)).tolist()
    return seeds


def check_seed(seed: int) -> None:
    """Raise ValueError for a negative run seed."""
    if seed < 0:
        raise ValueError(f"seed = {seed} is negative; train.seed must be 0 or more")


#: states of torch's generators on each device, then of Python's and numpy's (None if they are not part of it)
RngState = tuple[list["torch.Tensor"], Any, Any]


class GlobalRng:
    """The global generators of this process: those that code draws from without naming one.

    Args:
        devices: the devices whose torch generators are part of it.
        torch_only: exclude Python's `random` and numpy's legacy generator.
    """

    def __init__(self, devices: Sequence[torch.device | str] = ("cpu",), *, torch_only: bool = False) -> None:
        self.devices = tuple(devices)
        self.torch_only = torch_only

    def get_state(self) -> RngState:
        states = [_torch_generator(device).get_state() for device in self.devices]
        return (states, None, None) if self.torch_only else (states, random.getstate(), np.random.get_state())

    def set_state(self, state: RngState) -> None:
        of_torch, of_python, of_numpy = state
        for device, value in zip(self.devices, of_torch, strict=True):
            _torch_generator(device).set_state(value)
        if not self.torch_only:
            random.setstate(of_python)
            np.random.set_state(of_numpy)

    def seed(self, seed: int, for_program: int | None = None) -> None:
        """Start from ``seed``; Python's and numpy's generators from ``for_program`` if it is not None."""
        for device in self.devices:
            _torch_generator(device).manual_seed(seed)
        if not self.torch_only:
            seed = seed if for_program is None else for_program
            random.seed(seed)
            np.random.seed(seed % 2**32)

    @contextmanager
    def preserved(self, seed: int | None = None) -> Iterator[None]:
        """Restore the states at the end. Inside, start from ``seed`` (None: from the current states)."""
        state = self.get_state()
        try:
            if seed is not None:
                self.seed(seed)
            yield
        finally:
            self.set_state(state)


@contextmanager
def drawing_aside(name: str, number: int, device: torch.device) -> Iterator[None]:
    """Draw random numbers inside the context from separate streams, keyed by the generators' seeds and the name.

    The generators are afterwards as if nothing had been drawn inside.
    """
    rng = GlobalRng(("cpu",) if device.type == "cpu" else ("cpu", device))
    state = rng.get_state()
    of_torch, of_program = _torch_generator("cpu").initial_seed(), random.getrandbits(63)
    try:
        rng.seed(hash_key(of_torch, name, number), hash_key(of_program, name, number))
        yield
    finally:
        rng.set_state(state)


def _torch_generator(device: torch.device | str) -> torch.Generator:
    import torch  # here, because the order of samples is computed without torch

    device = torch.device(device)
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


#: all generators of a process on the CPU, without those of accelerators
GLOBAL_RNG = GlobalRng()
