"""The worker process: ``python -m colossus.launch.worker [--run-dir DIR] CONFIG [section.key=value ...]``.

One per rank. The launcher starts it with the variables torchrun would set; under torchrun and srun the command
itself runs ``run_worker`` in their process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.folder import find_latest, root_of
from colossus.config import Config, ConfigError, Named, load_config
from colossus.context.grid import RankGrid, build_grid
from colossus.launch import causes, failure, finished, run_folder
from colossus.launch.origin import Origin, Taken, choose
from colossus.launch.stop import LAUNCHER_PID, StopSignals, exit_code
from colossus.registry import HOOKS


@dataclass
class _Run:
    """The state of this rank's run so far, for its failure record."""

    rank: int
    stop: StopSignals
    folder: Path | None
    has_launcher: bool
    grid: RankGrid | None = None
    engine: Any = None
    hooks: list[Any] = field(default_factory=list)
    step: int | None = None
    resume: str | None = None
    taken: Taken | None = None
    held: Any = None

    def details(self) -> dict[str, Any]:
        """The fields of a failure record that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # not loaded: then there was no collective either
        return {
            "step": self.step,
            "coordinates": self.grid.coordinates(self.rank) if self.grid is not None else {},
            "collectives": log.recent() if log is not None else [],
            "after_signal": self.stop.received,
        }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m colossus.launch.worker")
    parser.add_argument("config")
    parser.add_argument("--run-dir")
    parser.add_argument("--resume")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args(arguments)
    return run_worker(given.config, given.overrides, run_dir=given.run_dir, resume=given.resume)


def run_worker(
    config_path: str,
    overrides: Sequence[str],
    *,
    run_dir: str | None,
    resume: str | bool | None = None,
) -> int:
    """Train in this process as the rank the environment says. Main thread only.

    Args:
        run_dir: the run folder; without a launcher of ours what the user gave.
        resume: what to load, as the launcher has chosen; without one, whether ``--resume`` was given.

    Returns:
        The exit code when the run went well (0) or was stopped (130, 143). A failure does not return: the process
        ends with 1 (2 for a config error) at once, since destructors of broken process groups can hang.
    """
    launcher = os.environ.get(LAUNCHER_PID)
    stop = StopSignals(
        parent=int(launcher) if launcher else None,
        when_orphaned=finished.abandon,
        when_waiting=finished.beat,
        is_hurried=finished.is_hurried,
    )
    stop.install()
    run = _Run(
        int(os.environ["RANK"]),
        stop,
        Path(run_dir) if run_dir is not None else None,
        has_launcher=launcher is not None,
        resume=resume if isinstance(resume, str) else None,
    )
    thread = threading.get_ident()
    stop.before_hard_end(
        lambda: _write(run, failure.of_stuck_rank(thread, stop.grace_seconds, run.rank, **run.details()))
    )
    try:
        config = load_config(config_path, overrides, int(os.environ["WORLD_SIZE"]))
        run.grid = build_grid(config.parallel)
        code = _train(run, config, lambda: choose(config, config_path, overrides, run_dir=run_dir, resume=bool(resume)))
        finished.mark(run.rank)
        if stop.is_orphaned():
            finished.abandon()
    except BaseException as error:
        code = _fail(run, error)
        _flush()
        os._exit(code)
    return code


def _train(run: _Run, config: Config, origin: Callable[[], Origin]) -> int:
    # torch is imported here, after the signal handlers are installed: it takes seconds
    from colossus.engine.fit import fit
    from colossus.engine.initialize import initialize
    from colossus.monitor.display import make_display
    from colossus.monitor.metrics import Metrics

    engine = run.engine = initialize(config)
    if not run.has_launcher:
        _agree_on_folder(run, engine, origin)
    folder = run.folder
    assert folder is not None
    engine.run_dir, engine.checkpoints.resume_from = folder, run.resume
    metrics, display = Metrics(folder / run_folder.METRICS), make_display(folder)
    user_hooks = [HOOKS.build(hook.spec() if isinstance(hook, Named) else hook) for hook in config.hooks]
    run.hooks = [_beginning(run, config), metrics, display, *user_hooks]

    run.stop.before_hard_end(metrics.flush)
    run.stop.before_hard_end(display.close)
    run.stop.ready(engine.request_stop, config.checkpoint.grace_seconds if config.checkpoint.every else None)
    engine.checkpoints.on_progress = run.stop.progress

    try:
        summary = fit(engine, run.hooks)
    except CheckpointError as error:
        if run.step is None:  # of what was to be loaded
            raise ConfigError(str(error)) from error
        raise
    engine.close()
    if summary.reason == "finished":
        return 0
    signum = summary.stop_signal  # perhaps of another rank
    if not run.has_launcher and engine.context.is_logging_rank:
        print(stopped_line(folder, config, signum), flush=True)
    return exit_code(signum) if signum is not None else 0


def stopped_line(folder: Path | None, config: Config, signum: int | None) -> str:
    """One line on where a stopped run is: read from what it left, so that it is also true after a hard end.

    Args:
        folder: the run folder, None where there is none yet.
    """
    by = f"by {signal.Signals(signum).name} " if signum else ""
    if folder is None:
        return f"stopped {by}before it began"
    row = run_folder.last_metrics(folder)
    if row is None:
        return f"stopped {by}before the first step was complete; run folder {folder}"
    line = f"stopped {by}after step {row['step']}; metrics are in {folder / run_folder.METRICS}"
    if not config.checkpoint.every:
        return line
    with contextlib.suppress(CheckpointError):
        found = find_latest(root_of(config.checkpoint.dir, folder))
        if found is not None:
            return f"{line}; the latest checkpoint is {found}, `colossus launch .. --resume` goes on from there"
    return f"{line}; no checkpoint was saved"


def _beginning(run: _Run, config: Config) -> Any:
    from colossus.engine.hooks import Hook

    class Beginning(Hook):
        """Writes down what begins, and keeps the number of the running step for a failure record."""

        def on_train_start(self, engine: Any) -> None:
            assert run.folder is not None
            if engine.context.is_logging_rank:
                run.held = run_folder.hold(run.folder)
                data = engine.loaders.description if engine.loaders is not None else None
                run_folder.write_start(run.folder, config, data, engine.completed_steps)

        def on_step_start(self, engine: Any) -> None:
            run.step = engine.completed_steps + 1

        def on_step_end(self, engine: Any, result: Any) -> None:
            run.stop.progress()

    return Beginning()


def _agree_on_folder(run: _Run, engine: Any, origin: Callable[[], Origin]) -> None:
    """Under torchrun and srun, where no launcher of ours has chosen the folders, rank 0 does and broadcasts them.

    Raises:
        ConfigError: on every rank, when a folder belongs to another run, or there is nothing to resume.
    """
    from colossus.comm.objects import broadcast_object

    folder, resume, problems = run.folder, None, None
    if engine.context.rank == 0:
        try:
            run.taken = origin().take()
        except ConfigError as error:
            problems = error.problems
        else:
            # what was given each rank finds from where it is
            folder, resume = run.folder or run.taken.folder.resolve(), run.taken.resume
    world = engine.context.group(engine.context.grid.names)
    run.folder, run.resume, problems = broadcast_object((folder, resume, problems), world, 0)
    if problems is not None:
        raise ConfigError(problems)


def _fail(run: _Run, error: BaseException) -> int:
    """Write this rank's record, print what no launcher of ours will print, and return the exit code."""
    record = failure.of_exception(error, run.rank, **run.details())
    _write(run, record)
    if run.stop.received is not None:
        if not isinstance(error, CheckpointError):
            return exit_code(run.stop.received)
        if not run.has_launcher and run.rank == 0:
            print(f"colossus: {error}", file=sys.stderr)
        return 1
    if record.kind == "config":
        if not run.has_launcher and run.rank == 0:
            print(f"colossus: {record.message}", file=sys.stderr)
        return 2
    if not run.has_launcher:
        if record.kind == "error" and run.grid is not None and failure.is_first_to_report(run.folder):
            found = causes.rank_causes([record], {})
            print(causes.block(found, run.grid, run.folder, others=False), file=sys.stderr)
        else:
            print(causes.one_line(record, run.folder), file=sys.stderr)
    return 1


def _write(run: _Run, record: failure.FailureRecord) -> None:
    if run.folder is not None:
        try:
            failure.write(run.folder, record)
        except OSError as error:
            print(f"rank {run.rank}: no failure record ({error}):\n{record.traceback}", file=sys.stderr)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


if __name__ == "__main__":
    sys.exit(main())
