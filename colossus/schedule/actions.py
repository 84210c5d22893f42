"""The actions a schedule is made of, and what follows from them alone: what each needs, where it runs, what it holds.

No torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

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


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a rank does.

    Attributes:
        kind: ``forward`` of one microbatch on one stage. ``backward`` is the full backward of the same, which may be
            split in two: ``backward_input`` (dgrad) makes the gradient of the stage's input, which the stage before
            waits for, and ``backward_weight`` (wgrad), later, those of its parameters. ``send_activation`` of a stage's
            output and ``receive_activation`` of its input, ``send_gradient`` of its input's gradient and
            ``receive_gradient`` of its output's. ``reduce``: no more gradients come for the stage, so their reduction
            may finish. ``step``: the rank has no more to do in this step.
        stage: one of the rank's stages. Unused by ``step``.
        microbatch: which microbatch of the step. Unused by ``reduce`` and ``step``.
        peer: the stage at the other end of a transfer; None for everything else.
    """

    kind: Kind
    stage: int = 0
    microbatch: int = 0
    peer: int | None = None

    def mirror(self) -> Action:
        """The same transfer as the rank at its other end has it."""
        assert self.peer is not None
        return Action(_MIRROR[self.kind], self.peer, self.microbatch, self.stage)

    @property
    def message(self) -> str:
        """What a transfer carries, in the same words at both ends."""
        ends = (self.stage, self.peer) if self.kind in SENDS else (self.peer, self.stage)
        what = self.kind.rpartition("_")[2]
        return f"{what} of microbatch {self.microbatch} from stage {ends[0]} to stage {ends[1]}"

    def __str__(self) -> str:
        if self.kind in TRANSFERS:
            return f"{self.kind.partition('_')[0]} of the {self.message}"
        return f"{_COMPUTES.get(self.kind, self.kind)} of microbatch {self.microbatch} on stage {self.stage}"


#: the actions of each rank of the pipeline, in the order in which it runs them
Actions = list[list[Action]]


def needs(action: Action, last_stage: int) -> Iterator[Action]:
    """The compute actions, of any rank, that must be done before a compute action or a send.

    This is the one answer to that question. The gradient of a stage's input is named as ``backward``, though the list
    may split it; see `made_by`. Other actions need nothing: a need on another rank is met by its transfer.
    """
    kind, stage, microbatch = action.kind, action.stage, action.microbatch
    if kind == "forward":
        if stage > 0:
            yield Action("forward", stage - 1, microbatch)
    elif kind in INPUT_GRADIENT:
        yield Action("forward", stage, microbatch)
        if stage < last_stage:
            yield Action("backward", stage + 1, microbatch)
    elif kind == "send_activation":
        yield Action("forward", stage, microbatch)
    elif kind in ("backward_weight", "send_gradient"):
        yield Action("backward", stage, microbatch)


def made_by(action: Action) -> Action:
    """A compute action as `needs` names it: ``backward_input`` makes what ``backward`` is needed for."""
    return Action("backward", action.stage, action.microbatch) if action.kind == "backward_input" else action


def placement(actions: Actions) -> dict[int, int]:
    """Stage -> the rank that computes it; the lowest one where several do, which the checker refuses."""
    found: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            if action.kind in COMPUTE:
                found.setdefault(action.stage, rank)
    return found


def in_flight(own: Sequence[Action]) -> list[int]:
    """After each action of a rank, the number of activations it holds.

    One for each (stage, microbatch) of the rank from its forward to its backward: to ``backward_weight``, where the
    backward is split.
    """
    held, out = 0, []
    for action in own:
        held += (action.kind == "forward") - (action.kind in LAST_USE)
        out.append(held)
    return out
