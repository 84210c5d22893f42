"""Watches forward passes from outside: which samples came in, what each module gave."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from colossus.layers.layer import Layer
from colossus.layers.sharded import to_user
from colossus.verify.fingerprints import row_prints, sample_keys, tensors
from colossus.verify.records import Call, Output, RankStep

MODEL = "the model"
"""How the output of the whole model is named."""


class ForwardWatch:
    """Notes the outputs of every module that works in the user layout, or can be brought to it.

    A `ForwardObserver` of the engine's stages: the model itself is not called under a pipeline, so that its output is
    what the last stage returns. What is inside of one of our layers computes on parts, in layouts that only the layer
    knows, and is left alone. A module that runs again in backward (activation checkpointing) must make the same calls
    as in forward, so prints are made there, too; like those of modules that a loss function calls, they are dropped
    when the next forward begins.

    Args:
        last: number of the last stage.
    """

    def __init__(self, model: nn.Module, last: int) -> None:
        self.modules = {name or MODEL: type(module).__name__ for name, module in visible_modules(model)}
        self._last, self._stage = last, 0
        self._counts: Counter[str] = Counter()
        self._now: dict[Call, Output] = {}
        self._parts: dict[Call, dict[int, Output]] = {}
        self._calls: dict[tuple[int, str], int] = {}
        self._leaves: list[str] = []
        self._samples: dict[int, list[tuple[str, ...]]] = {}
        for name, module in visible_modules(model):
            if name:
                module.register_forward_hook(self._hook(name))

    def begin(self, stage: int, microbatch: int) -> None:
        self._stage = stage
        self._counts.clear()
        self._now = {}

    def end(self, stage: int, microbatch: int, output: Any, part: Any) -> None:
        """Keep the outputs whose dim 0 counts the samples; these come once, whatever stages the rank has."""
        if stage == self._last:
            self._note(MODEL, output)
        if microbatch not in self._samples:
            _, self._leaves, self._samples[microbatch] = sample_keys(part)
        rows = len(self._samples[microbatch])
        for call, held in self._now.items():
            if held.rows.shape[0] == rows:
                self._parts.setdefault(call, {})[microbatch] = held
        for name, count in self._counts.items():
            self._calls[stage, name] = max(count, self._calls.get((stage, name), 0))
        self._now = {}

    def _hook(self, name: str) -> Any:
        return lambda module, args, output: self._note(name, output)

    @torch.no_grad()
    def _note(self, name: str, output: Any) -> None:
        self._counts[name] += 1
        for path, tensor in tensors(output):
            whole = to_user(tensor.detach())
            if whole.dim():
                call = Call(self._stage, name, self._counts[name], path)
                self._now[call] = Output(tuple(whole.shape[1:]), row_prints(whole))

    def take(self) -> RankStep:
        """What was seen since the last call: outputs that every microbatch had, with one shape."""
        order = sorted(self._samples)
        outputs = {}
        for call, parts in self._parts.items():
            shapes = {part.shape for part in parts.values()}
            if len(parts) == len(order) and len(shapes) == 1:
                outputs[call] = Output(shapes.pop(), torch.cat([parts[microbatch].rows for microbatch in order]))
        samples = [key for microbatch in order for key in self._samples[microbatch]]
        seen = RankStep(leaves=self._leaves, samples=samples, outputs=outputs, calls=self._calls)
        self._parts, self._samples, self._calls = {}, {}, {}
        return seen


def visible_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules by name, but for those inside of our layers."""
    seen: set[int] = set()

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        yield name, module
        if not isinstance(module, Layer):
            for leaf, child in module.named_children():
                yield from walk(child, f"{name}.{leaf}" if name else leaf)

    return walk(model, "")
