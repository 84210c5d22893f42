"""Synchronous steps from a worker: its part of a gradient, the norm of the sum, one update."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from colossus.server.handles import Handle, StartCall
from colossus.server.messages import Reply
from colossus.server.pieces import Splitter, Value, header_of

_NONE: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class StepSquares:
    """What a synchronous step has come to.

    Attributes:
        included: workers whose parts are in it.
        squares: by name the square of the norm of the sum over these workers; empty where the step is late.
        is_late: the step was applied without this worker's part: others were faster (backup workers). It pulls, and
            goes on with the step after ``newest``.
        newest: the newest step whose workers are known.
    """

    included: tuple[int, ...]
    squares: dict[str, float]
    is_late: bool
    newest: int


class StepCalls:
    """
    Args:
        workers: who takes part, ascending.
        call: starts a call at a server.
    """

    def __init__(self, splitter: Splitter, workers: Sequence[int], call: StartCall) -> None:
        self._splitter, self._workers, self._call = splitter, list(workers), call
        self._given: dict[int, list[tuple[list[str], Handle[list[str]]]]] = {}

    def accumulate(self, step: int, values: Mapping[str, Value], backups: int) -> Handle[list[str]]:
        """See `Servers.accumulate`."""
        found = self._splitter.split(values)
        calls = [
            self._call(
                server,
                "accumulate",
                pieces.names,
                header_of(pieces, step=step, workers=self._workers, backups=backups),
                pieces.arrays,
            )
            for server, pieces in found.items()
        ]

        def late(replies: list[Reply]) -> list[str]:
            return sorted({name for reply in replies for name in reply.header["late"]})

        handle = Handle(calls, late)
        self._given.setdefault(step, []).append((list(values), handle))
        return handle

    def squares(self, step: int, names: Sequence[str] | None, backups: int) -> Handle[StepSquares]:
        """See `Servers.squares`."""
        given = self._given.pop(step, [])
        for failed in [number for number in self._given if number < step]:
            del self._given[failed]
        names = list(dict.fromkeys(name for those, _ in given for name in those)) if names is None else list(names)
        for _, handle in given:
            handle.wait()  # what was refused is told here at the latest
        if not backups:
            return self._squares(step, names, tuple(self._workers), step)
        arrive = self._call(0, "arrive", (), {"step": step, "workers": self._workers, "backups": backups})

        def then(replies: list[Reply]) -> Handle[StepSquares]:
            included, newest = tuple(replies[0].header["included"]), replies[0].header["newest"]
            if not included:
                return Handle((), lambda _: StepSquares((), {}, True, newest))
            return self._squares(step, names, included, newest)

        return Handle([arrive], lambda replies: replies).and_then(then)

    def _squares(self, step: int, names: Sequence[str], included: tuple[int, ...], newest: int) -> Handle[StepSquares]:
        servers = self._splitter.by_server(names)
        calls = [
            self._call(server, "squares", of, {"names": of, "step": step, "included": list(included)})
            for server, of in servers.items()
        ]

        def total(replies: list[Reply]) -> StepSquares:
            if any(reply.header["late"] for reply in replies):
                return StepSquares(included, {}, True, newest)
            squares = dict.fromkeys(names, 0.0)
            for of, reply in zip(servers.values(), replies, strict=True):
                for name, square in zip(of, reply.arrays[0].tolist(), strict=True):
                    squares[name] += square
            return StepSquares(included, squares, False, newest)

        return Handle(calls, total)

    def apply(
        self,
        step: int,
        names: Sequence[str],
        options: Mapping[str, Any],
        options_of: Mapping[str, Mapping[str, Any]],
        found_inf: bool,
        into: Mapping[str, Tensor] | None,
    ) -> Handle[None]:
        """See `Servers.apply`."""
        servers = self._splitter.by_server(names)
        given = None if into is None else self._splitter.targets({name: into[name] for name in names})
        calls = []
        for server, of in servers.items():
            header = {
                "names": of,
                "step": step,
                "options": [dict(options_of.get(name, options)) for name in of],
                "found_inf": found_inf,
                "pull": given is not None,
            }
            calls.append(self._call(server, "apply", of, header, (), given[0][server].into if given else ()))

        def finish(_: list[Reply]) -> None:
            if given is not None:
                with torch.no_grad():
                    given[1]()

        return Handle(calls, finish)
