"""Random streams as functions of their purpose, not of the order of draws.

A draw is keyed by (seed, stream, and the caller's parts: step, module name, number of the module's draws). Two ranks
with the same key draw the same numbers; recomputation, another schedule or a resumed run use the same key and therefore
draw the same numbers again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from colossus.error_place import located_error
from colossus.random import hash_key

#: step, microbatch, draws so far by (microbatch, name)
Position = tuple[int, int, dict[tuple[int, str], int]]


class RngStreams:
    """All random numbers of a run, as functions of its seed.

    Its state is the position (step, microbatch) and the number of draws of each name there.
    """

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.step = 0
        self.microbatch = 0
        self._calls: dict[tuple[int, str], int] = {}
        self._replaying = False

    def key(self, stream: str, *parts: object) -> int:
        """Return a key of ``stream`` that does not depend on the position."""
        return hash_key(self.seed, stream, *parts)

    def move_to(self, step: int, microbatch: int) -> None:
        """Set the position for a forward pass: draws from here on belong to this microbatch of this step."""
        earlier = self._calls if step == self.step else {}
        self._calls = {key: count for key, count in earlier.items() if key[0] != microbatch}
        self.step, self.microbatch = step, microbatch

    def return_to(self, microbatch: int) -> None:
        """Set the position for the backward of a microbatch of this step, which may recompute its forward."""
        self.microbatch = microbatch

    def next_call(self, name: str) -> int:
        """Count a draw of ``name`` at this position, and return the number of those before it.

        A module that is called twice in one forward draws twice. A recomputation runs inside `replay`, which counts
        again from the state of the forward; one by torch.utils.checkpoint may draw once for each name.

        Raises:
            ValueError: a recomputation without `replay` draws for a name that has drawn more than once.
        """
        key = self.microbatch, name
        # a graph task runs: this forward is a recomputation inside a backward
        if torch._C._current_graph_task_id() == -1 or self._replaying:
            count = self._calls.get(key, 0)
            self._calls[key] = count + 1
            return count
        if self._calls.get(key, 0) > 1:
            raise located_error(
                f"{name} draws random numbers {self._calls[key]} times in one forward pass and is recomputed by "
                f"torch.utils.checkpoint, which cannot tell which of them to repeat: use colossus.layers.recompute, "
                f"or one module for each use"
            )
        return 0

    def snapshot(self) -> Position:
        """Return the position, and the number of draws up to it."""
        calls = dict(self._calls)
        if torch._C._current_graph_task_id() != -1 and not self._replaying:
            # torch's own recomputation repeats a forward whose draws have been counted
            calls = {key: count for key, count in calls.items() if key[0] != self.microbatch}
        return self.step, self.microbatch, calls

    @contextmanager
    def replay(self, position: Position) -> Iterator[None]:
        """Repeat the draws from ``position`` (a snapshot) on inside the context, for recomputation."""
        current, was_replaying = (self.step, self.microbatch, self._calls), self._replaying
        self.step, self.microbatch, self._calls = position[0], position[1], dict(position[2])
        self._replaying = True
        try:
            yield
        finally:
            self.step, self.microbatch, self._calls = current
            self._replaying = was_replaying
