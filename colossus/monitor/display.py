"""The output of a run on the terminal: a live display, or plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from colossus.arithmetic import byte_count, clock, counted
from colossus.checkpoint.save import SavedCheckpoint
from colossus.comm.late import Late
from colossus.config import model_options
from colossus.config.plans import describe_plan
from colossus.engine.engine import Engine
from colossus.engine.fit import Hook
from colossus.engine.results import EvalResult, StepResult
from colossus.monitor.metrics import StepTimer, peak_memory
from colossus.monitor.mfu import Utilisation
from colossus.server.process import has_servers, read_environment


class Display(Hook):
    """The output of a run, from the logging rank.

    On a terminal it is a progress bar with the numbers of the last step below it, redrawn in place. Elsewhere it is one
    line every ``train.log_every`` steps, after the first step and after the last, and one for each evaluation.

    Speeds are averages since the last line, or over the last steps of the bar, without evaluations. If replicas do not
    wait for each other, speed and MFU are those of one replica, and the text says so; so it does for a loss of one
    replica.

    Args:
        folder: the run folder.
        stream: standard output by default.
    """

    def __init__(self, folder: Path, stream: TextIO | None = None) -> None:
        self.folder, self.stream = folder, stream or sys.stdout
        self.shown = False
        #: steps of the run, and steps done before this display began
        self.total = self.first = 0
        #: result of the last step whose numbers have arrived, see `Late`
        self.result: StepResult | None = None
        #: results with the seconds of each step
        self._results: Late[StepResult, float] = Late()
        #: loss and metrics of the last evaluation
        self.validation: dict[str, float] = {}
        self.counted = "tokens"
        self.tokens, self.seconds = 0.0, 0.0
        #: whether the speed is that of one replica
        self.per_replica = False
        self._timer = StepTimer()
        self._began = time.monotonic()
        self._utilisation = Utilisation()
        self._progress: Progress | None = None
        self._live: Live | None = None

    def on_train_start(self, engine: Engine) -> None:
        self.shown = engine.context.is_logging_rank
        self.total, self.first = engine.config.train.steps, engine.completed_steps
        self._began = time.monotonic()
        self.counted = getattr(model_options(engine.config), "counted", self.counted)
        if not self.shown:
            return
        self._utilisation = Utilisation.of(engine)
        self.show_line("\n".join(self.heading(engine)))
        if self.stream.isatty():
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None), TimeElapsedColumn())
            self._progress = Progress(*columns, TextColumn("left"), TimeRemainingColumn(), expand=True)
            self._task = self._progress.add_task("train", total=self.total, completed=self.first)
            self._live = Live(self._progress, console=Console(file=self.stream), refresh_per_second=8)
            self._live.start()

    def heading(self, engine: Engine) -> list[str]:
        """Return the description of the run that is about to start, in two or three lines."""
        grid, loaders, checkpoints = engine.context.grid, engine.loaders, engine.checkpoints
        lines = [
            f"{engine.config.name}: {describe_plan(engine.config)}, {counted(grid.world_size, 'process', 'es')} on "
            f"{engine.device.type}, {engine.num_parameters:,} parameters"
        ]
        if has_servers():
            places = [f"{endpoint['host']} (process {endpoint['process']})" for endpoint in read_environment()[0]]
            lines.append(f"parameters at {counted(len(places), 'server')}: {', '.join(places)}")
        if loaders is not None:
            lines.append(loaders.description)
            if engine.config.train.eval_every and loaders.validation_missing:
                lines.append(f"no validation: {loaders.validation_missing}")
        lines += engine.strategy.choices_made()
        lines += engine.group_rules
        if checkpoints.resumed_from is not None:
            where = f"resumed from {checkpoints.resumed_from} at step {self.first}"
            lines.append(f"{where}, saved under {checkpoints.resumed_plan}")
            if self.first >= self.total:
                lines.append(f"no step is left of train.steps = {self.total}: the run in {self.folder} is complete")
        if checkpoints.weights_match is not None:
            match = checkpoints.weights_match
            more = [f"the first {min(rows)} rows of {name}" for name, rows in match.resized.items()]
            loaded = f"{len(match.sources)} parameters and buffers from {checkpoints.weights_from}"
            lines.append(", ".join([loaded, *more]))
        return lines

    def on_step_start(self, engine: Engine) -> None:
        self._timer.start()

    def on_step_end(self, engine: Engine, result: StepResult) -> None:
        self.shown = engine.context.is_logging_rank  # which changes when a rank dies
        if not self.shown:
            return
        step = result.step
        is_end = step in (self.first + 1, self.total) or result.stop_requested
        # a line shows the numbers of its own step, although that waits for an accelerator
        has_line = self._progress is None and (is_end or step % engine.config.train.log_every == 0)
        late = self._results.add(result, self._timer.stop())
        self.memory, _ = peak_memory(engine.device)
        self._results.take(self._count, but=0 if has_line else late)
        if has_line:
            remaining = clock((time.monotonic() - self._began) / (step - self.first) * (self.total - step))
            self.show_line("  ".join([f"step {step}/{self.total}", *self.fields(), f"left {remaining}"]))
            self.tokens = self.seconds = 0.0
        elif self._progress is not None:
            self._progress.update(self._task, completed=step)
            self._redraw()
            # an average that forgets: about the last twenty steps
            self.tokens, self.seconds = self.tokens * 0.95, self.seconds * 0.95

    def _count(self, result: StepResult, seconds: float) -> None:
        own = result.replica_tokens
        self.tokens += result.tokens if own is None else own
        self.seconds += seconds
        self.per_replica = own is not None
        self.result = result

    def on_eval_end(self, engine: Engine, summary: EvalResult) -> None:
        self.validation = {"loss": summary.loss, **summary.metrics, **summary.more}
        if self._live is not None:
            self._redraw()
        elif self.shown:
            self.show_line(f"step {summary.step}/{self.total}  {self.validated('  ')}")

    def on_checkpoint(self, engine: Engine, saved: SavedCheckpoint) -> None:
        if self.shown:
            self.show_line(
                f"step {saved.step}/{self.total}  checkpoint {byte_count(saved.num_bytes)}  complete after "
                f"{saved.seconds:.2f} s  training waited {saved.stall_seconds:.3f} s"
            )

    def on_train_end(self, engine: Engine) -> None:
        self._results.take(self._count)
        self._redraw()
        self.close()
        if self.shown and self.result is not None and self.result.step >= self.total:
            self.show_line(self.summary(self.result))

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self.close()

    def show_line(self, text: str) -> None:
        """Show a line that stays, above the bar."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False)
        else:
            self.stream.write(text + "\n")
            self.stream.flush()

    def close(self) -> None:
        """Leave the terminal as it was. May be called from another thread, and twice."""
        live, self._live = self._live, None
        if live is not None:
            live.stop()

    def _redraw(self) -> None:
        if self._live is not None and self._progress is not None and self.result is not None:
            loss, *rest = self.fields()
            validated = [self.validated("  ").replace("validation loss", "validation")] if self.validation else []
            self._live.update(Group(self._progress, Text("  ".join([loss, *validated, *rest]))))

    def fields(self) -> list[str]:
        """Return the numbers of the last step, one string each."""
        assert self.result is not None
        speed = self.tokens / self.seconds if self.seconds else 0.0
        mfu = self._utilisation.at(speed)
        whose = "" if self.result.replica is None else f" (replica {self.result.replica})"
        return [
            f"loss {self.result.loss:.4f}{whose}",
            f"grad_norm {self.result.grad_norm:.3g}",
            f"lr {self.result.lr:.3g}",
            f"{_thousands(speed)} {self.counted}/s{' a replica' if self.per_replica else ''}",
            f"memory {byte_count(self.memory)}",
            f"MFU {'N/A' if mfu is None else f'{mfu:.1%}'}",
            *([f"skipped {self.result.num_skipped}"] if self.result.num_skipped else []),
        ]

    def validated(self, between: str) -> str:
        """Return the numbers of the last evaluation: ``validation loss 1.2345, accuracy 0.9812``."""
        return "validation " + between.join(f"{name} {number:.4f}" for name, number in self.validation.items())

    def summary(self, result: StepResult) -> str:
        """Return the line that ends a complete run."""
        some = f" ({result.step - self.first} of them since it was resumed)" if self.first else ""
        done = f"done: {result.step} steps{some} in {clock(time.monotonic() - self._began)}, loss {result.loss:.4f}"
        validated = self.validated(", ") if self.validation else ""
        skipped = f"{result.num_skipped} skipped" if result.num_skipped else ""
        return ", ".join(filter(None, [done, validated, skipped])) + f"; run folder {self.folder}"


def _thousands(number: float) -> str:
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.1f}{letter}"
    return f"{number:.0f}"
