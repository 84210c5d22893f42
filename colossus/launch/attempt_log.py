"""The record of a run's attempts: ``attempts.jsonl`` in the run folder, of launcher and ranks. No torch.

A row has the number of its attempt, and what is known of it by then: that it ``began``; that its ranks train, with the
cost of a restart (`record_start`); that it ``ended``, with the ranks that failed and the decision. Rows with the same
number complete each other. Another launch begins with a row that begins attempt 0, and, since a full disk may have lost
that one, with any row of another ``launch``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from colossus.arithmetic import counted
from colossus.engine.rollback import Rollback
from colossus.launch import run_folder
from colossus.launch.ends import RankEnd
from colossus.launch.run_metrics import RunMetrics
from colossus.monitor.row_file import append_whole, read_rows

ROWS = "attempts.jsonl"


def append(folder: Path, attempt: int, **facts: Any) -> bool:
    """Append a row; return whether it is in the file, which a full disk does not take."""
    try:
        file = os.open(folder / ROWS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            append_whole(file, (json.dumps({"attempt": attempt, **facts}) + "\n").encode())
        finally:
            os.close(file)
    except OSError:
        return False
    return True


def read(folder: Path, launch: str | None = None) -> dict[int, dict[str, Any]]:
    """Return number -> all that is known of each attempt of the last launch; ``ranks`` are its failed ranks.

    Args:
        folder: the run folder.
        launch: the identifier of a launch: nothing is returned where the last one is another.
    """
    last: dict[int, dict[str, Any]] = next(reversed(read_launches(folder)), {})
    return {number: row for number, row in last.items() if launch is None or row.get("launch") == launch}


def read_launches(folder: Path) -> list[dict[int, dict[str, Any]]]:
    """Return `read` of each launch in this folder, the last one at the end."""
    launches: list[dict[int, dict[str, Any]]] = []
    launch = None
    with suppress(OSError):  # a file that cannot be read ends no run
        for row in read_rows(folder / ROWS):
            with suppress(KeyError, TypeError):  # a row of something else
                number, ranks = row["attempt"], [RankEnd(**end) for end in row.get("ranks", ())]
                if not launches or (number == 0 and "began" in row) or row.get("launch") != launch:
                    launches.append({})
                launch = row.get("launch")
                attempt = launches[-1].setdefault(number, {"ranks": []})
                attempt |= {**row, "ranks": [*attempt["ranks"], *ranks]}
    return launches


def this_attempt() -> int:
    """Return the number of this rank's attempt, which our launcher and torchrun set."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _this_launch() -> str | None:
    """Return the identifier of this rank's launch, which our launcher and torchrun set."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def record_began(folder: Path) -> None:
    """Record the beginning of this rank's attempt, without a launcher of ours."""
    append(folder, this_attempt(), launch=_this_launch(), began=time.time())


def record_failure(folder: Path, end: RankEnd) -> bool:
    """Write the failure of a rank without a launcher of ours; return whether no other culprit was before it."""
    attempt = this_attempt()
    append(folder, attempt, launch=_this_launch(), ranks=[end.facts()])
    culprits = [rank for rank in read(folder, _this_launch()).get(attempt, {}).get("ranks", ()) if rank.kind == "error"]
    return not culprits or culprits[0].rank == end.rank


def pending_rollback(folder: Path) -> Rollback | None:
    """Return the order to go back that this attempt follows: until its ranks train, that of the attempts before it."""
    attempts = read(folder, _this_launch())
    for attempt in range(this_attempt() - 1, -1, -1):
        past = attempts.get(attempt, {})
        if (rollback := past.get("rollback")) is not None:
            return Rollback(*rollback)
        if "from_step" in past:
            return None
    return None


def record_start(folder: Path, completed_steps: int, resumed_from: Path | None) -> None:
    """Record that the ranks train, and write and print the cost of a restart, if this is one.

    The first rank calls this before its first step, and before rows of metrics are removed.

    Args:
        folder: the run folder.
        completed_steps: the step of the checkpoint from which the run resumes.
        resumed_from: that checkpoint; None where the run begins at the first step.
    """
    attempt = this_attempt()
    if not attempt:
        append(folder, attempt, launch=_this_launch(), from_step=completed_steps)
        return
    attempts = read(folder, _this_launch())
    trained = (number for number in range(attempt - 1, 0, -1) if "from_step" in attempts.get(number, {}))
    began = attempts.get(next(trained, 0), {}).get("began", time.time())
    cost = _cost(RunMetrics(folder / run_folder.METRICS), completed_steps, began)
    append(folder, attempt, launch=_this_launch(), **cost)
    repeated = counted(cost["steps_redone"], "step")
    where = f"from {resumed_from}" if resumed_from is not None else "from the beginning, since nothing was saved"
    print(
        f"colossus: restarted after step {completed_steps}, {where}: {repeated} to repeat, "
        f"{cost['seconds_lost']:.1f} s are lost",
        file=sys.stderr,
        flush=True,
    )


def _cost(metrics: RunMetrics, completed_steps: int, began: float) -> Mapping[str, Any]:
    """Return the cost of a restart as a part of its row.

    It has the step of the checkpoint, the number of steps that are trained again, and the seconds from the beginning of
    these steps in the failed attempt until now.

    Args:
        metrics: the metrics of the run.
        completed_steps: the step of the checkpoint.
        began: the time at which the attempt that trained last began.
    """
    since, redone = began, 0
    for row in metrics.rows:
        if row["step"] <= completed_steps:
            since = max(since, row["time"])
        else:
            since = since if redone else row["time"] - row["step_seconds"]
            redone += 1
    return {"from_step": completed_steps, "steps_redone": redone, "seconds_lost": time.time() - since}
