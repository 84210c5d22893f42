"""What is compared, in the order in which one thing follows from another: the first that differs is the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from colossus.verify.difference import FLOOR, Gap, Trust, gap_of, gap_of_numbers, gap_of_rows, norm_of
from colossus.verify.finding import Finding, Stage
from colossus.verify.outputs import compare_outputs
from colossus.verify.records import RankStep, Records


class NotComparable(ValueError):
    """The one-process run itself gives numbers that are none."""


def stages(plan: Records, alone: Records, steps: int, trust: Trust) -> Iterator[Stage]:
    """Every stage of the two runs; each is read when it is asked for.

    Raises:
        NotComparable: at a step whose loss or gradient norm is not finite in one process.
    """
    yield Stage("start", 0, _weights(plan.whole("weights", 0), alone.whole("weights", 0), None))
    yield Stage("copy", 0, _copies([plan.start(rank) for rank in range(plan.world_size)], "initial value"))
    for step in range(1, steps + 1):
        reference = alone.step(0, step)
        if not (math.isfinite(reference.loss) and math.isfinite(reference.grad_norm)):
            raise NotComparable(
                f"in one process step {step} has loss {reference.loss:g} and gradient norm {reference.grad_norm:g}"
            )
        ranks = [plan.step(rank, step) for rank in range(plan.world_size)]
        yield Stage("data", step, _data(ranks, [plan.facts(rank).batch_part for rank in range(len(ranks))], reference))
        yield Stage("output", step, compare_outputs(ranks, reference))
        yield Stage("count", step, [Finding("", gap_of_numbers(ranks[0].tokens, reference.tokens))])
        yield Stage("loss", step, [Finding("", gap_of_numbers(ranks[0].loss, reference.loss))])
        gradients = plan.whole("gradients", step), alone.whole("gradients", step)
        yield Stage("gradient", step, _gradients(*gradients, reference.order))
        yield Stage("copy", step, _copies([rank.gradients for rank in ranks], "gradient"))
        yield Stage("norm", step, [Finding("", gap_of_numbers(ranks[0].grad_norm, reference.grad_norm))])
        trust.learn(*gradients)
        yield Stage("weight", step, _weights(plan.whole("weights", step), alone.whole("weights", step), trust))
        yield Stage("copy", step, _copies([rank.weights for rank in ranks], "weight"))


def _weights(plan: Mapping[str, Tensor], alone: Mapping[str, Tensor], trust: Trust | None) -> list[Finding]:
    scale = FLOOR * norm_of(value for value in alone.values() if value.is_floating_point())
    findings = []
    for name in [*alone, *(name for name in plan if name not in alone)]:
        wrong = _unlike(plan.get(name), alone.get(name))
        if wrong:
            findings.append(Finding(name, Gap(math.inf), words=wrong))
        else:
            trusted = trust.of(name) if trust is not None else None
            findings.append(Finding(name, gap_of(plan[name], alone[name], scale, trusted)))
    return findings


def _gradients(plan: Mapping[str, Tensor], alone: Mapping[str, Tensor], order: list[str]) -> list[Finding]:
    """In the order of backward: a wrong gradient of an activation spoils those that are computed after it."""
    scale = FLOOR * norm_of(alone.values())
    findings = []
    for name in dict.fromkeys([*(name for name in order if name in alone), *alone, *plan]):
        some = plan[name] if name in plan else alone[name]
        none = torch.zeros_like(some)
        mine, other = plan.get(name, none), alone.get(name, none)
        wrong = _unlike(mine, other)
        findings.append(Finding(name, Gap(math.inf) if wrong else gap_of(mine, other, scale), words=wrong))
    return findings


def _unlike(plan: Tensor | None, alone: Tensor | None) -> str:
    if plan is None:
        return "the model has it in one process, but not under the plan: its constructor depends on the plan"
    if alone is None:
        return "the model has it under the plan, but not in one process: its constructor depends on the plan"
    if plan.shape != alone.shape:
        return (
            f"its full shape is {list(plan.shape)} under the plan and {list(alone.shape)} in one process: give layers "
            f"full sizes, they take their part themselves"
        )
    return ""


def _copies(ranks: list[dict[str, Tensor]], of: str) -> list[Finding]:
    """What each rank would gather of what it holds, against what the first rank that holds it has."""
    findings = []
    first: dict[str, int] = {}
    for rank, prints in enumerate(ranks):
        for name, print_ in prints.items():
            other = first.setdefault(name, rank)
            if other != rank:
                gap, _ = gap_of_rows(print_.unsqueeze(0), ranks[other][name].unsqueeze(0))
                findings.append(Finding(name, gap, rank, of=of, other=other))
    return findings


def _data(ranks: list[RankStep], parts: list[tuple[int, int]], alone: RankStep) -> list[Finding]:
    """The ranks' samples together are those of one process, and the ranks of one part of the batch hold the same."""
    findings = []
    first: dict[int, int] = {}
    for rank, (step, (part, _)) in enumerate(zip(ranks, parts, strict=True)):
        other = first.setdefault(part, rank)
        if other != rank:
            same = step.samples == ranks[other].samples
            words = "" if same else f"they are not those of rank {other}, which works on the same part of the batch"
            findings.append(Finding("samples", Gap(0.0 if same else math.inf), rank, words))
    together = Counter(key for rank in first.values() for key in ranks[rank].samples)
    expected = Counter(alone.samples)
    foreign = (together - expected).total()
    missing = (expected - together).total()
    words = ""
    if foreign or missing:
        words = (
            f"{foreign} of the {together.total()} samples under the plan{_leaf(ranks[0], ranks, first, alone)} are not "
            f"among the {expected.total()} that one process takes"
        )
    return [Finding("samples", Gap(math.inf if words else 0.0), words=words), *findings]


def _leaf(some: RankStep, ranks: list[RankStep], first: dict[int, int], alone: RankStep) -> str:
    """Which tensor of the batch it is, when it is one alone."""
    if some.leaves != alone.leaves or len(some.leaves) < 2:
        return ""
    wrong = []
    for number, leaf in enumerate(some.leaves):
        together = Counter(key[number] for rank in first.values() for key in ranks[rank].samples)
        if together != Counter(key[number] for key in alone.samples):
            wrong.append(leaf)
    return f" (their {' and '.join(wrong)})" if wrong and len(wrong) < len(some.leaves) else ""
