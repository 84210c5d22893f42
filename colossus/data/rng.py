"""Random numbers that a user's data code draws (augmentation, shuffling, worker seeds).

The loader seeds torch, `random` and numpy's global generator before it calls such code, from (run seed, place in the
data), and puts their states back afterwards. So all ranks of one model draw the same, a resumed run draws what the
uninterrupted one did, and reading data never shifts another stream.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def preserved_rng() -> Iterator[None]:
    """Put back the state of the three global generators of this process (CPU) at the end."""
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def seed_global_rng(seed: int) -> None:
    """Seed the three global generators; the accelerator's are left alone."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
