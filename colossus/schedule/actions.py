"""The actions of a schedule, their dependencies, the ranks of their stages and the activations in flight. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "reduce",
    "step",
]
#: kinds that compute
COMPUTE = frozenset({"forward", "backward", "backward_input", "backward_weight"})
#: kinds that make the gradient of a stage's input (dgrad)
INPUT_GRADIENT = frozenset({"backward", "backward_input"})
#: kinds that make the gradient of a stage's parameters (wgrad), and with that free the activations of the microbatch
LAST_USE = frozenset({"backward", "backward_weight"})
SENDS = frozenset({"send_activation", "send_gradient"})
TRANSFERS = SENDS | {"receive_activation", "receive_gradient"}

_MIRROR: dict[str, Kind] = {
    "send_activation": "receive_activation",
    "receive_activation": "send_activation",
    "send_gradient": "receive_gradient",
    "receive_gradient": "send_gradient",
}
_COMPUTES = {
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward of inputs",
    "backward_weight": "backward of weights",
}


class Action(NamedTuple):
    """One action of a rank.

    Attributes:
        kind: ``forward`` runs one microbatch on one stage, and ``backward`` is its full backward. A backward may be
            split in two: ``backward_input`` (dgrad) makes the gradient of the stage's input, for which the stage before
            waits, and ``backward_weight`` (wgrad) makes those of its parameters later. ``send_activation`` sends a
            stage's output, ``receive_activation`` receives its input, ``send_gradient`` sends its input's gradient and
            ``receive_gradient`` receives its output's. ``reduce`` says that the stage's gradients are complete, so that
            their reduction may finish. ``step`` ends the rank's step.
        stage: one of the rank's stages. Unused by ``step``.
        microbatch: the number of the microbatch in the step. Unused by ``reduce`` and ``step``.
        peer: the stage at the other end of a transfer; None for all other kinds.
    """

    kind: Kind
    stage: int = 0
    microbatch: int = 0
    peer: int | None = None

    def mirror(self) -> Action:
        """Return the action of the rank at the other end of this transfer."""
        assert self.peer is not None
        return Action(_MIRROR[self.kind], self.peer, self.microbatch, self.stage)

    @property
    def message(self) -> str:
        """The name of the value that a transfer carries, the same at both ends."""
        ends = (self.stage, self.peer) if self.kind in SENDS else (self.peer, self.stage)
        value = self.kind.rpartition("_")[2]
        return f"{value} of microbatch {self.microbatch} from stage {ends[0]} to stage {ends[1]}"

    def __str__(self) -> str:
        if self.kind in TRANSFERS:
            return f"{self.kind.partition('_')[0]} of the {self.message}"
        return f"{_COMPUTES.get(self.kind, self.kind)} of microbatch {self.microbatch} on stage {self.stage}"


#: the actions of each rank of the pipeline, in the order in which it runs them
Actions = list[list[Action]]


class Value(NamedTuple):
    """A product of a compute action that others need: a stage's output, or the gradient of its input.

    Attributes:
        kind: ``forward`` or ``backward``.
        stage, microbatch: those of the action.
    """

    kind: str
    stage: int
    microbatch: int


def needs(action: Action, last_stage: int) -> tuple[Value, ...]:
    """Return the values, made on any rank, that must be there before a compute action or a send.

    Actions of other kinds need nothing.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "forward":
        return (Value("forward", stage - 1, microbatch),) if stage > 0 else ()
    if kind in INPUT_GRADIENT:
        own = Value("forward", stage, microbatch)
        return (own, Value("backward", stage + 1, microbatch)) if stage < last_stage else (own,)
    if kind == "send_activation":
        return (Value("forward", stage, microbatch),)
    if kind in ("backward_weight", "send_gradient"):
        return (Value("backward", stage, microbatch),)
    return ()


def made_by(action: Action) -> Value:
    """Return the value that a compute action makes; that of ``backward_weight`` is needed by no other."""
    kind = "backward" if action.kind == "backward_input" else action.kind
    return Value(kind, action.stage, action.microbatch)


def placement(actions: Actions) -> dict[int, int]:
    """Return the rank that computes each stage; where several do, which `check` refuses, the lowest."""
    rank_of: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            if action.kind in COMPUTE:
                rank_of.setdefault(action.stage, rank)
    return rank_of


def in_flight(own: Sequence[Action]) -> list[int]:
    """Return the number of activations that a rank stores after each of its actions.

    A rank stores one for each (stage, microbatch) from its forward to its backward, or to its ``backward_weight`` where
    the backward is split.
    """
    count, out = 0, []
    for action in own:
        count += (action.kind == "forward") - (action.kind in LAST_USE)
        out.append(count)
    return out


#: kind of an action -> the name of its region in a profile, and its part of a step
_REGIONS = {
    "forward": ("forward", "forward"),
    "backward": ("backward", "backward"),
    "backward_input": ("backward of inputs", "backward"),
    "backward_weight": ("wgrad", "wgrad"),
}


def region_of(action: Action, sums: str) -> tuple[str, str] | None:
    """Return the name and the part of an action in a profile; None for messages, which have regions of their own.

    Args:
        action: the action.
        sums: the part to which sums of gradients belong.
    """
    if action.kind == "reduce":
        return f"sums of gradients stage {action.stage}", sums
    if action.kind not in _REGIONS:
        return None
    name, part = _REGIONS[action.kind]
    return f"{name} stage {action.stage} microbatch {action.microbatch}", part
