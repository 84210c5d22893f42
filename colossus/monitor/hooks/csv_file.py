"""The rows of metrics as a table: ``hooks = ["CSV"]`` writes ``metrics.csv`` in the run folder."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping
from typing import Any

from colossus.config.user_path import user_path
from colossus.monitor.hooks.options import CSVOptions
from colossus.monitor.hooks.tracker import TrackedRun, Tracker, numbers_of
from colossus.monitor.row_file import append_whole


class CSV(Tracker):
    """A line for each row, a column for each number: ``step``, ``loss``, ``comm.data.bytes``. Lists are left out.

    If a row has a new number, the file is written again with one more column, and replaces the old one. A resumed run
    keeps the lines up to its step. A later row of the step of the last line is merged into it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._path = CSVOptions(**options).path
        self._columns: list[str] = []
        self._last_step: int | None = None
        self._file: int | None = None

    def start(self, run: TrackedRun) -> None:
        self.path = user_path(self._path) if self._path else run.folder / "metrics.csv"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in self._read() if int(row["step"]) <= run.step] if run.is_resumed else []
        self._columns = list(rows[0]) if rows else []
        self._last_step = int(rows[-1]["step"]) if rows else None
        self._write_anew(rows)

    def write(self, row: Mapping[str, Any]) -> None:
        numbers = numbers_of(row)
        more = [name for name in numbers if name not in self._columns]
        self._columns += more
        if row["step"] == self._last_step:
            *before, last = self._read()
            self._write_anew([*before, numbers | {name: text for name, text in last.items() if text}])
            return
        if more:
            self._write_anew(self._read())
        assert self._file is not None
        append_whole(self._file, self._lines([numbers]))
        self._last_step = row["step"]

    def close(self, *, is_good: bool) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.exists():
            return []
        with self.path.open(newline="") as file:
            return list(csv.DictReader(file))

    def _write_anew(self, rows: Iterable[Mapping[str, Any]]) -> None:
        self.close(is_good=True)
        new = self.path.with_name(f".{self.path.name}")
        header = self._lines([dict(zip(self._columns, self._columns, strict=True))] if self._columns else [])
        new.write_bytes(header + self._lines(rows))
        os.replace(new, self.path)
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def _lines(self, rows: Iterable[Mapping[str, Any]]) -> bytes:
        text = io.StringIO()
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(rows)
        return text.getvalue().encode()
