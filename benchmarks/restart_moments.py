"""Moments of a launched run: its launcher and its ranks write them into one file. No torch.

python -m benchmarks.restart_moments launch benchmarks/restarted_run.py ...    # `colossus launch` that does so
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

FILE = "COLOSSUS_MOMENTS"
"""Environment variable with the path of the file."""


def note(name: str) -> None:
    """Write down that it is now; a line of a few bytes is written as a whole."""
    moment = {"name": name, "time": time.time(), "attempt": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))}
    descriptor = os.open(os.environ[FILE], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        os.write(descriptor, f"{json.dumps(moment)}\n".encode())
    finally:
        os.close(descriptor)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> int:
    """Launch, and write down when an end is noticed, when all ranks have gone and when one is started."""
    from colossus.cli.main import main as colossus
    from colossus.launch import agent

    processes, start = agent.LocalProcesses, agent.start_process
    note_exits, end_all = processes.note_exits, processes.end_all

    def noted_exits(self: Any) -> None:
        running = len(self.running())
        note_exits(self)
        if len(self.running()) < running:
            note("noticed")

    def noted_end(self: Any, *arguments: Any) -> None:
        end_all(self, *arguments)
        note("gone")

    def noted_start(*arguments: Any) -> Any:
        note("started")
        return start(*arguments)

    processes.note_exits, processes.end_all = noted_exits, noted_end  # type: ignore[method-assign]
    agent.start_process = noted_start
    return colossus(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
