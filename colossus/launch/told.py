"""Warnings about checkpoints: with our name in front, and each once in a launch. No torch.

The launcher looks for the checkpoint to be resumed, looks again when it has locked the folders, and so do the ranks.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_TOLD = "COLOSSUS_TOLD"
_MOST = 50


class _Told(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        told, text = json.loads(os.environ.get(_TOLD, "[]")), record.getMessage()
        if text in told:
            return False
        os.environ[_TOLD] = json.dumps([*told, text][:_MOST])  # of the ranks, too
        return True


class _Printed(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        if not logging.getLogger().handlers:  # else the user has said where messages go
            print(f"colossus: {record.getMessage()}", file=sys.stderr, flush=True)


@contextmanager
def warnings_once() -> Iterator[None]:
    """From here on a warning about a checkpoint is printed once, in this process and those that it starts."""
    logger, told, printed = logging.getLogger("colossus.checkpoint"), _Told(), _Printed(logging.WARNING)
    before = os.environ.get(_TOLD)
    logger.addFilter(told)
    logger.addHandler(printed)
    try:
        yield
    finally:
        logger.removeFilter(told)
        logger.removeHandler(printed)
        os.environ.pop(_TOLD, None)
        if before is not None:
            os.environ[_TOLD] = before
