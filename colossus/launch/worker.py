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
from typing import Any, TextIO

from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config, ConfigError, Named, load_config
from colossus.context.grid import RankGrid, build_grid
from colossus.launch import causes, failure, finished, nccl_watch, recordings, run_folder
from colossus.launch.device_check import is_on_cuda, ranks_may_share
from colossus.launch.origin import Origin, Taken, choose
from colossus.launch.out_of_memory import advise, is_out_of_memory
from colossus.launch.stop import LAUNCHER_PID, StopSignals, exit_code
from colossus.launch.stopped import stopped_line
from colossus.launch.told import warnings_once
from colossus.registry import HOOKS


@dataclass
class _Run:
    """The state of this rank's run so far, for its failure record.

    Attributes:
        given: the run folder that was asked for.
        folder: the same when it is known to be this run's; until then nothing is written into it.
        taken: locks that must live as long as this object, where no launcher of ours holds them.
        held: the lock of the first rank, which tells the next launcher that a rank has outlived this one.
        has_failed: the main thread is writing down how.
    """

    rank: int
    stop: StopSignals
    given: Path | None
    has_launcher: bool
    folder: Path | None = None
    config: Config | None = None
    grid: RankGrid | None = None
    engine: Any = None
    hooks: list[Any] = field(default_factory=list)
    step: int | None = None
    resume: str | None = None
    taken: Taken | None = None
    held: TextIO | None = None
    has_failed: bool = False

    def details(self) -> dict[str, Any]:
        """The fields of a failure record that do not come from the error."""
        log = sys.modules.get("colossus.comm.log")  # not loaded: then there was no collective either
        return {
            "step": self.step,
            "coordinates": self.grid.coordinates(self.rank) if self.grid is not None else {},
            "collectives": log.recent() if log is not None else [],
            "progress": log.progress() if log is not None else [],
            "after_signal": self.stop.received,
        }


@warnings_once()
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
        folder=Path(run_dir) if launcher is not None and run_dir is not None else None,
        resume=resume if isinstance(resume, str) else None,
    )
    finished.keep_stack(run.rank)
    thread = threading.get_ident()
    stop.before_hard_end(lambda: _write_hard_end(run, thread))
    try:
        config = load_config(config_path, overrides, int(os.environ["WORLD_SIZE"]))
        run.config, run.grid = config, build_grid(config.parallel)
        code = _train(run, config, lambda: choose(config, config_path, overrides, run_dir=run_dir, resume=bool(resume)))
        finished.mark(run.rank, code)
        if stop.is_orphaned():
            finished.abandon()
    except BaseException as error:
        code = _fail(run, error)
        _flush()
        os._exit(code)
    return code


def _train(run: _Run, config: Config, origin: Callable[[], Origin]) -> int:
    if run.has_launcher:
        _hold(run)
    # torch is imported here, after the signal handlers are installed: it takes seconds
    from colossus.engine.fit import fit
    from colossus.engine.initialize import make_engine
    from colossus.monitor.display import make_display
    from colossus.monitor.metrics import Metrics

    if is_on_cuda(config) and not ranks_may_share(config):
        _watch_nccl(run, config)
    engine = run.engine = make_engine(config)
    if not run.has_launcher:
        _agree_on_folder(run, engine, origin)
        _hold(run)
    folder = run.folder
    assert folder is not None
    engine.run_dir, engine.checkpoints.resume_from = folder, run.resume
    metrics, display = Metrics(folder / run_folder.METRICS), make_display(folder)
    user_hooks = [HOOKS.build(hook.spec() if isinstance(hook, Named) else hook) for hook in config.hooks]
    run.hooks = [_beginning(run, config), metrics, display, *user_hooks]

    run.stop.before_hard_end(metrics.flush)
    run.stop.before_hard_end(display.close)
    engine.checkpoints.on_progress = engine.strategy.on_progress = run.stop.progress

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


def _hold(run: _Run) -> None:
    """The first rank holds the run folder before anything is loaded or written.

    The launcher of the next attempt looks whether it is held, and there is one only when ours has ended: so a rank that
    sees its launcher after it has taken hold is alone, and one that does not see it leaves the folder alone.
    """
    if run.rank != 0 or run.folder is None:
        return
    run.held = run_folder.hold(run.folder)
    if run.stop.is_orphaned():
        finished.abandon()
        os._exit(exit_code(signal.SIGTERM))
    if run.held is None:
        raise ConfigError(f"run folder {run.folder}: {run_folder.RANKS_ARE_LEFT}")


