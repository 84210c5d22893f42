"""What a run shows on the terminal: a live display, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from colossus.arithmetic import clock, factors
from colossus.checkpoint.writer import SavedCheckpoint
from colossus.config import model_options
from colossus.config.sizes import describe_zero
from colossus.engine.engine import Engine
from colossus.engine.hooks import Hook
from colossus.engine.results import EvalSummary, StepResult
from colossus.machine import gigabytes
from colossus.monitor.late_results import LateResults
from colossus.monitor.metrics import StepTimer
from colossus.monitor.mfu import Utilisation
from colossus.monitor.peak_memory import peak_memory
from colossus.server import environment


def make_display(folder: Path, stream: TextIO | None = None) -> Display:
    """The display that suits ``stream`` (standard output by default): live on a terminal, else plain lines."""
    stream = stream or sys.stdout
    return LiveDisplay(folder, stream) if stream.isatty() else PlainDisplay(folder, stream)


class Display(Hook):
    """Collects the numbers to show; only the logging rank shows them.

    Speeds are averages since the last line (plain) or over the last steps (live), without evaluations. Where replicas
    do not wait for each other speed and MFU are of one, and say so, as does a loss that is its own.
    """

    def __init__(self, folder: Path, stream: TextIO) -> None:
        self.folder, self.stream = folder, stream
        self.total = 0
        self.shown = False
        #: of the last step whose numbers are there, see `LateResults`
        self.result: StepResult | None = None
        #: with the seconds of each step
        self._results: LateResults[float] = LateResults()
        #: of the last evaluation: loss, and the model's metrics
        self.validation: dict[str, float] = {}
        self.counted = "tokens"
        self.tokens, self.seconds = 0.0, 0.0
        #: whose speed it is, where replicas count for themselves
        self.speed_of = ""
        self._timer = StepTimer()
        self._began = time.monotonic()
        self._replica = 0
        #: steps done before this display began
        self.first = 0
        self._utilisation = Utilisation()

    def on_train_start(self, engine: Engine) -> None:
        self.shown = engine.context.is_logging_rank
        self.total, self.first = engine.config.train.steps, engine.completed_steps
        self._began = time.monotonic()
        options = model_options(engine.config)
        if options is not None:
            self.counted = getattr(options, "counted", self.counted)
        self._utilisation = Utilisation.of(engine)
        if self.shown:
            self.stream.write("\n".join(self.heading(engine)) + "\n")
            self.stream.flush()

    def heading(self, engine: Engine) -> list[str]:
        """What is about to run, in two or three lines."""
        grid = engine.context.grid
        sizes = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "no parallelism"
        size = f", {engine.num_parameters:,} parameters"
        zero = describe_zero(engine.config.parallel)
        sizes += zero and f", {zero}"
        lines = [f"{engine.config.name}: {sizes}, {grid.world_size} process(es) on {engine.device.type}{size}"]
        if environment.is_given():
            places = [f"{each['host']} (process {each['process']})" for each in environment.read().endpoints]
            lines.append(f"parameters at {len(places)} server(s): {', '.join(places)}")
        if engine.loaders is not None:
            lines.append(engine.loaders.description)
            if engine.config.train.eval_every and engine.loaders.validation_missing:
                lines.append(f"no validation: {engine.loaders.validation_missing}")
        lines += engine.strategy.choices_made()
        checkpoints = engine.checkpoints
        if checkpoints.resumed_from is not None:
            where = f"resumed from {checkpoints.resumed_from} at step {self.first}"
            lines.append(f"{where}, saved under {checkpoints.resumed_plan}")
            if self.first >= self.total:
                lines.append(f"no step is left of train.steps = {self.total}: the run in {self.folder} is complete")
        if checkpoints.weights_match is not None:
            count, grown = len(checkpoints.weights_match.sources), checkpoints.weights_match.grown
            more = "".join(f", {name} {saved} of {here} rows" for name, (saved, here) in grown.items())
            shortened = checkpoints.weights_match.shortened
            more += "".join(f", {name} the first {here} of {saved} rows" for name, (saved, here) in shortened.items())
            lines.append(f"{count} parameters and buffers from {checkpoints.weights_from}{more}")
        return lines

    def on_step_start(self, engine: Engine) -> None:
        self._timer.start()

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        self.shown = engine.context.is_logging_rank  # of those that live
        if not self.shown:
            return
        self._replica = engine.context.index("data")
        late = self._results.add(result, self._timer.stop())
        self.memory = peak_memory(engine.device).allocated
        self._take(but=0 if self.is_due(engine, result) else late)
        self.show_step(engine, result)

    def is_due(self, engine: Engine, result: StepResult) -> bool:
        """Whether the numbers of this step are to be shown now, although an accelerator has to be waited for."""
        return False

    def _take(self, *, but: int = 0) -> None:
        self._results.take(self._count, but=but)

    def _count(self, result: StepResult, seconds: float) -> None:
        own = result.replica_tokens
        self.tokens += result.tokens if own is None else own
        self.seconds += seconds
        self.speed_of = "" if own is None else f" (replica {self._replica})"
        self.result = result

    def on_eval_end(self, engine: Engine, summary: EvalSummary) -> None:
        self.validation = {"loss": summary.loss, **summary.metrics}
        if self.shown:
            self.show_evaluation(summary)

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if self.shown:
            self.show_line(
                f"step {saved.step}/{self.total}  checkpoint {_size(saved.num_bytes)}  complete after "
                f"{saved.seconds:.2f} s  training waited {saved.stall_seconds:.3f} s"
            )

    def on_train_end(self, engine: Engine) -> None:
        self._take()
        self.show_end()
        self.close()
        if self.shown and self.result is not None and self.result.step >= self.total:
            self.stream.write(self.summary() + "\n")
            self.stream.flush()

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self.close()

    def show_step(self, engine: Engine, result: StepResult) -> None:
        """After each step.

        Args:
            result: of the step; its numbers are there only if it is the one of ``self.result``.
        """

    def show_end(self) -> None:
        """All numbers are there."""

    def show_evaluation(self, summary: EvalSummary) -> None: ...

    def show_line(self, text: str) -> None:
        """A line that stays."""
        self.stream.write(text + "\n")
        self.stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was. May be called from another thread, and twice."""

    def fields(self) -> list[str]:
        """The numbers of the last step, one string each."""
        assert self.result is not None
        whose = "" if self.result.replica is None else f" (replica {self.result.replica})"
        out = [f"loss {self.result.loss:.4f}{whose}"]
        if self.validation:
            out.append(f"validation {_numbers(self.validation, '  ').removeprefix('loss ')}")
        out += [
            f"grad_norm {self.result.grad_norm:.3g}",
            f"lr {self.result.lr:.3g}",
            f"{_thousands(self.speed)} {self.counted}/s{self.speed_of}",
            f"memory {gigabytes(self.memory)}",
            f"MFU {self.mfu}",
        ]
        if self.result.num_skipped:
            out.append(f"skipped {self.result.num_skipped}")
        return out

    @property
    def speed(self) -> float:
        """Tokens, or what else the loss counts, per second of all ranks, or of this replica's."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def mfu(self) -> str:
        found = self._utilisation.at(self.speed)
        return "N/A" if found is None else f"{found:.1%}"

    def summary(self) -> str:
        """The line that ends a complete run."""
        assert self.result is not None
        some = f" ({self.result.step - self.first} of them since it was resumed)" if self.first else ""
        out = [f"done: {self.result.step} steps{some} in {clock(time.monotonic() - self._began)}"]
        out.append(f"loss {self.result.loss:.4f}")
        if self.validation:
            out.append(f"validation {_numbers(self.validation, ', ')}")
        if self.result.num_skipped:
            out.append(f"{self.result.num_skipped} skipped")
        return f"{', '.join(out)}; run folder {self.folder}"


class PlainDisplay(Display):
    """One line every ``train.log_every`` steps, after the first step and after the last, and one per evaluation."""

    def is_due(self, engine: Engine, result: StepResult) -> bool:
        return (
            result.step in (self.first + 1, self.total)
            or result.step % engine.config.train.log_every == 0
            or result.stop_requested
        )

    def show_step(self, engine: Engine, result: StepResult) -> None:
        if not self.is_due(engine, result):
            return
        step = result.step
        elapsed = time.monotonic() - self._began
        left = clock(elapsed / (step - self.first) * (self.total - step))
        fields = [field for field in self.fields() if not field.startswith("validation")]
        self.show_line("  ".join([f"step {step}/{self.total}", *fields, f"left {left}"]))
        self.tokens = self.seconds = 0.0

    def show_evaluation(self, summary: EvalSummary) -> None:
        self.show_line(f"step {summary.step}/{self.total}  validation {_numbers(self.validation, '  ')}")


class LiveDisplay(Display):
    """A progress bar with the numbers of the last step below it, redrawn in place."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        super().__init__(folder, stream)
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            expand=True,
        )

    def on_train_start(self, engine: Engine) -> None:
        super().on_train_start(engine)
        if not self.shown:
            return
        self._task = self._progress.add_task("train", total=self.total, completed=self.first)
        self._live = Live(self._progress, console=Console(file=self.stream), refresh_per_second=8)
        self._live.start()

    def show_step(self, engine: Engine, result: StepResult) -> None:
        self._progress.update(self._task, completed=result.step)
        self._redraw()
        # an average that forgets: about the last twenty steps
        self.tokens, self.seconds = self.tokens * 0.95, self.seconds * 0.95

    def show_end(self) -> None:
        self._redraw()

    def show_evaluation(self, summary: EvalSummary) -> None:
        self._redraw()

    def show_line(self, text: str) -> None:
        if self._live is None:
            super().show_line(text)
        else:  # above the bar
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _redraw(self) -> None:
        if self._live is not None and self.result is not None:
            self._live.update(Group(self._progress, Text("  ".join(self.fields()))))


def _numbers(named: Mapping[str, float], between: str) -> str:
    """``loss 1.2345, accuracy 0.9812``"""
    return between.join(f"{name} {number:.4f}" for name, number in named.items())


def _thousands(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"


def _size(num_bytes: int) -> str:
    if num_bytes >= 1e9:
        return gigabytes(num_bytes)
    return f"{num_bytes / 1e6:.1f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"
