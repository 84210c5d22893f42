"""Histograms of parameters and gradients: ``hooks = [dict(type="Histograms", every=100)]``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from colossus.comm import collectives
from colossus.config.user_path import user_path
from colossus.context.precision import LOW
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.monitor.hooks.options import HistogramsOptions
from colossus.monitor.hooks.tracker import Histogram, Tracker
from colossus.monitor.row_file import RowFile
from colossus.schedule.executor import StepObserver
from colossus.state.model_parts import parts_of
from colossus.state.model_state_dict import whole_tensors

#: elements at a time: torch counts in float32
_MOST = 1 << 24


class Histograms(Hook, StepObserver):
    """A hook that counts the elements of each parameter and gradient in bins, every ``every`` steps before the update.

    The gradient is divided and clipped. There are ``bins`` bins of equal width between the smallest and the largest
    element. Each element of the whole tensor is counted once, as ``torch.histc`` counts it in one process. One small
    all-reduce computes the ranges of all parameters, another one sums their counts. If replicas have parameters of
    their own, those of the first are counted. Numbers that are not finite are left out.

    Each line of ``histograms.jsonl`` in the run folder is a `Histogram`. The hooks TensorBoard and WandB receive them,
    too.
    """

    def __init__(self, **options: Any) -> None:
        self.options = HistogramsOptions(**options)
        self._kinds = [kind for kind in ("gradients", "weights") if getattr(self.options, kind)]
        self._is_due = False
        self._file: RowFile | None = None

    def on_train_start(self, engine: Engine) -> None:
        self._engine, context, run = engine, engine.context, engine.run
        engine.observers.append(self)
        self._group = context.group(engine.strategy.summed_axes)
        #: names on all ranks; those of buffers have no counts
        self._names = list(whole_tensors(engine.model, context))
        self._own = parts_of(run, replicas_differ=not engine.strategy.exact)
        if context.is_logging_rank:
            path, checkpoints = self.options.path, engine.checkpoints
            continues = checkpoints.resumed_from is not None or checkpoints.is_restart
            file = user_path(path) if path else (run.folder or Path()) / "histograms.jsonl"
            self._file = RowFile(file, engine.completed_steps if continues else None)

    def on_step_start(self, engine: Engine) -> None:
        self._is_due = (engine.completed_steps + 1) % self.options.every == 0

    @torch.no_grad()
    def before_update(self) -> None:
        if not self._is_due:
            return
        self._is_due = False
        device = self._engine.device
        size, bins = len(self._kinds) * len(self._names), self.options.bins
        #: largest number of each tensor, and minus its smallest
        ends = torch.full((size, 2), -math.inf, dtype=torch.float64, device=device)
        for slot, part in self._parts():
            is_finite = part.isfinite()
            largest, smallest = (torch.where(is_finite, sign * part, -math.inf).amax() for sign in (1, -1))
            ends[slot] = torch.maximum(ends[slot], torch.stack((largest, smallest)).double())
        ranges = [
            (-minus_low, high) if minus_low != -high else (high - 1, high + 1)
            for high, minus_low in collectives.all_reduce(ends, self._group, op="max", owned=True).wait().tolist()
        ]
        counts = torch.zeros((size, bins), dtype=torch.int64, device=device)
        for slot, part in self._parts():
            low, high = ranges[slot]
            for piece in part.flatten().split(_MOST) if math.isfinite(low) else ():
                counts[slot] += torch.histc(piece, bins, low, high).long()
        counts = collectives.all_reduce(counts, self._group, owned=True).wait()
        if self._file is not None:
            self._write(ranges, counts.tolist())

    def _parts(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the part of each tensor that this rank counts, with the tensor's number."""
        numbers = {name: number for number, name in enumerate(self._names)}
        for part in self._own:
            for at, kind in enumerate(self._kinds):
                values = part.memory if kind == "weights" else part.memory.grad
                if values is not None and part.writes:
                    local = part.at("", values.to_dense() if values.is_sparse else values).local
                    if local.numel():
                        wide = local.float() if local.dtype in LOW else local
                        yield at * len(self._names) + numbers[part.key], wide.to(self._engine.device)

    def _write(self, ranges: list[tuple[float, float]], counts: list[list[int]]) -> None:
        """Write the histograms, on the logging rank."""
        trackers = [hook for hook in self._engine.checkpoints.hooks if isinstance(hook, Tracker)]
        step, bins = self._engine.completed_steps + 1, self.options.bins
        assert self._file is not None
        for slot, (low, high) in enumerate(ranges):
            if math.isfinite(low):
                kind, name = self._kinds[slot // len(self._names)], self._names[slot % len(self._names)]
                edges = torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist()
                histogram = Histogram(step, kind, name, edges, counts[slot])
                self._file.append(asdict(histogram))
                for tracker in trackers:
                    tracker.add_histogram(histogram)
