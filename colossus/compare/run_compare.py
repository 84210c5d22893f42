"""``colossus compare``: check all runs, run those that are not complete, print and write one table."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from colossus.arithmetic import clock
from colossus.compare.jobs import RESULT, Job, check_jobs, make_jobs
from colossus.compare.summary import Comparison, Ended, compare, print_table
from colossus.config import ConfigError, model_options
from colossus.config.plans import describe_plan
from colossus.launch import command, run_folder


def run(
    file: str,
    overrides: Sequence[str],
    *,
    strategies: Sequence[str] = (),
    plans: Sequence[str] = (),
    num_seeds: int = 1,
    nproc: int | None = None,
    out: str | None = None,
    dry_run: bool = False,
) -> int:
    """Run the job of a config file under each of the strategies and plans, one after the other, and compare them.

    Args:
        strategies: ``"sgp overlap=1"``, see `strategy_overrides`; without one, the strategy of the file.
        plans: ``"data=2 tensor=2"``, see `plan_overrides`; without one, the plan of the file.
        num_seeds: runs of each, with ``train.seed`` one higher each time.
        nproc: processes of every run; by default the product of the plan's sizes.
        out: folder of the runs, by default ``runs/compare-<name>-<time>``. Runs that are complete there are not run
            again; others resume from their latest checkpoint, or begin anew.
        dry_run: check everything, print the runs, start nothing.

    Returns:
        0 all runs are done, 1 one has failed, 130, 143 or 129 after a stop signal.

    Raises:
        ConfigError: for any problem of any run, before the first begins.
    """
    if command.worker_variables(os.environ) is not None:
        raise ConfigError("compare starts its own processes: run it by itself, without torchrun or srun")
    root = None if out is None else Path(out)
    jobs = make_jobs(file, overrides, strategies=strategies, plans=plans, num_seeds=num_seeds, nproc=nproc, root=root)
    check_jobs(jobs)
    if dry_run:
        print(_describe(jobs))
        return 0
    root, ended = jobs[0].folder.parent, {job.name: Ended("done") for job in jobs if job.is_complete}
    with run_folder.take(root, "--out"):
        for job, how in run_all(jobs):
            ended[job.name] = how
            comparison = compare(jobs, ended)
            _write(root, jobs, ended, comparison)
    print()
    print_table(comparison, Console(), getattr(model_options(jobs[0].config), "counted", "tokens"))
    print(f"\nruns and {RESULT} are in {root}")
    if how.state == "stopped":
        print(f"stopped: `--out {shlex.quote(str(root))}` runs those that are not complete", flush=True)
        return how.code
    return int(any(how.state == "failed" for how in ended.values()))


def run_all(jobs: Sequence[Job], launch: Callable[[Job], int] | None = None) -> Iterator[tuple[Job, Ended]]:
    """Run the jobs that are not complete, in order, until a signal stops one of them; yield each with its end.

    Args:
        launch: returns the exit code of a job's launch; by default it launches the job.
    """
    for number, job in enumerate(jobs, start=1):
        head = f"run {number} of {len(jobs)}: {job.name}"
        if job.is_complete:
            print(f"{head}  complete already", flush=True)
            yield job, Ended("done")
            continue
        print(f"{head}  prints to {job.output}", flush=True)
        began = time.monotonic()
        ended = _ended(job, (launch or _launch)(job))
        reason = f": {ended.reason}" if ended.reason else ""
        print(f"{head}  {ended.state} after {clock(time.monotonic() - began)}{reason}", flush=True)
        yield job, ended
        if ended.state == "stopped":
            return


def _launch(job: Job) -> int:
    """Run a job to its end and return its exit code."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    try:
        with command.contained(job.output, with_errors=True):
            return command.run(job.file, list(job.overrides), nproc=job.nproc, run_dir=str(job.folder))
    except KeyboardInterrupt:  # before the launch listened for signals itself
        return 128 + signal.SIGINT


def _ended(job: Job, code: int) -> Ended:
    if code == 0:
        return Ended("done")
    if code > 128:
        return Ended("stopped", f"by {signal.Signals(code - 128).name}", code)
    return Ended("failed", _reason(job), code)


def _reason(job: Job) -> str:
    """Return the line of a failed launch's output that names the problem: below its report's title, or the last."""
    text = job.output.read_text(errors="replace") if job.output.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["it printed nothing"]
    below = [line for title, line in pairwise(lines) if re.fullmatch(r"=+ run failed: .* =+", title)]
    return (below or lines)[-1].removeprefix("colossus: ")


def _describe(jobs: Sequence[Job]) -> str:
    """Return the lines of a dry run."""
    lines = ["nothing was started (--dry-run)"]
    for number, job in enumerate(jobs, start=1):
        done = "  complete already" if job.is_complete else ""
        lines.append(f"run {number} of {len(jobs)}: {job.name}: {describe_plan(job.config)}, {job.folder}{done}")
        lines.append(f"  {_command(job)}")
    return "\n".join(lines)


def _command(job: Job) -> str:
    """Return the command line that launches a job."""
    words = ["colossus", "launch", job.file, *job.overrides, "--run-dir", str(job.folder)]
    return shlex.join([*words, *(["--nproc", str(job.nproc)] if job.nproc is not None else [])])


def _write(root: Path, jobs: Sequence[Job], ended: dict[str, Ended], comparison: Comparison) -> None:
    """Write the whole comparison as JSON, atomically."""
    runs = [
        {
            "name": job.name,
            "label": job.label,
            "seed": job.seed,
            "folder": str(job.folder),
            "command": _command(job),
            **asdict(ended.get(job.name, Ended("not run"))),
        }
        for job in jobs
    ]
    draft = root / f".{RESULT}.tmp"
    draft.write_text(json.dumps({**comparison.as_dict(), "runs": runs}, indent=2) + "\n")
    draft.replace(root / RESULT)
