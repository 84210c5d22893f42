"""The actions a schedule is made of. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "reduce"]


@dataclass(frozen=True)
class Action:
    """One thing a rank does.

    Attributes:
        kind: ``forward`` and ``backward`` of one microbatch of one stage; ``reduce``: no more gradients come for the
            stage, so their reduction may finish.
        stage: which stage of the model.
        microbatch: which microbatch of the step; unused by ``reduce``.
    """

    kind: Kind
    stage: int = 0
    microbatch: int = 0

    def __str__(self) -> str:
        return f"{self.kind[0].upper()}{self.microbatch}" if self.kind != "reduce" else f"reduce({self.stage})"


Actions = list[list[Action]]
