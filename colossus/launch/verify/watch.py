"""Watches a forward pass from outside: which samples came in, what each module gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from colossus.launch.verify.prints import row_prints, sample_keys, tensors
from colossus.launch.verify.records import Output, RankStep
from colossus.layers.layer import Layer
from colossus.layers.sharded import to_user

MODEL = "the model"
"""How the output of the whole model is named."""


class ForwardWatch:
    """Notes the outputs of every module that works in the user layout, or can be brought to it.

    What is inside of one of our layers computes on parts, in layouts that only the layer knows, and is left alone. A
    module that runs again in backward (activation checkpointing) must make the same calls as in forward, so prints are
    made there, too; like those of modules that a loss function calls, they are dropped when the next pass begins.
    """

    def __init__(self, model: nn.Module) -> None:
        self.modules = {name or MODEL: type(module).__name__ for name, module in visible_modules(model)}
        self._calls: dict[str, int] = {}
        self._now: dict[str, Output] = {}
        self._parts: dict[str, list[Output]] = {}
        self._leaves: list[str] = []
        self._samples: list[tuple[str, ...]] = []
        model.register_forward_pre_hook(self._begin)
        for name, module in visible_modules(model):
            module.register_forward_hook(self._hook(name or MODEL))

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._calls.clear()
        self._now = {}

    def _hook(self, name: str) -> Any:
        @torch.no_grad()
        def note(module: nn.Module, args: Any, output: Any) -> None:
            found = {}
            for path, tensor in tensors(output):
                whole = to_user(tensor.detach())
                if whole.dim():
                    found[path] = Output(tuple(whole.shape[1:]), row_prints(whole))
            call = self._calls[name] = self._calls.get(name, 0) + 1
            title = name if call == 1 else f"{name}, call {call}"
            self._now.update({f"{title}{path and f', output{path}'}": held for path, held in found.items()})

        return note

    def end_microbatch(self, part: Any) -> None:
        """The forward pass is over; ``part`` is what it was about. Keeps the outputs whose dim 0 counts its samples."""
        rows, self._leaves, keys = sample_keys(part)
        self._samples += keys
        for name, output in self._now.items():
            if output.rows.shape[0] == rows:
                self._parts.setdefault(name, []).append(output)
        self._now = {}

    def take(self) -> RankStep:
        """What was seen since the last call: outputs that every microbatch had, with one shape."""
        rows = len(self._samples)
        outputs = {}
        for name, parts in self._parts.items():
            joined = torch.cat([part.rows for part in parts])
            if joined.shape[0] == rows and len({part.shape for part in parts}) == 1:
                outputs[name] = Output(parts[0].shape, joined)
        seen = RankStep(leaves=self._leaves, samples=self._samples, outputs=outputs)
        self._parts, self._samples = {}, []
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
