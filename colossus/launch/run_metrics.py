"""The rows of a run's ``metrics.jsonl``, read while the run goes on or after it. No torch."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any

from colossus.config import by_path
from colossus.monitor.row_file import read_rows


class RunMetrics:
    """The rows of one run: the last one of each step, without an incomplete last line.

    A row with ``replica`` has the tokens and the speed of one replica. Here they are multiplied by the number of
    replicas in the ``config.json`` beside the file, so that they are comparable with the other rows.

    Args:
        path: the file; a missing one has no rows.

    Raises:
        OSError: the file cannot be read.

    Attributes:
        steps: the steps, ascending.
        rows: the row of each step.
        seconds: for each step, the seconds from the beginning of the first to its end: the sum of ``step_seconds``.
            Evaluations, checkpoints and the time in which the run was stopped are not counted.
        tokens: for each step, the tokens of all steps in the file up to it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        replicas = _replicas(path.parent)
        rows: dict[int, dict[str, Any]] = {}
        for row in read_rows(path):
            with suppress(ValueError, KeyError, TypeError):  # a row without the number of a step
                rows[int(row["step"])] = row
        self.steps = sorted(rows)
        self.rows = [rows[step] for step in self.steps]
        for row in self.rows:
            if "replica" in row:
                row |= {key: row[key] * replicas for key in ("tokens", "tokens_per_second") if key in row}
        self.seconds = list(accumulate(row.get("step_seconds", 0.0) for row in self.rows))
        self.tokens = list(accumulate(row.get("tokens", 0.0) for row in self.rows))

    @cached_property
    def numbers(self) -> dict[str, dict[int, float]]:
        """All numbers as key -> index of a row -> number; nested keys and indices of lists are joined by points."""
        numbers: dict[str, dict[int, float]] = {}
        for at, row in enumerate(self.rows):
            for key, number in by_path(row, lists=True):
                if isinstance(number, int | float) and not isinstance(number, bool):
                    numbers.setdefault(key, {})[at] = float(number)
        return numbers


def _replicas(folder: Path) -> int:
    try:
        return int(json.loads((folder / "config.json").read_bytes())["parallel"]["data"])
    except (OSError, ValueError, KeyError, TypeError):
        return 1
