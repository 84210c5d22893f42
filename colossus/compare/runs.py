"""Runs jobs one after the other, each as a launch of its own with its output in a file."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from colossus.compare.jobs import Job
from colossus.compare.progress import Progress, last_step
from colossus.launch import command, failure
from colossus.launch.inside import STANDARD_ERROR, STANDARD_OUTPUT, environment_kept, output_to

State = Literal["done", "failed", "stopped", "not run"]


@dataclass(frozen=True)
class Ended:
    """How a job ended.

    Attributes:
        reason: one line, of what is not done.
    """

    state: State
    reason: str = ""
    code: int = 0


def is_complete(job: Job) -> bool:
    """Whether an earlier comparison has run it to its last step."""
    return last_step(job) >= job.config.train.steps


def run_all(
    jobs: Sequence[Job],
    progress: Progress,
    launch: Callable[[Job], int] | None = None,
) -> Iterator[tuple[Job, Ended]]:
    """Run what is not complete, in order, until a signal stops one of them.

    Args:
        launch: exit code of a job's launch; by default a real one.
    """
    for number, job in enumerate(jobs, start=1):
        if is_complete(job):
            progress.skipped(number, job)
            yield job, Ended("done")
            continue
        with progress.of(number, job, sum(not is_complete(other) for other in jobs[number:])):
            code = (launch or launched)(job)
        ended = _ended(job, code)
        progress.ended(number, job, ended.state, ended.reason)
        yield job, ended
        if ended.state == "stopped":
            return


def launched(job: Job) -> int:
    """Run a job to its end; its exit code."""
    job.folder.parent.mkdir(parents=True, exist_ok=True)
    with output_to(job.output, (STANDARD_OUTPUT, STANDARD_ERROR)), environment_kept():
        try:
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
    """The line of a failed launch's output that says what was wrong."""
    try:
        lines = [line.strip() for line in job.output.read_text(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    for line, following in zip(reversed(lines[:-1]), reversed(lines[1:]), strict=True):
        if re.fullmatch(r"=+ run failed: .* =+", line):
            found = [record for record in failure.read_all(job.folder) if following.endswith(f"raised {record.type}")]
            told = found[0].message.strip().splitlines() if found else []
            return f"{following}: {told[0]}" if told else following
    told = [line.removeprefix("colossus: ") for line in lines if line.startswith("colossus: ")]
    return (told or lines or ["it said nothing"])[-1]
