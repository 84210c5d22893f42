"""Handlers of servers for tests."""

from __future__ import annotations

import time

import torch

from colossus.server.calls import Request


class Adder:
    """Adds up what it is given, and knows how often."""

    def __init__(self, length: int = 3) -> None:
        self.total = torch.zeros(length, dtype=torch.float64)
        self.times: dict[str, int] = {}
        self.gone: list[tuple[int, str | None]] = []
        self.is_asleep = False

    def handle(self, request: Request) -> None:
        match request.op:
            case "add":
                self.total += request.arrays[0]
                key = f"{request.worker} {request.header.get('number')}"
                self.times[key] = self.times.get(key, 0) + 1
                request.reply({}, [self.total] if request.header.get("pull") else [])
            case "total":
                request.reply({"times": self.times, "gone": self.gone}, [self.total])
            case "echo":
                request.reply(request.header, request.arrays)
            case "sleep":
                self.is_asleep = True
                time.sleep(request.header["seconds"])
                request.reply()
            case other:
                request.fail(ValueError(f"no operation {other!r}"))

    def on_gone(self, worker: int, reason: str | None) -> None:
        self.gone.append((worker, reason))
