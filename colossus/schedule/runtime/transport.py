"""Sends and receives between stages of different ranks: values (stage outputs) forward, their gradients back.

The `ValueSpec` of a value is sent ahead of the first value for each shape of batch, and both ends remember it. Both
know the shape of a batch, since all ranks of a model get the same one.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from torch import Tensor

from colossus.comm.links import Incoming, Links, Wait
from colossus.schedule.actions import Action
from colossus.schedule.runtime.values import ValueSpec


class Transport:
    """The transfers of one rank.

    Args:
        links: to the other ranks of the pipeline.
        rank_of: stage -> index of the rank that has it.

    Attributes:
        receives_early: whether receives are to be posted before their turn.
        step_id: identifies the step, the same on all ranks of a model; two ranks that disagree get an error.
    """

    def __init__(self, links: Links, rank_of: Mapping[int, int]) -> None:
        self._links, self._rank_of = links, rank_of
        self.receives_early = links.takes_early
        self.step_id: object = None
        #: by the stage that makes the value, and the shape of the batch
        self._specs: dict[tuple[int, Hashable], ValueSpec] = {}
        self._posted: dict[Action, tuple[ValueSpec, Incoming]] = {}
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

    def post_receive(self, action: Action, shape: Hashable, *, early: bool = False) -> None:
        """Post the receive of a stage's input, or of the gradient of its output, unless it has been posted.

        Args:
            early: before its turn; only done where the spec of its value is known already.
        """
        if action in self._posted:
            return
        is_gradient = action.kind == "receive_gradient"
        made_by = action.stage if is_gradient else action.peer
        assert made_by is not None
        spec = self._specs.get((made_by, shape))
        if spec is None:
            if early:
                return
            spec = self._links.recv_object(self._peer(action), f"description of the {_message_name(action)}")
            self._specs[made_by, shape] = spec
        tensors = spec.differentiable if is_gradient else spec.tensors
        self._posted[action] = (
            spec,
            self._links.receive(self._peer(action), tensors, _message_name(action), self.step_id),
        )

    def wait_value(self, stage: int, microbatch: int) -> tuple[ValueSpec, list[Tensor]]:
        """A stage's input, once it is there."""
        spec, incoming = self._posted.pop(Action("receive_activation", stage, microbatch, stage - 1))
        return spec, incoming.wait()

    def wait_gradient(self, stage: int, microbatch: int) -> list[Tensor]:
        """The gradients of the tensors of a stage's output that require one, once they are there."""
        _, incoming = self._posted.pop(Action("receive_gradient", stage, microbatch, stage + 1))
        arrived = incoming.wait()
        self._flush("send_activation", stage, microbatch)
        return arrived

    def flush(self) -> None:
        """Wait until everything that was sent may be changed."""
        for wait in self._unflushed.values():
            wait()
        self._unflushed.clear()

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
