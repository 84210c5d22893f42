"""Brings values and gradients from stage to stage, where the other stage is on another rank.

What a value looks like is told once for each shape of batch and remembered by both ends: a later batch of another shape
is told anew. Both ends know the shape of a batch, since all ranks of a model get the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from colossus.comm.links import Incoming, Links, Wait
from colossus.schedule.actions import Action
from colossus.schedule.runtime.values import Description, Leaf

Key = tuple[int, int]


class Transport:
    """Transfers of one rank.

    Args:
        links: to the ranks of the pipeline.
        rank_of: stage -> index of the rank that has it.
    """

    def __init__(self, links: Links, rank_of: Mapping[int, int]) -> None:
        self._links, self._rank_of = links, rank_of
        self.takes_early = links.takes_early
        #: what the step at work is about
        self.mark: object = None
        #: (stage that made it, shape of the batch) -> what it looks like
        self._known: dict[tuple[int, Hashable], Description] = {}
        self._values: dict[Key, tuple[Description, Incoming]] = {}
        self._gradients: dict[Key, Incoming] = {}
        self._unflushed: dict[tuple[str, int, int], Wait] = {}

    # -- sending ------------------------------------------------------------------------------------------

    def send_value(self, action: Action, description: Description, tensors: Sequence[Tensor], shape: Hashable) -> None:
        """A stage's output. The first one for a shape of batch is preceded by its description.

        Raises:
            ValueError: when it looks different from an earlier one that was made of a batch of the same shape.
        """
        known = self._known.get((action.stage, shape))
        if known is None:
            self._known[action.stage, shape] = description
            self._links.send_object(self._peer(action), description, f"description of the {_words(action)}")
        elif known != description and repr(known) != repr(description):  # a NaN is not equal to itself
            raise ValueError(
                f"stage {action.stage} returned {description} for microbatch {action.microbatch}, but {known} for an "
                f"earlier one of the same shape: what goes between stages must look the same for batches of one shape. "
                f"Pass a number that changes as a tensor, pad what depends on values, and make a new engine when "
                f"parameters are frozen"
            )
        self.send(action, tensors)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        if action.kind == "send_gradient":  # an activation is known to be received when its gradient comes
            self._flush(action.kind, action.stage, action.microbatch - 1)
        key = action.kind, action.stage, action.microbatch
        self._unflushed[key] = self._links.send(self._peer(action), tensors, _words(action), self.mark)

    # -- receiving ----------------------------------------------------------------------------------------

    def await_early(self, action: Action, shape: Hashable) -> None:
        """Await what a later action awaits, if it is known what it looks like."""
        is_gradient = action.kind == "receive_gradient"
        if (action.stage if is_gradient else action.peer, shape) in self._known:
            (self.await_gradient if is_gradient else self.await_value)(action, shape)

    def await_value(self, action: Action, shape: Hashable) -> None:
        """A stage's input."""
        assert action.peer is not None
        key = action.stage, action.microbatch
        if key in self._values:
            return
        description = self._known.get((action.peer, shape))
        if description is None:
            description = self._known[action.peer, shape] = self._links.recv_object(
                self._peer(action), f"description of the {_words(action)}"
            )
        self._values[key] = description, self._receive(action, description.tensors)

    def await_gradient(self, action: Action, shape: Hashable) -> None:
        """The gradient of a stage's output."""
        key = action.stage, action.microbatch
        if key not in self._gradients:
            self._gradients[key] = self._receive(action, self._known[action.stage, shape].differentiable)

    def value(self, stage: int, microbatch: int) -> tuple[Description, list[Tensor]]:
        description, incoming = self._values.pop((stage, microbatch))
        return description, incoming.wait()

    def gradient(self, stage: int, microbatch: int) -> list[Tensor]:
        arrived = self._gradients.pop((stage, microbatch)).wait()
        self._flush("send_activation", stage, microbatch)
        return arrived

    def flush(self) -> None:
        """Wait until everything that was sent may be changed."""
        for wait in self._unflushed.values():
            wait()
        self._unflushed.clear()

    def _receive(self, action: Action, like: Sequence[Leaf]) -> Incoming:
        return self._links.receive(self._peer(action), like, _words(action), self.mark)

    def _flush(self, kind: str, stage: int, microbatch: int) -> None:
        wait = self._unflushed.pop((kind, stage, microbatch), None)
        if wait is not None:
            wait()

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self._rank_of[action.peer]


def _words(action: Action) -> str:
    """What travels, as both ends name it."""
    what = "activation" if action.kind.endswith("activation") else "gradient"
    stages = (action.stage, action.peer) if action.kind.startswith("send") else (action.peer, action.stage)
    return f"{what} of microbatch {action.microbatch} from stage {stages[0]} to stage {stages[1]}"
