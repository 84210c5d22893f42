"""Sends and receives between stages of different ranks: values (stage outputs) forward, their gradients back.

The `ValueSpec` of a value is sent ahead of the first value for each shape of batch, and both ends remember it. Both
know the shape of a batch, since all ranks of a model get the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from colossus.comm.links import Incoming, Links, Wait
from colossus.schedule.actions import Action
from colossus.schedule.runtime.values import TensorSpec, ValueSpec

#: (stage, microbatch)
StageMicrobatch = tuple[int, int]


class Transport:
    """The transfers of one rank.

    Args:
        links: to the other ranks of the pipeline.
        rank_of: stage -> index of the rank that has it.

    Attributes:
        receives_early: whether receives are to be posted before their turn (see `post_receive_early`).
        step_id: identifies the step, the same on all ranks of a model; two ranks that disagree get an error.
    """

    def __init__(self, links: Links, rank_of: Mapping[int, int]) -> None:
        self._links, self._rank_of = links, rank_of
        self.receives_early = links.takes_early
        self.step_id: object = None
        #: by the stage that makes the value, and the shape of the batch
        self._specs: dict[tuple[int, Hashable], ValueSpec] = {}
        self._values: dict[StageMicrobatch, tuple[ValueSpec, Incoming]] = {}
        self._gradients: dict[StageMicrobatch, Incoming] = {}
        self._unflushed: dict[tuple[str, int, int], Wait] = {}

    # -- sending ------------------------------------------------------------------------------------------

    def send_value(self, action: Action, spec: ValueSpec, tensors: Sequence[Tensor], shape: Hashable) -> None:
        """Send a stage's output; ahead of the first one for a shape of batch, its spec.

        Raises:
            ValueError: when its spec differs from that of an earlier one for a batch of the same shape.
        """
        known = self._specs.get((action.stage, shape))
        if known is None:
            self._specs[action.stage, shape] = spec
            self._links.send_object(self._peer(action), spec, f"description of the {_message_name(action)}")
        elif known != spec and repr(known) != repr(spec):  # a NaN is not equal to itself
            raise ValueError(
                f"stage {action.stage} returned {spec} for microbatch {action.microbatch}, but {known} for an "
                f"earlier one of the same shape: what goes between stages must look the same for batches of one shape. "
                f"Pass a number that changes as a tensor, pad what depends on values, and make a new engine when "
                f"parameters are frozen"
            )
        self.send(action, tensors)

    def send(self, action: Action, tensors: Sequence[Tensor]) -> None:
        """Start a send. Its tensors are kept unchanged until an answer shows that it was received, or `flush`."""
        if action.kind == "send_gradient":  # that of an activation is waited for when its gradient has come
            self._flush(action.kind, action.stage, action.microbatch - 1)
        key = action.kind, action.stage, action.microbatch
        self._unflushed[key] = self._links.send(self._peer(action), tensors, _message_name(action), self.step_id)

    # -- receiving ----------------------------------------------------------------------------------------

    def post_receive_early(self, action: Action, shape: Hashable) -> None:
        """Post the receive of a later action, if the spec of its value is known already."""
        is_gradient = action.kind == "receive_gradient"
        if (action.stage if is_gradient else action.peer, shape) in self._specs:
            (self.post_receive_gradient if is_gradient else self.post_receive_value)(action, shape)

    def post_receive_value(self, action: Action, shape: Hashable) -> None:
        """Post the receive of a stage's input."""
        assert action.peer is not None
        key = action.stage, action.microbatch
        if key in self._values:
            return
        spec = self._specs.get((action.peer, shape))
        if spec is None:
            spec = self._specs[action.peer, shape] = self._links.recv_object(
                self._peer(action), f"description of the {_message_name(action)}"
            )
        self._values[key] = spec, self._receive(action, spec.tensors)

    def post_receive_gradient(self, action: Action, shape: Hashable) -> None:
        """Post the receive of the gradient of a stage's output."""
        key = action.stage, action.microbatch
        if key not in self._gradients:
            self._gradients[key] = self._receive(action, self._specs[action.stage, shape].differentiable)

    def wait_value(self, stage: int, microbatch: int) -> tuple[ValueSpec, list[Tensor]]:
        """A stage's input, once it is there."""
        spec, incoming = self._values.pop((stage, microbatch))
        return spec, incoming.wait()

    def wait_gradient(self, stage: int, microbatch: int) -> list[Tensor]:
        """The gradients of the tensors of a stage's output that require one, once they are there."""
        arrived = self._gradients.pop((stage, microbatch)).wait()
        self._flush("send_activation", stage, microbatch)
        return arrived

    def flush(self) -> None:
        """Wait until everything that was sent may be changed."""
        for wait in self._unflushed.values():
            wait()
        self._unflushed.clear()

    def _receive(self, action: Action, like: Sequence[TensorSpec]) -> Incoming:
        return self._links.receive(self._peer(action), like, _message_name(action), self.step_id)

    def _flush(self, kind: str, stage: int, microbatch: int) -> None:
        wait = self._unflushed.pop((kind, stage, microbatch), None)
        if wait is not None:
            wait()

    def _peer(self, action: Action) -> int:
        assert action.peer is not None
        return self._rank_of[action.peer]


def _message_name(action: Action) -> str:
    """The same at both ends: of a send, and of the receive that mirrors it."""
    what = "activation" if action.kind.endswith("activation") else "gradient"
    stages = (action.stage, action.peer) if action.kind.startswith("send") else (action.peer, action.stage)
    return f"{what} of microbatch {action.microbatch} from stage {stages[0]} to stage {stages[1]}"
