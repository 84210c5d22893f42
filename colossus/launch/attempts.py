"""A run as attempts one after the other: the first, and those that follow a failure, or nodes that have come."""

from __future__ import annotations

from collections.abc import Callable

from colossus.config import Config
from colossus.context.grid import build_grid
from colossus.launch.agent import Job, kept_signals, run_workers
from colossus.launch.lasting_output import lasting_output
from colossus.launch.memory_folder import made_memory_folder
from colossus.launch.outcome import Outcome
from colossus.launch.report import report
from colossus.launch.restarts import Restarts
from colossus.launch.resume import RunStart


@lasting_output()
def run_attempts(job: Job, config: Config, begin: Callable[[], RunStart]) -> int:
    """Run this node's workers until they are through, or have failed for the last time; print how each attempt ended.

    Args:
        config: resolved, for as many nodes as there may be.
        begin: makes and locks the run folder, and says from which checkpoint the run goes on. Called on the first node.

    Returns:
        The exit code of the last attempt.

    Raises:
        RuntimeError, ConfigError: as `run_workers`.
    """
    restarts = Restarts(config, begin)
    outcome: Outcome | None = None
    with kept_signals(), made_memory_folder(config):
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
