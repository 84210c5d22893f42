"""The actions a schedule is made of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

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
KINDS: tuple[str, ...] = get_args(Kind)
#: what takes a rank's time
COMPUTE = frozenset({"forward", "backward", "backward_input", "backward_weight"})
#: what gives the gradient of a stage's input
INPUT_GRADIENT = frozenset({"backward", "backward_input"})
#: what completes the gradient of a stage's parameters for a microbatch, and frees its activations
LAST_USE = frozenset({"backward", "backward_weight"})
SENDS = frozenset({"send_activation", "send_gradient"})
TRANSFERS = SENDS | {"receive_activation", "receive_gradient"}

_MIRROR: dict[str, Kind] = {
    "send_activation": "receive_activation",
    "receive_activation": "send_activation",
    "send_gradient": "receive_gradient",
    "receive_gradient": "send_gradient",
}
_WORDS = {
    "forward": "forward of microbatch {0} on stage {1}",
    "backward": "backward of microbatch {0} on stage {1}",
    "backward_input": "backward of inputs of microbatch {0} on stage {1}",
    "backward_weight": "backward of weights of microbatch {0} on stage {1}",
    "send_activation": "send of the activation of microbatch {0} from stage {1} to stage {2}",
    "receive_activation": "receive of the activation of microbatch {0} from stage {2} on stage {1}",
    "send_gradient": "send of the gradient of microbatch {0} from stage {1} to stage {2}",
    "receive_gradient": "receive of the gradient of microbatch {0} from stage {2} on stage {1}",
    "reduce": "reduce of stage {1}",
    "step": "step",
}


@dataclass(frozen=True, repr=False, slots=True)
class Action:
    """One thing a rank does.

    Attributes:
        kind: ``forward`` of one microbatch on one stage. ``backward`` of the same as a whole, or in two halves:
            ``backward_input`` gives the gradient of the stage's input, which the stage before waits for, and
            ``backward_weight``, later, those of its parameters. ``send_activation`` of a stage's output and
            ``receive_activation`` of its input, ``send_gradient`` of its input's gradient and ``receive_gradient`` of
            its output's. ``reduce``: no more gradients come for the stage, so their reduction may finish. ``step``: the
            rank's work is done.
        stage: the stage of the model, of those this rank has. Unused by ``step``.
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

    def __str__(self) -> str:
        return _WORDS.get(self.kind, repr(self)).format(self.microbatch, self.stage, self.peer)

    def __repr__(self) -> str:
        if self.kind == "step":
            return "step()"
        parts = [f"stage={self.stage}"]
        if self.kind != "reduce":
            parts.append(f"microbatch={self.microbatch}")
        if self.peer is not None:
            parts.append(f"peer={self.peer}")
        return f"{self.kind}({', '.join(parts)})"


#: for each rank of the pipeline, what it does in turn
Actions = list[list[Action]]


def placement(actions: Actions) -> dict[int, int]:
    """Stage -> the rank that computes it; the first one, should there be two."""
    found: dict[int, int] = {}
    for rank, own in enumerate(actions):
        for action in own:
            if action.kind in COMPUTE:
                found.setdefault(action.stage, rank)
    return found


def has_transfers(actions: Actions) -> bool:
    """Whether the lists say what travels, rather than compute actions only."""
    return any(action.kind in TRANSFERS for own in actions for action in own)
