"""``colossus compare``: check all runs, run what is not complete, print and write one table."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from colossus.compare import picture
from colossus.compare.jobs import Job, check_jobs, make_jobs
from colossus.compare.progress import Progress
from colossus.compare.runs import Ended, is_complete, run_all
from colossus.compare.summary import Comparison, compare
from colossus.compare.table import print_table
from colossus.config import ConfigError, model_options
from colossus.config.plans import describe_plan
from colossus.launch import command, run_folder
from colossus.launch.inside import STANDARD_OUTPUT
from colossus.picture import check_picture

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 130
RESULT = "compare.json"


def run(
    file: str,
    overrides: Sequence[str],
    *,
    strategies: Sequence[str] = (),
    plans: Sequence[str] = (),
    num_seeds: int = 1,
    nproc: int | None = None,
    out: str | None = None,
    resume: bool = False,
    plot: str | None = None,
    dry_run: bool = False,
) -> int:
    """Run the job of a config file under each of the strategies and plans, one after the other, and compare them.

    Args:
        strategies: ``"sgp overlap=1"``, see `strategy_overrides`; none: that of the file.
        plans: ``"data=2 tensor=2"``, see `plan_overrides`; none: that of the file.
        num_seeds: how often each runs, with ``train.seed`` one higher each time.
        nproc: processes of every run; by default the product of the plan's sizes.
        out: folder of the runs, by default ``runs/compare-<name>-<time>``. Runs that are complete there are not run
            again, others go on from their latest checkpoint, or anew.
        resume: without ``out``, go on in the newest such folder.
        plot: file of a picture.
        dry_run: check everything, say what would run, start nothing.

    Returns:
        0 all runs are done, 1 one has failed, 2 config or usage, 130, 143 or 129 after a stop signal.
    """
    try:
        if command.worker_variables(os.environ) is not None:
            raise ConfigError("compare starts its own processes: run it by itself, without torchrun or srun")
        if plot is not None:
            _check_picture(plot)
        jobs = make_jobs(
            file,
            overrides,
            strategies=strategies,
            plans=plans,
            num_seeds=num_seeds,
            nproc=nproc,
            root_of=lambda name: _root(f"compare-{name}", out, resume),
        )
        check_jobs(jobs)
        if dry_run:
            print(_describe(jobs))
            return DONE
        root = jobs[0].folder.parent
        lock = run_folder.take(root, "--out")
    except ConfigError as error:
        print(f"colossus: {error}", file=sys.stderr)
        return USAGE
    with lock:
        return _run(jobs, root, plot)


def _run(jobs: Sequence[Job], root: Path, plot: str | None) -> int:
    told = dict[str, Ended]()
    code = DONE
    # while a run goes on, standard output is a file
    with contextlib.closing(os.fdopen(os.dup(STANDARD_OUTPUT), "w")) as terminal:
        try:
            for job, how in run_all(jobs, Progress(len(jobs), terminal)):
                told[job.name] = how
                _write(root, jobs, told, compare(jobs, told))
        except KeyboardInterrupt:
            code = STOPPED
    comparison = compare(jobs, told)
    _write(root, jobs, told, comparison)
    print()
    options = model_options(jobs[0].config)
    print_table(comparison, Console(), getattr(options, "counted", "tokens"))
    print(f"\nruns and {RESULT} are in {root}")
    if plot is not None and any(comparison.curves.values()):
        picture.save(comparison, plot, str(jobs[0].config.name))
        print(f"drawn in {plot}")
    stopped = next((how.code for how in told.values() if how.state == "stopped"), code)
    if stopped:
        print(f"stopped: `--out {shlex.quote(str(root))}` goes on with the runs that are left", flush=True)
        return stopped
    return FAILED if any(how.state == "failed" for how in told.values()) else DONE


def _root(name: str, out: str | None, resume: bool) -> Path:
    """The folder of the runs."""
    if out is not None:
        if Path(out).exists() and not Path(out).is_dir():
            raise ConfigError(f"--out {out}: is a file, not a folder; give another one")
        return Path(out)
    if not resume:
        return run_folder.default_folder(name)
    found = run_folder.of_name(name)
    if not found:
        raise ConfigError(f"--resume: there is no comparison in runs/{name}-*; without --resume a new one begins")
    return found[0]


def _check_picture(path: str) -> None:
    try:
        check_picture(Path(path))
    except ValueError as error:
        raise ConfigError(f"--plot: {error}") from None


def _describe(jobs: Sequence[Job]) -> str:
    """What would be run."""
    lines = ["nothing was started (--dry-run)"]
    for number, job in enumerate(jobs, start=1):
        done = "  complete already" if is_complete(job) else ""
        lines.append(f"run {number} of {len(jobs)}: {job.name}: {describe_plan(job.config)}, {job.folder}{done}")
        lines.append(f"  {_command(job)}")
    return "\n".join(lines)


def _command(job: Job) -> str:
    """The launch that a job is."""
    words = ["colossus", "launch", job.file, *job.overrides, "--run-dir", str(job.folder)]
    return shlex.join([*words, *(["--nproc", str(job.nproc)] if job.nproc is not None else [])])


def _write(root: Path, jobs: Sequence[Job], told: dict[str, Ended], comparison: Comparison) -> None:
    """All of the comparison as JSON, all or nothing at any moment."""
    runs = [
        {
            "name": job.name,
            "label": job.label,
            "strategy": job.strategy,
            "plan": job.plan,
            "seed": job.seed,
            "folder": str(job.folder),
            "command": _command(job),
            **asdict(told.get(job.name, Ended("not run"))),
        }
        for job in jobs
    ]
    draft = root / f".{RESULT}.tmp"
    draft.write_text(json.dumps({**comparison.as_dict(), "runs": runs}, indent=2) + "\n")
    draft.replace(root / RESULT)
