"""Several collectives one after the other, as one that was started."""

from __future__ import annotations

from collections.abc import Generator

from torch import Tensor

from colossus.comm.collectives import Pending

#: yields what was started, is sent its result, and returns that of the whole
Stages = Generator[Pending, Tensor, Tensor]


class Staged(Pending):
    """Each of the stages begins once the one before has been waited for: by `advance`, or in the end by `wait`.

    What is started in between on the same groups has to be the same on all ranks.
    """

    __slots__ = ("_result", "_stages", "_under_way")

    def __init__(self, stages: Stages) -> None:
        self._stages = stages
        self._result: Tensor | None = None
        self._under_way: Pending | None = None
        self._go_on(None)

    def advance(self) -> None:
        """Wait for the stage that is under way, and start the next. Nothing where the last is over."""
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
