"""Handles of started communication, whose ``wait()`` returns the result."""

from __future__ import annotations

from collections.abc import Callable, Generator

from torch import Tensor

from colossus.comm import log


class Pending:
    """A started collective. ``wait()`` returns its result; call it once.

    Args:
        finish: waits for the collective.
        change: makes the result of what ``finish`` returns, when the collective is over.
    """

    __slots__ = ("_change", "_entry", "_finish")

    def __init__(self, finish: Callable[[], Tensor], change: Callable[[Tensor], Tensor] | None = None) -> None:
        self._finish, self._change = finish, change
        self._entry: log.Entry | None = None

    def wait(self) -> Tensor:
        result = self._finish()
        if self._entry is not None:
            self._entry.done = True
        return result if self._change is None else self._change(result)

    def logged(self, entry: log.Entry | None) -> Pending:
        """Mark an entry of the log when the collective is over."""
        self._entry = entry
        return self

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        """Return a handle of the same collective whose result is ``change`` of this one's."""
        first = self._change
        after = Pending(self._finish, change if first is None else lambda result: change(first(result)))
        return after.logged(self._entry)


class Ready(Pending):
    """A result that is already here."""

    __slots__ = ()

    def __init__(self, value: Tensor) -> None:
        super().__init__(lambda: value)


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

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        return Pending(self.wait, change)

    def wait(self) -> Tensor:
        while self._result is None:
            self.advance()
        return self._result

    def _go_on(self, value: Tensor | None) -> None:
        try:
            self._under_way = next(self._stages) if value is None else self._stages.send(value)
        except StopIteration as end:
            self._result, self._under_way = end.value, None
