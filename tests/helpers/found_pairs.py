"""`find_pairs` of a model in this process, under a plan that no rank runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from helpers.ranks import grid_of
from torch import nn

from colossus.context.grid import LayerOptions
from colossus.context.parallel_context import ParallelContext
from colossus.convert.pairs import Pairs, find_pairs
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.registry import TENSOR_MODES

MODES = {"1d": (2,), "2d": (2, 2), "2.5d": (2, 2, 2), "3d": (2, 2, 2)}


def parallel_of(mode: str) -> ModelParallel:
    plan = grid_of(tensor=dict(zip(TENSOR_MODES.get(mode).axes, MODES[mode], strict=True)))
    return model_parallel_of(ParallelContext(plan, options=LayerOptions(tensor_mode=mode), connect=False))


def pairs_of(make: Callable[[], nn.Module], mode: str, *examples: Any) -> Pairs:
    def make_trial() -> nn.Module:
        with torch.device("meta"):
            return make()

    return find_pairs(make_trial, examples, parallel_of(mode))


def of_any_layer(by_name: Any) -> dict[str, str]:
    return {re.sub(r"\.\d+\.", ".", name): value for name, value in by_name.items()}
