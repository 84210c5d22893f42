"""Handles of started communication, whose ``wait()`` returns the result."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from colossus.comm import log


class Pending:
    """A started collective. ``wait()`` returns its result; call it once."""

    __slots__ = ("_entry", "_finish")

    def __init__(self, finish: Callable[[], Tensor], entry: log.Entry | None) -> None:
        self._finish = finish
        self._entry = entry

    def wait(self) -> Tensor:
        result = self._finish()
        if self._entry is not None:
            self._entry.done = True
        return result

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        """Return a handle of the same collective whose result is ``change`` of this one's."""
        finish = self.wait
        return Pending(lambda: change(finish()), None)


class Ready(Pending):
    """A result that is already here."""

    __slots__ = ("_value",)

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def wait(self) -> Tensor:
        return self._value


#: a generator that yields each started stage, is sent its result, and returns the result of the last
Stages = Generator[Pending, Tensor, Tensor]


class Staged(Pending):
    """Communication in stages: `advance` and `wait` wait for one stage and start the next.

    All ranks must start the same other collectives on the same groups between two stages.
    """

    __slots__ = ("_result", "_stages", "_under_way")

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._result: Tensor | None = None
        self._under_way: Pending | None = None
        self._go_on(None)

    def advance(self) -> None:
        """Wait for the stage that is under way, and start the next; do nothing where the last is over."""
        if self._under_way is not None:
            self._go_on(self._under_way.wait())

    def wait(self) -> Tensor:
        while self._result is None:
            self.advance()
        return self._result

    def _go_on(self, value: Tensor | None) -> None:
        try:
            self._under_way = next(self._stages) if value is None else self._stages.send(value)
        except StopIteration as end:
            self._result, self._under_way = end.value, None