def _beginning(run: _Run, config: Config) -> Any:
    from colossus.engine.hooks import Hook

    class Beginning(Hook):
        """Writes down what begins, and keeps the number of the running step for a failure record.

        From here on a stop is a clean one. One that came while the run was loaded has ended the process: an attempt
        whose launcher was killed meanwhile must not begin a step, nor touch the metrics.
        """

        def on_train_start(self, engine: Any) -> None:
            assert run.folder is not None
            section = config.checkpoint
            run.stop.ready(engine.request_stop, section.grace_seconds if section.every else None)
            if engine.context.is_logging_rank:
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

    folder, resume, problems = run.given, None, None
    if engine.context.rank == 0:
        try:
            run.taken = origin().take()
        except ConfigError as error:
            problems = error.problems
        else:
            # what was given each rank finds from where it is
            folder, resume = run.given or run.taken.folder.resolve(), run.taken.resume
    world = engine.context.group(engine.context.grid.names)
    folder, resume, problems = broadcast_object((folder, resume, problems), world, 0)
    if problems is not None:
        raise ConfigError(problems)
    run.folder, run.resume = folder, resume


def _watch_nccl(run: _Run, config: Config) -> None:
    """Have a collective that hangs end in a failure record (`nccl_watch`). Main thread only."""
    thread = threading.get_ident()
    if run.folder is not None:  # torch dumps by itself when another rank's watchdog asks for it
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(run.folder / failure.FOLDER / failure.RECORDING))

    def give_up(message: str) -> None:
        record = failure.of_lost_collective(thread, message, run.rank, **run.details())
        _write(run, record)
        _write_recording(run, with_stacks=True)
        if not run.has_launcher:
            print(causes.one_line(record, run.folder), file=sys.stderr)
        _flush()
        os._exit(1)

    nccl_watch.watch(
        give_up, lambda: run.has_failed or run.stop.received is not None, timeout_seconds=config.comm.timeout_seconds
    )


def _write_hard_end(run: _Run, thread: int) -> None:
    """The record of a rank that is ended by force: stuck by itself, or waiting for others in a collective of NCCL's."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")  # not loaded: there is no NCCL
    if recorder is not None and recorder.is_recording() and recorder.has_pending():
        message = f"was told to stop, and waited in a collective for {run.stop.grace_seconds:g} s more"
        record = failure.of_lost_collective(thread, message, run.rank, **run.details())
    else:
        record = failure.of_stuck_rank(thread, run.stop.grace_seconds, run.rank, **run.details())
    _write(run, record)
    _write_recording(run, with_stacks=False)


def _write_recording(run: _Run, *, with_stacks: bool) -> None:
    """What torch has recorded of this rank's collectives, for comparison with the other ranks'."""
    recorder = sys.modules.get("colossus.comm.flight_recorder")
    if run.folder is None or recorder is None or not recorder.is_recording():
        return
    with contextlib.suppress(OSError, RuntimeError):
        recorder.write(recordings.path_of(run.folder, run.rank), with_stacks=with_stacks)


def _fail(run: _Run, error: BaseException) -> int:
    """Write this rank's record, print what no launcher of ours will print, and return the exit code."""
    run.has_failed = True
    record = failure.of_exception(error, run.rank, **run.details(), advice=_advice(run, error))
    _write(run, record)
    if record.kind == "communication":
        _write_recording(run, with_stacks=True)
    if run.stop.is_orphaned():  # nobody else will say so
        finished.abandon()
        print(f"colossus: rank {run.rank}: the launcher is gone; {str(error).partition(chr(10))[0]}", file=sys.stderr)
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


def _advice(run: _Run, error: BaseException) -> str:
    messages = failure.messages_of(error)
    if run.config is None or not is_out_of_memory(messages):
        return ""
    return advise(run.config, " ".join(messages), run.step)


def _write(run: _Run, record: failure.FailureRecord) -> None:
    if run.stop.is_orphaned() and run.held is None:
        return  # the folder may be that of the next attempt already
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
