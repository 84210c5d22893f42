"""A run as a sequence of attempts: another one follows a failure, or nodes that have joined."""

from __future__ import annotations

from collections.abc import Callable

from colossus.config import Config
from colossus.context.grid import build_grid
from colossus.launch.agent import Job, restored_signals, run_workers
from colossus.launch.lasting_output import lasting_output
from colossus.launch.memory_folder import open_memory_folder
from colossus.launch.outcome import Outcome
from colossus.launch.report import report
from colossus.launch.restarts import Restarts
from colossus.launch.resume import RunStart


@lasting_output()
def run_attempts(job: Job, config: Config, begin: Callable[[], RunStart]) -> int:
    """Run this node's workers until they have finished, or have failed for the last time; report on each attempt.

    Args:
        job: the work of this node.
        config: the resolved config for the largest number of nodes.
        begin: makes and locks the run folder, and returns the checkpoint from which the run resumes. Called on the
            first node.

    Returns:
        The exit code of the last attempt.

    Raises:
        RuntimeError: see `run_workers`.
        ConfigError: see `run_workers`.
    """
    restarts = Restarts(config, begin)
    outcome: Outcome | None = None
    with restored_signals(), open_memory_folder(config):
        try:
            while True:
                outcome = run_workers(job, restarts, outcome)
                if outcome.is_regrouped:
                    restarts.regroup(outcome)
                else:
                    plan = outcome.config or config
                    code = report(outcome, plan, build_grid(plan.parallel))
                    if not restarts.follow(outcome, code):
                        return code
        finally:
            if job.rendezvous is not None and not (outcome is not None and outcome.leaves):
                job.rendezvous.close()
            restarts.close()
