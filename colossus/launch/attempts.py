"""A run as attempts one after the other: the first, and those that ``launch.restarts`` allows after a failure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from colossus.config import Config
from colossus.context.grid import build_grid
from colossus.launch.agent import kept_signals, run_workers
from colossus.launch.outcome import Outcome
from colossus.launch.report import report
from colossus.launch.restarts import Restarts
from colossus.launch.resume import RunStart


def run_attempts(
    words: Sequence[str],
    config: Config,
    begin: Callable[[], RunStart],
    *,
    local_ranks: int,
    nodes: int,
    endpoint: str | None,
) -> int:
    """Run this node's workers until they are through, or have failed for the last time; print how each attempt ended.

    Args:
        words, begin, local_ranks, nodes, endpoint: as of `run_workers`.

    Returns:
        The exit code of the last attempt.

    Raises:
        RuntimeError, ConfigError: as `run_workers`.
    """
    grid = build_grid(config.parallel)
    restarts = Restarts(config, begin)
    before: Outcome | None = None
    with kept_signals():
        try:
            while True:
                outcome = run_workers(
                    words,
                    config,
                    restarts.begin,
                    local_ranks=local_ranks,
                    nodes=nodes,
                    endpoint=endpoint,
                    restarts=restarts.number,
                    before=before,
                )
                code = report(outcome, config, grid)
                if not restarts.follow(outcome, code):
                    return code
                before = outcome
        finally:
            restarts.close()
