"""Goes through the stages of two runs up to the first that differs."""

from __future__ import annotations

from dataclasses import dataclass, field

from colossus.verify.checks import stages
from colossus.verify.difference import Trust
from colossus.verify.finding import Finding, Stage
from colossus.verify.records import Records


@dataclass
class Tally:
    """What was compared of one kind: how many, and the largest relative difference with its place."""

    count: int = 0
    largest: float = 0.0
    where: str = ""

    def add(self, stage: Stage, finding: Finding) -> None:
        self.count += 1
        if finding.gap.relative > self.largest:
            self.largest, self.where = finding.gap.relative, place_of(stage, finding)


@dataclass
class Verdict:
    """What the comparison found.

    Attributes:
        tallies: by kind of stage, in the order of first appearance; without the stage that differs.
        stage: the first stage that differs, None when all agree.
        differing: its findings beyond the tolerance, the first one the nearest to the cause.
        left_out: weights that were moved by rounding alone and are not compared.
    """

    tallies: dict[str, Tally] = field(default_factory=dict)
    stage: Stage | None = None
    differing: list[Finding] = field(default_factory=list)
    left_out: int = 0


def compare(plan: Records, alone: Records, steps: int, tolerance: float) -> Verdict:
    """Compare two runs of ``steps`` steps.

    Args:
        tolerance: largest relative difference that still agrees.

    Raises:
        NotComparable: when the run in one process gives no finite numbers.
    """
    verdict, trust = Verdict(), Trust()
    for stage in stages(plan, alone, steps, trust):
        # not "greater than": a difference that is not a number must not pass
        verdict.differing = [found for found in stage.findings if not found.gap.relative <= tolerance]
        if verdict.differing:
            verdict.stage = stage
            break
        for finding in stage.findings:
            verdict.tallies.setdefault(stage.kind, Tally()).add(stage, finding)
    verdict.left_out = trust.left_out
    return verdict


def place_of(stage: Stage, finding: Finding) -> str:
    """``head, sample 3, step 2, rank 1``."""
    parts = [f"{finding.of} of {finding.name}" if finding.of else finding.name]
    parts.append(f"step {stage.step}" if stage.step else "")
    parts.append(f"rank {finding.rank}" if finding.rank is not None else "")
    return ", ".join(filter(None, parts))
