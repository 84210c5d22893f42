"""The global random generators of a rank: code of the user's outside of forwards draws from them."""

from __future__ import annotations

from typing import Any

import torch

from colossus.random import GlobalRng


def _generators(device: torch.device) -> GlobalRng:
    return GlobalRng(tuple({"cpu": torch.device("cpu"), str(device): device}.values()))


def rng_state(device: torch.device) -> dict[str, Any]:
    """Of torch on the host and the rank's device, of Python and of numpy."""
    of_torch, (version, numbers, gauss), of_numpy = _generators(device).get_state()
    return {
        "torch": of_torch,
        "python": [version, torch.tensor(numbers, dtype=torch.int64), gauss],
        "numpy": of_numpy,
    }


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    version, numbers, gauss = state["python"]
    python = version, tuple(numbers.tolist()), gauss
    _generators(device).set_state((state["torch"], python, state["numpy"]))
