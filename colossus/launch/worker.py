"""The worker process of a rank, with the arguments ``RUN_DIR CHECKPOINT RESOLVED CONFIG [section.key=value ...]``.

The launcher starts it with the variables that torchrun would set. Under torchrun and srun, `colossus launch` itself
runs ``run_worker`` in their process.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from colossus.checkpoint.errors import CheckpointError
from colossus.config import Config, ConfigError, Named, state_config
from colossus.config.resolved import read_resolved
from colossus.config_module import put_on_path
from colossus.context.grid import build_grid
from colossus.launch import attempt_log, run_folder
from colossus.launch.checks import is_on_cuda, ranks_may_share
from colossus.launch.ends import RankEnd, exit_code
from colossus.launch.lasting_output import lasting_output
from colossus.launch.local_processes import RankFiles
from colossus.launch.rank_failure import RankRun, fail, flush, watch_nccl, write_hard_end
from colossus.launch.recordings import FOLDER, RECORDING, remove_recordings
from colossus.launch.report import stopped_line
from colossus.launch.resume import Origin, choose
from colossus.launch.stop import LAUNCHER_PID, StopSignals
from colossus.machine import keep_freed_memory
from colossus.registry import HOOKS

if TYPE_CHECKING:
    from colossus.context.parallel_context import ParallelContext
    from colossus.engine.checkpoints import Launched


def main(arguments: Sequence[str]) -> int:
    run_dir, resume, resolved, config, *overrides = arguments
    put_on_path()
    is_restart = attempt_log.this_attempt() > 0

    def load() -> Config:
        return read_resolved(Path(resolved), state_config(config, overrides), is_restart=is_restart)

    return run_worker(load, run_dir=run_dir, resume=resume or None)


@lasting_output()
def run_worker(load: Callable[[], Config], *, run_dir: str | None, resume: str | bool | None = None) -> int:
    """Train in this process as the rank that the environment names. Main thread only.

    Args:
        load: returns the resolved config.
        run_dir: the run folder that the launcher has chosen; without our launcher, that of ``--run-dir``.
        resume: the checkpoint that the launcher has chosen; without our launcher, whether ``--resume`` was given.

    Returns:
        The exit code of a run that finished (0) or was stopped (130, 143). After a failure the process ends with 1 (2
        for a config error) at once, since destructors of broken process groups can hang.
    """
    launcher, rank, files = os.environ.get(LAUNCHER_PID), int(os.environ["RANK"]), RankFiles()
    stop = StopSignals(rank, int(launcher) if launcher else None, files)
    stop.install()
    run = RankRun(rank, stop, has_launcher=launcher is not None, resume=resume if isinstance(resume, str) else None)
    if launcher is not None and run_dir is not None:
        run.folder = Path(run_dir)
    faulthandler.enable()  # prints the stack of a rank that dies of SIGSEGV, SIGABRT, ..
    thread = threading.get_ident()
    stop.before_hard_end(lambda: write_hard_end(run, thread))
    try:
        config = load()
        run.config, run.grid = config, build_grid(config.parallel)
        code = _train(run, config, partial(choose, config, run_dir=run_dir, resume=bool(resume)))
        with contextlib.suppress(OSError):
            files.write_end(RankEnd(rank, code, kind="finished"))
    except BaseException as error:
        code = fail(run, error)
        flush()
    if stop.is_orphaned():
        files.remove()
    if run.has_failed:
        os._exit(code)
    return code


def _train(run: RankRun, config: Config, origin: Callable[[], Origin]) -> int:
    if run.has_launcher:
        _lock_folder(run)
    # torch is imported here, after the signal handlers are installed: it takes seconds
    from colossus.engine.fit import fit
    from colossus.engine.initialize import make_engine
    from colossus.monitor.display import Display
    from colossus.monitor.metrics import Metrics

    if not is_on_cuda(config):
        keep_freed_memory()
    elif not ranks_may_share(config):
        watch_nccl(run, config.comm.timeout_seconds)
    engine = make_engine(config, launch=lambda context: _launched(run, context, origin))
    folder = run.folder
    assert folder is not None
    metrics, display = Metrics(folder / run_folder.METRICS), Display(folder)
    user_hooks = [HOOKS.build(hook.spec() if isinstance(hook, Named) else hook) for hook in config.hooks]
    hooks = [_start_hook(run, config), metrics, display, *user_hooks]
    if config.train.stragglers is not None:
        from colossus.monitor.stragglers import Stragglers

        hooks.append(Stragglers(config.train.stragglers))
    if config.train.profile is not None:
        from colossus.monitor.profiler import Profiler

        hooks.append(Profiler(config.train.profile))

    run.flush_metrics = metrics.flush
    run.stop.before_hard_end(metrics.flush)
    run.stop.before_hard_end(display.close)

    try:
        summary = fit(engine, hooks)
    except CheckpointError as error:
        if run.step is None and engine.checkpoints.resumed_from is None:  # the checkpoint could not be loaded
            raise ConfigError(str(error)) from error
        raise
    engine.close()
    if summary.reason == "finished":
        return 0
    signum = summary.stop_signal  # possibly that of another rank
    # our launcher reports stops by a signal
    if engine.context.is_logging_rank and not (run.has_launcher and signum is not None):
        print(stopped_line(folder, config, signum), flush=True)
    return exit_code(signum) if signum is not None else 0


def _lock_folder(run: RankRun) -> None:
    """Lock the run folder on the first rank, before anything is loaded or written.

    The launcher of a next attempt, which exists only when ours has ended, checks this lock. So a rank whose launcher
    still lives after it has locked the folder is alone. A rank whose launcher is gone must not write to the folder.
    """
    if run.rank != 0 or run.folder is None:
        return
    run.locks += (run_folder.hold(run.folder),)
    if run.stop.is_orphaned():
        raise SystemExit


def _start_hook(run: RankRun, config: Config) -> Any:
    from colossus.engine.fit import Hook

    class StartHook(Hook):
        """A hook that writes the files of a run's start, and keeps the number of the running step for the rank's end.

        After its start a stop is a clean one. A stop that comes while the run is loaded ends the process, since an
        attempt whose launcher was killed meanwhile must not begin a step or touch the metrics.
        """

        def on_train_start(self, engine: Any) -> None:
            assert run.folder is not None
            section = config.checkpoint
            run.stop.ready(engine.request_stop, section.grace_seconds if section.every else None)
            if engine.context.is_logging_rank:
                data = engine.loaders.description if engine.loaders is not None else None
                if run.has_launcher:
                    attempt_log.record_start(run.folder, engine.completed_steps, engine.checkpoints.resumed_from)
                run_folder.write_start(run.folder, config, data, engine.completed_steps)

        def on_step_start(self, engine: Any) -> None:
            run.step = engine.completed_steps + 1

        def on_step_end(self, engine: Any, result: Any) -> None:
            run.stop.progress()

    return StartHook()


def _launched(run: RankRun, context: ParallelContext, origin: Callable[[], Origin]) -> Launched:
    """Return how this run starts.

    Under torchrun and srun, where our launcher has not done so, rank 0 chooses the folder and the checkpoint. It is
    also the one that reads the order of a restart, since other hosts may see the run folder a moment later, or not.

    Raises:
        ConfigError: on every rank, where a folder belongs to another run, or there is nothing to resume.
    """
    from colossus.comm.objects import broadcast_object
    from colossus.engine.checkpoints import Launched

    is_restart = run.has_launcher and attempt_log.this_attempt() > 0
    rollback, problems = None, None
    if context.rank == 0:
        try:
            if not run.has_launcher:
                run.folder, run.resume = _take_folder(run, origin)
            elif is_restart and run.folder is not None:
                rollback = attempt_log.pending_rollback(run.folder)
        except ConfigError as error:
            problems = error.problems
    if not run.has_launcher or is_restart:
        facts = run.folder, run.resume, rollback, problems
        world = context.group(context.grid.names)
        run.folder, run.resume, rollback, problems = broadcast_object(facts, world, 0)
    if problems is not None:
        raise ConfigError(problems)
    folder = run.folder
    assert folder is not None
    # the place where torch itself writes recordings, when the watchdog of another rank asks for them
    os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", str(folder / FOLDER / RECORDING))
    return Launched(folder, run.resume, run.stop.progress, is_restart, rollback)


def _take_folder(run: RankRun, origin: Callable[[], Origin]) -> tuple[Path, str | None]:
    """Make and lock the folders of a run without our launcher, and return the run folder and the checkpoint."""
    start = origin().take()
    run.locks += (*start.locks, run_folder.hold(start.folder))
    remove_recordings(start.folder)
    attempt_log.record_began(start.folder)
    return start.folder.resolve(), start.resume
