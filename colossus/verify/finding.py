"""What a comparison yields: findings, in stages of which one follows from another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from colossus.verify.difference import Gap

#: kind of a stage -> what the report calls the things of that kind
KINDS = {
    "start": "initial values",
    "data": "samples",
    "output": "outputs of modules",
    "count": "numbers of valid samples",
    "loss": "losses",
    "gradient": "gradients",
    "norm": "gradient norms",
    "weight": "weights after a step",
    "copy": "copies on other ranks",
}


@dataclass(frozen=True)
class Finding:
    """One thing that was compared.

    Attributes:
        name: of the parameter, module or number.
        rank: whose value it is, when the ranks were compared one by one.
        words: what is wrong when it is not a number that differs.
        of: for a copy, what it is a copy of.
        other: for a copy, the rank whose value it should have.
        by_rank: for an output, the relative difference on each rank that has it; ``rank`` has the largest.
        pipeline_stage: for an output, the stage of the pipeline that computed it.
    """

    name: str
    gap: Gap
    rank: int | None = None
    words: str = ""
    of: str = ""
    other: int = 0
    by_rank: Mapping[int, float] = field(default_factory=dict)
    pipeline_stage: int = 0


@dataclass(frozen=True)
class Stage:
    """Things of one kind at one step (0: before the first), the one nearest to the cause first."""

    kind: str
    step: int
    findings: list[Finding] = field(default_factory=list)
