"""A hook that profiles some steps of a run: ``train.profile = dict(steps=(10, 13))``."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from colossus.arithmetic import aligned
from colossus.comm import collectives
from colossus.comm.objects import all_gather_object
from colossus.comm.step_regions import profiled
from colossus.config.training import Profile
from colossus.engine.fit import Hook
from colossus.engine.results import StepResult
from colossus.monitor.timed_regions import TimedRegions, in_order

FOLDER, SUMMARY = "profile", "summary.json"
#: with more ranks the table has a row for each stage of the pipeline in place of each rank
_MOST_ROWS = 16


class Profiler(Hook):
    """The times of the regions of some steps on all ranks, and their traces by torch.profiler on some ranks.

    It is the last of the hooks.

    After the last of these steps the run folder has

    - ``profile/rank<N>.trace.json.gz`` of each rank that is traced, for ui.perfetto.dev or chrome://tracing;
    - ``profile/summary.json``, from the logging rank, which prints it as a table::

        {"steps": [10, 13],               the first and the last that were profiled
         "parts": ["forward", ..],        in order
         "ranks": [{"rank": 0,
                    "stage": 0,           its index along the pipeline
                    "step_seconds": 0.5,  mean of a step, from the wait for its batch to the end of its last hook
                    "seconds": {"forward": 0.1, ..}}, ..]}   means; they add up to step_seconds

    Collective over all ranks before the first and after the last of the steps.
    """

    def __init__(self, section: Profile) -> None:
        self._section = section
        self._regions: TimedRegions | None = None
        self._first = 0
        #: contexts that end with the profile, and with a step
        self._profile, self._step = ExitStack(), ExitStack()
        self._trace: torch.profiler.profile | None = None

    def on_train_start(self, engine: Any) -> None:
        first, last = self._section.steps
        if engine.completed_steps >= last and engine.context.is_logging_rank:
            print(f"no profile: steps {first} to {last} were over before step {engine.completed_steps}", flush=True)

    def on_step_start(self, engine: Any) -> None:
        first, last = self._section.steps
        step = engine.completed_steps + 1
        if not first <= step <= last:
            return
        if self._regions is None:
            self._regions = TimedRegions(engine.device)
            self._profile.enter_context(profiled(self._regions))
            self._first = step
            self._start_together(engine)
        self._step.enter_context(self._regions.step(step))
        self._regions.wait_for_batch()

    def on_step_end(self, engine: Any, result: StepResult) -> None:
        self._step.close()
        if result.step == self._section.steps[1]:
            self._end(engine)

    def on_train_end(self, engine: Any) -> None:
        self._end(engine)

    def on_exception(self, engine: Any, error: BaseException) -> None:
        self._profile.close()  # ending a step or a trace would wait for a device that may be stuck

    def _start_together(self, engine: Any) -> None:
        """Start the traces, and wait for all ranks, since the first start takes long."""
        ranks = self._section.ranks
        if ranks == "all" or engine.context.rank in ranks:
            os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch prints that it begins and ends, on every rank
            activities = [ProfilerActivity.CPU]
            activities += [ProfilerActivity.CUDA] if engine.device.type == "cuda" else []
            self._trace = torch.profiler.profile(activities=activities)
            self._trace.start()
        engine.strategy.sync_point()
        collectives.barrier(engine.context.group(engine.context.grid.names), engine.device)

    def _end(self, engine: Any) -> None:
        """Write and print the profile. Collective."""
        self._profile.close()
        steps = self._regions.steps if self._regions is not None else []
        self._regions = None
        if not steps:
            return
        folder = (engine.run.folder or Path(".")) / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        trace = folder / f"rank{engine.context.rank}.trace.json.gz"
        if self._trace is not None:
            self._trace.stop()
            self._trace.export_chrome_trace(str(trace))
        engine.strategy.sync_point()
        own = mean_parts(steps), engine.context.rank, engine.context.index("pipeline"), self._trace and str(trace)
        self._trace = None
        of_ranks = all_gather_object(own, engine.context.group(engine.context.grid.names))
        if engine.context.is_logging_rank:
            summary = {
                "steps": [self._first, self._first + len(steps) - 1],
                "parts": in_order([part for parts, *_ in of_ranks for part in parts]),
                "ranks": [
                    {"rank": rank, "stage": stage, "step_seconds": sum(parts.values()), "seconds": parts}
                    for parts, rank, stage, _ in of_ranks
                ],
            }
            (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")
            traces = [f"trace: {path}" for *_, path in of_ranks if path]
            print("\n".join([table(summary), f"table: {folder / SUMMARY}", *traces]), flush=True)


def mean_parts(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each part over all steps; a step without the part counts as 0."""
    parts = in_order([part for step in steps for part in step])
    return {part: fmean(step.get(part, 0.0) for step in steps) for part in parts}


def table(summary: dict[str, Any]) -> str:
    """Return a summary as a table of milliseconds and percent of the step, a row for each rank or stage."""
    ranks, parts = summary["ranks"], summary["parts"]
    stages = sorted({rank["stage"] for rank in ranks})
    rows = [
        (f"rank {rank['rank']}" + (f", stage {rank['stage']}" if len(stages) > 1 else ""), [rank]) for rank in ranks
    ]
    if len(ranks) > _MOST_ROWS:
        rows = [(f"stage {stage}", [rank for rank in ranks if rank["stage"] == stage]) for stage in stages]
    if len(ranks) > 1:
        rows.append(("mean", ranks))
    lines = [["", "step", *parts]]
    for name, members in rows:
        whole = fmean(rank["step_seconds"] for rank in members)
        lines.append([name, f"{whole * 1000:.1f} ms"])
        for part in parts:
            seconds = fmean(rank["seconds"].get(part, 0.0) for rank in members)
            lines[-1].append(f"{seconds * 1000:.1f}  {seconds / whole:3.0%}")
    first, last = summary["steps"]
    return f"where the time of a step goes, mean of steps {first} to {last}, milliseconds and percent:\n" + aligned(
        lines, left_columns={0}
    )
