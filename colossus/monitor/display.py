"""What a run shows on the terminal: a live display, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from colossus.arithmetic import byte_count, clock, factors
from colossus.checkpoint.writer import SavedCheckpoint
from colossus.config import model_options
from colossus.config.plans import describe_zero
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult, StepResult
from colossus.monitor.late_results import LateResults
from colossus.monitor.metrics import StepTimer, peak_memory
from colossus.monitor.mfu import Utilisation
from colossus.server.process import has_servers, read_environment


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
        self.shown = False
        #: steps of the run, and those done before this display began
        self.total = self.first = 0
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
        self._utilisation = Utilisation()

    def on_train_start(self, engine: Engine) -> None:
        self.shown = engine.context.is_logging_rank
        self.total, self.first = engine.config.train.steps, engine.completed_steps
        self._began = time.monotonic()
        self.counted = getattr(model_options(engine.config), "counted", self.counted)
        self._utilisation = Utilisation.of(engine)
        if self.shown:
            self._write("\n".join(self.heading(engine)))

    def heading(self, engine: Engine) -> list[str]:
        """What is about to run, in two or three lines."""
        grid, loaders, checkpoints = engine.context.grid, engine.loaders, engine.checkpoints
        sizes = factors({name: size for name, size in grid.sizes.items() if size > 1}) or "no parallelism"
        zero = describe_zero(engine.config.parallel)
        lines = [
            f"{engine.config.name}: {sizes}, {grid.world_size} process(es) on {engine.device.type}, "
            f"{engine.num_parameters:,} parameters{zero and f', {zero}'}"
        ]
        if has_servers():
            places = [f"{each['host']} (process {each['process']})" for each in read_environment().endpoints]
            lines.append(f"parameters at {len(places)} server(s): {', '.join(places)}")
        if loaders is not None:
            lines.append(loaders.description)
            if engine.config.train.eval_every and loaders.validation_missing:
                lines.append(f"no validation: {loaders.validation_missing}")
        lines += engine.strategy.choices_made()
        if checkpoints.resumed_from is not None:
            where = f"resumed from {checkpoints.resumed_from} at step {self.first}"
            lines.append(f"{where}, saved under {checkpoints.resumed_plan}")
            if self.first >= self.total:
                lines.append(f"no step is left of train.steps = {self.total}: the run in {self.folder} is complete")
        if checkpoints.weights_match is not None:
            match = checkpoints.weights_match
            more = [f"{name} {saved} of {here} rows" for name, (saved, here) in match.grown.items()]
            more += [f"{name} the first {here} of {saved} rows" for name, (saved, here) in match.shortened.items()]
            found = f"{len(match.sources)} parameters and buffers from {checkpoints.weights_from}"
            lines.append(", ".join([found, *more]))
        return lines

    def on_step_start(self, engine: Engine) -> None:
        self._timer.start()

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        self.shown = engine.context.is_logging_rank  # of those that live
        if not self.shown:
            return
        self._replica = engine.context.index("data")
        late = self._results.add(result, self._timer.stop())
        self.memory, _ = peak_memory(engine.device)
        self._results.take(self._count, but=0 if self.is_due(engine, result) else late)
        self.show_step(engine, result)

    def is_due(self, engine: Engine, result: StepResult) -> bool:
        """Whether the numbers of this step are to be shown now, although an accelerator has to be waited for."""
        return False

    def _count(self, result: StepResult, seconds: float) -> None:
        own = result.replica_tokens
        self.tokens += result.tokens if own is None else own
        self.seconds += seconds
        self.speed_of = "" if own is None else f" (replica {self._replica})"
        self.result = result

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        self.validation = {"loss": summary.loss, **summary.metrics}
        if self.shown:
            self.show_evaluation(summary)

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if self.shown:
            self.show_line(
                f"step {saved.step}/{self.total}  checkpoint {byte_count(saved.num_bytes)}  complete after "
                f"{saved.seconds:.2f} s  training waited {saved.stall_seconds:.3f} s"
            )

    def on_train_end(self, engine: Engine) -> None:
        self._results.take(self._count)
        self.show_end()
        self.close()
        if self.shown and self.result is not None and self.result.step >= self.total:
            self._write(self.summary(self.result))

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self.close()

    def show_step(self, engine: Engine, result: StepResult) -> None:
        """After each step.

        Args:
            result: of the step; its numbers are there only if it is the one of ``self.result``.
        """

    def show_end(self) -> None:
        """All numbers are there."""

    def show_evaluation(self, summary: EvalResult) -> None: ...

    def show_line(self, text: str) -> None:
        """A line that stays."""
        self._write(text)

    def close(self) -> None:
        """Leave the terminal as it was. May be called from another thread, and twice."""

    def _write(self, text: str) -> None:
        self.stream.write(text + "\n")
        self.stream.flush()

    def fields(self) -> list[str]:
        """The numbers of the last step, one string each."""
        assert self.result is not None
        speed = self.tokens / self.seconds if self.seconds else 0.0
        mfu = self._utilisation.at(speed)
        whose = "" if self.result.replica is None else f" (replica {self.result.replica})"
        return [
            f"loss {self.result.loss:.4f}{whose}",
            f"grad_norm {self.result.grad_norm:.3g}",
            f"lr {self.result.lr:.3g}",
            f"{_thousands(speed)} {self.counted}/s{self.speed_of}",
            f"memory {byte_count(self.memory)}",
            f"MFU {'N/A' if mfu is None else f'{mfu:.1%}'}",
            *([f"skipped {self.result.num_skipped}"] if self.result.num_skipped else []),
        ]

    def validated(self, between: str) -> str:
        """``validation loss 1.2345, accuracy 0.9812``"""
        return "validation " + between.join(f"{name} {number:.4f}" for name, number in self.validation.items())

    def summary(self, result: StepResult) -> str:
        """The line that ends a complete run."""
        some = f" ({result.step - self.first} of them since it was resumed)" if self.first else ""
        done = f"done: {result.step} steps{some} in {clock(time.monotonic() - self._began)}, loss {result.loss:.4f}"
        validated = self.validated(", ") if self.validation else ""
        skipped = f"{result.num_skipped} skipped" if result.num_skipped else ""
        return ", ".join(filter(None, [done, validated, skipped])) + f"; run folder {self.folder}"


class PlainDisplay(Display):
    """One line every ``train.log_every`` steps, after the first step and after the last, and one per evaluation."""

    def is_due(self, engine: Engine, result: StepResult) -> bool:
        is_end = result.step in (self.first + 1, self.total) or result.stop_requested
        return is_end or result.step % engine.config.train.log_every == 0

    def show_step(self, engine: Engine, result: StepResult) -> None:
        if not self.is_due(engine, result):
            return
        step = result.step
        left = clock((time.monotonic() - self._began) / (step - self.first) * (self.total - step))
        self.show_line("  ".join([f"step {step}/{self.total}", *self.fields(), f"left {left}"]))
        self.tokens = self.seconds = 0.0

    def show_evaluation(self, summary: EvalResult) -> None:
        self.show_line(f"step {summary.step}/{self.total}  {self.validated('  ')}")


class LiveDisplay(Display):
    """A progress bar with the numbers of the last step below it, redrawn in place."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        super().__init__(folder, stream)
        self._live: Live | None = None
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeElapsedColumn())
        self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), expand=True)

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

    def show_evaluation(self, summary: EvalResult) -> None:
        self._redraw()

    def show_line(self, text: str) -> None:
        if self._live is None:
            self._write(text)
        else:  # above the bar
            self._live.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _redraw(self) -> None:
        if self._live is not None and self.result is not None:
            loss, *rest = self.fields()
            validated = [self.validated("  ").replace("validation loss", "validation")] if self.validation else []
            self._live.update(Group(self._progress, Text("  ".join([loss, *validated, *rest]))))


def _thousands(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
