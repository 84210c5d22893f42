"""Random streams as functions of what they are for, not of the order in which they are asked.

A draw is keyed by (seed, stream, step, microbatch, whatever the caller adds: module name, sharded coordinates).
Two ranks that name the same key draw the same numbers; recomputation, another schedule or a resumed run
name the same key and therefore draw the same numbers again.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def hash_key(*parts: object) -> int:
    """A 63-bit integer that depends on every part and on their order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


class RngStreams:
    """All random numbers of a run. The only state is the position (step, microbatch) and the named generators."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.microbatch = 0
        self._named: dict[str, torch.Generator] = {}

    def key(self, stream: str, *parts: object) -> int:
        """Key of ``stream`` that does not depend on the position (initialisation, data order)."""
        return hash_key(self.seed, stream, *parts)

    def at_position(self, stream: str, device: torch.device, *parts: object) -> torch.Generator:
        """A fresh generator for (seed, stream, step, microbatch, parts)."""
        generator = torch.Generator(device)
        generator.manual_seed(hash_key(self.seed, stream, self.step, self.microbatch, *parts))
        return generator

    def named(self, name: str, *coordinates: object, device: torch.device | str = "cpu") -> torch.Generator:
        """A stateful generator kept under ``name``: the same on ranks that give the same coordinates."""
        if name not in self._named:
            generator = torch.Generator(device)
            generator.manual_seed(self.key(f"named/{name}", *coordinates))
            self._named[name] = generator
        return self._named[name]

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "step": self.step,
            "microbatch": self.microbatch,
            "named": {name: (str(g.device), g.get_state()) for name, g in self._named.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seed, self.step, self.microbatch = state["seed"], state["step"], state["microbatch"]
        self._named = {}
        for name, (device, value) in state["named"].items():
            self._named[name] = torch.Generator(device)
            self._named[name].set_state(value)
