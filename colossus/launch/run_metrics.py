"""The rows of a run's ``metrics.jsonl``, read while the run goes on or after it. No torch."""

from __future__ import annotations

import json
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from colossus.config import by_path


class RunMetrics:
    """The rows of one run; of a step that was run again the last counts, and half a last line does not.

    A row with ``replica`` tells the tokens and the speed of one replica; here they are times the number of replicas, as
    they are in the other rows; how many, the ``config.json`` beside the file tells.

    Args:
        path: of the file; one that is not there has no rows.

    Attributes:
        steps: rising.
        rows: one of each step.
        seconds: at the end of each step, since the first began: the sum of ``step_seconds``. Evaluations, checkpoints
            and the time in which a stopped run stood still are not counted.
        tokens: of all steps up to each, of those that the file has.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        replicas = _replicas(path.parent)
        rows: dict[int, dict[str, Any]] = {}
        for line in path.read_bytes().splitlines() if path.exists() else []:
            try:
                row = json.loads(line)
                rows[int(row["step"])] = row
            except (ValueError, KeyError, TypeError):  # half a row of a run that was killed
                continue
        self.steps = sorted(rows)
        self.rows = [rows[step] for step in self.steps]
        for row in self.rows:
            if "replica" in row:
                row |= {key: row[key] * replicas for key in ("tokens", "tokens_per_second") if key in row}
        self.seconds = list(accumulate(row.get("step_seconds", 0.0) for row in self.rows))
        self.tokens = list(accumulate(row.get("tokens", 0.0) for row in self.rows))

    @cached_property
    def numbers(self) -> dict[str, dict[int, float]]:
        """Key -> index of a row -> its number; keys in keys, and numbers of lists, are joined by points."""
        found: dict[str, dict[int, float]] = {}
        for at, row in enumerate(self.rows):
            for key, number in by_path(row, lists=True):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    found.setdefault(key, {})[at] = float(number)
        return found


def _replicas(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_bytes())["parallel"]["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
