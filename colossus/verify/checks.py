"""What is compared, in the order in which one thing follows from another: the first that differs is the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from colossus.verify.difference import (
    FLOOR,
    ComparableWeights,
    Difference,
    difference_of,
    difference_of_fingerprints,
    difference_of_numbers,
    norm_of,
)
from colossus.verify.findings import Finding
from colossus.verify.outputs import compare_outputs
from colossus.verify.records import RankStep, Records

#: kind of a check -> what the report calls the things of that kind
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
class Check:
    """What was compared of one kind at one step (0: before the first), the finding nearest to the cause first."""

    kind: str
    step: int
    findings: list[Finding] = field(default_factory=list)


@dataclass
class Agreement:
    """What was compared of one kind: how many, and the largest relative difference with its place."""

    count: int = 0
    largest: float = 0.0
    where: str = ""

    def add(self, check: Check, finding: Finding) -> None:
        self.count += 1
        if finding.difference.relative > self.largest:
            self.largest, self.where = finding.difference.relative, place_of(check, finding)


@dataclass
class Verdict:
    """What the comparison found.

    Attributes:
        agreements: by kind of check, in the order of first appearance; without the check that differs.
        check: the first check that differs, None when all agree.
        differing: its findings beyond the tolerance, the first one the nearest to the cause.
        num_left_out: weights that are not compared, since rounding alone may have moved them.
    """

    agreements: dict[str, Agreement] = field(default_factory=dict)
    check: Check | None = None
    differing: list[Finding] = field(default_factory=list)
    num_left_out: int = 0


def compare(plan: Records, reference: Records, steps: int, tolerance: float) -> Verdict:
    """Compare two runs of ``steps`` steps.

    Args:
        tolerance: largest relative difference that still agrees.

    Raises:
        NotComparable: when the run in one process gives no finite numbers.
    """
    verdict, comparable = Verdict(), ComparableWeights()
    for check in checks(plan, reference, steps, comparable):
        # not "greater than": a difference that is not a number must not pass
        verdict.differing = [found for found in check.findings if not found.difference.relative <= tolerance]
        if verdict.differing:
            verdict.check = check
            break
        for finding in check.findings:
            verdict.agreements.setdefault(check.kind, Agreement()).add(check, finding)
    verdict.num_left_out = comparable.num_left_out
    return verdict


def place_of(check: Check, finding: Finding) -> str:
    """``head, sample 3, step 2, rank 1``."""
    words = [f"{finding.copy_of} of {finding.name}" if finding.copy_of else finding.name]
    words.append(f"step {check.step}" if check.step else "")
    words.append(f"rank {finding.rank}" if finding.rank is not None else "")
    return ", ".join(filter(None, words))


class NotComparable(ValueError):
    """The loss or gradient norm of the one-process run is not finite."""


def checks(plan: Records, reference: Records, steps: int, comparable: ComparableWeights) -> Iterator[Check]:
    """Every check of the two runs, in order; the records of a check are read when it is asked for.

    Raises:
        NotComparable: at a step whose loss or gradient norm is not finite in one process.
    """
    yield Check("start", 0, _weights(plan.full("weights", 0), reference.full("weights", 0), None))
    yield Check("copy", 0, _copies([plan.start(rank) for rank in range(plan.world_size)], "initial value"))
    for step in range(1, steps + 1):
        expected = reference.step(0, step)
        if not (math.isfinite(expected.loss) and math.isfinite(expected.grad_norm)):
            raise NotComparable(
                f"in one process step {step} has loss {expected.loss:g} and gradient norm {expected.grad_norm:g}"
            )
        ranks = [plan.step(rank, step) for rank in range(plan.world_size)]
        shards = [plan.rank_info(rank).batch_shard for rank in range(plan.world_size)]
        yield Check("data", step, _data(ranks, shards, expected))
        yield Check("output", step, compare_outputs(ranks, expected))
        yield Check("count", step, [Finding("", difference_of_numbers(ranks[0].tokens, expected.tokens))])
        yield Check("loss", step, [Finding("", difference_of_numbers(ranks[0].loss, expected.loss))])
        gradients = plan.full("gradients", step), reference.full("gradients", step)
        yield Check("gradient", step, _gradients(*gradients, expected.order))
        yield Check("copy", step, _copies([rank.gradients for rank in ranks], "gradient"))
        yield Check("norm", step, [Finding("", difference_of_numbers(ranks[0].grad_norm, expected.grad_norm))])
        comparable.update(*gradients)
        yield Check("weight", step, _weights(plan.full("weights", step), reference.full("weights", step), comparable))
        yield Check("copy", step, _copies([rank.weights for rank in ranks], "weight"))


def _weights(
    plan: Mapping[str, Tensor], reference: Mapping[str, Tensor], comparable: ComparableWeights | None
) -> list[Finding]:
    scale = FLOOR * norm_of(value for value in reference.values() if value.is_floating_point())
    findings = []
    for name in [*reference, *(name for name in plan if name not in reference)]:
        wrong = _unlike(plan.get(name), reference.get(name))
        if wrong:
            findings.append(Finding(name, Difference(math.inf), message=wrong))
        else:
            mask = comparable.mask(name) if comparable is not None else None
            findings.append(Finding(name, difference_of(plan[name], reference[name], scale, mask)))
    return findings


def _gradients(plan: Mapping[str, Tensor], reference: Mapping[str, Tensor], order: list[str]) -> list[Finding]:
    """In the order of backward: a wrong gradient of an activation spoils those that are computed after it."""
    scale = FLOOR * norm_of(reference.values())
    findings = []
    for name in dict.fromkeys([*(name for name in order if name in reference), *reference, *plan]):
        some = plan[name] if name in plan else reference[name]
        none = torch.zeros_like(some)
        mine, other = plan.get(name, none), reference.get(name, none)
        wrong = _unlike(mine, other)
        findings.append(
            Finding(name, Difference(math.inf) if wrong else difference_of(mine, other, scale), message=wrong)
        )
    return findings


def _unlike(plan: Tensor | None, reference: Tensor | None) -> str:
    if plan is None:
        return "the model has it in one process, but not under the plan: its constructor depends on the plan"
    if reference is None:
        return "the model has it under the plan, but not in one process: its constructor depends on the plan"
    if plan.shape != reference.shape:
        return (
            f"its full shape is {list(plan.shape)} under the plan and {list(reference.shape)} in one process: give "
            f"layers full sizes, they take their shard themselves"
        )
    return ""


def _copies(ranks: list[dict[str, Tensor]], copy_of: str) -> list[Finding]:
    """The full tensor that each rank gathers of what it holds, against that of the first rank that holds it."""
    findings = []
    first: dict[str, int] = {}
    for rank, fingerprints in enumerate(ranks):
        for name, held in fingerprints.items():
            other = first.setdefault(name, rank)
            if other != rank:
                difference, _ = difference_of_fingerprints(held.unsqueeze(0), ranks[other][name].unsqueeze(0))
                findings.append(Finding(name, difference, rank, copy_of=copy_of, other_rank=other))
    return findings


def _data(ranks: list[RankStep], shards: list[int], reference: RankStep) -> list[Finding]:
    """All ranks' samples are those of one process, and ranks on one shard of the batch have the same ones.

    Args:
        shards: of each rank, the index of its shard of the global batch.
    """
    findings = []
    first: dict[int, int] = {}
    for rank, (step, shard) in enumerate(zip(ranks, shards, strict=True)):
        other = first.setdefault(shard, rank)
        if other != rank:
            same = step.samples == ranks[other].samples
            message = "" if same else f"they are not those of rank {other}, which works on the same shard of the batch"
            findings.append(Finding("samples", Difference(0.0 if same else math.inf), rank, message))
    taken = Counter(key for rank in first.values() for key in ranks[rank].samples)
    expected = Counter(reference.samples)
    foreign = (taken - expected).total()
    missing = (expected - taken).total()
    message = ""
    if foreign or missing:
        message = (
            f"{foreign} of the {taken.total()} samples under the plan{_leaf(ranks[0], ranks, first, reference)} are "
            f"not among the {expected.total()} that one process takes"
        )
    return [Finding("samples", Difference(math.inf if message else 0.0), message=message), *findings]


def _leaf(some: RankStep, ranks: list[RankStep], first: dict[int, int], reference: RankStep) -> str:
    """Which tensors of the batch differ, when some of them agree."""
    if some.leaves != reference.leaves or len(some.leaves) < 2:
        return ""
    wrong = []
    for number, leaf in enumerate(some.leaves):
        taken = Counter(key[number] for rank in first.values() for key in ranks[rank].samples)
        if taken != Counter(key[number] for key in reference.samples):
            wrong.append(leaf)
    return f" (their {' and '.join(wrong)})" if wrong and len(wrong) < len(some.leaves) else ""
