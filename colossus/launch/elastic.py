"""torch.distributed.elastic, kept quiet: what it prints and logs, `causes` says in one block."""

from __future__ import annotations

import logging
import os

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs


class Terminal(LogsSpecs):
    """Standard output and error of the workers go where ours go; no files, and no threads that read them."""

    @property
    def root_log_dir(self) -> str:
        return os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ours = dict.fromkeys(envs, "")
        return LogsDest(stdouts=ours, stderrs=ours, error_files=dict.fromkeys(envs, os.devnull))


def silence() -> None:
    """Keep its log and its traceback off the terminal."""
    # torch's loggers set their own levels, so only cutting them off above works
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
