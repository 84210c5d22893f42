"""Warnings of the engine, where a test runs ranks of its own."""

from __future__ import annotations

import logging


class Messages(logging.Handler):
    """The warnings of the engine on this rank."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __enter__(self) -> Messages:
        logging.getLogger("colossus.engine").addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("colossus.engine").removeHandler(self)
