"""The outputs of modules under the plan against those of one process, sample by sample, or token by token."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from colossus.verify.difference import Difference, difference_of_fingerprints, first_of_the_largest
from colossus.verify.findings import Finding
from colossus.verify.records import Call, Output, RankStep


def compare_outputs(ranks: Sequence[RankStep], reference: RankStep) -> list[Finding]:
    """Each module's output, per sample on every rank that has it, in the order of the calls of one process."""
    place = {key: row for row, key in enumerate(reference.samples)}
    calls = titles(ranks)
    findings = []
    for name, call in titles([reference])[0].items():
        expected = reference.outputs[call]
        found: dict[int, Finding] = {}
        for rank, (step, titled) in enumerate(zip(ranks, calls, strict=True)):
            if name in titled:
                finding = _output(name, step, rank, step.outputs[titled[name]], reference, expected, place)
                found[rank] = replace(finding, stage=titled[name].stage)
        if found:
            by_rank = {rank: finding.difference.relative for rank, finding in found.items()}
            worst = found[list(found)[first_of_the_largest(torch.tensor([*by_rank.values()], dtype=torch.float64))]]
            findings.append(replace(worst, by_rank=by_rank))
    return findings


def titles(ranks: Sequence[RankStep]) -> list[dict[str, Call]]:
    """Each rank's outputs by their titles in the full model, ``block, call 2, output[0]``.

    A module that several stages of a pipeline call has its calls counted from the first stage on, whichever ranks these
    stages are on.
    """
    counts: dict[str, dict[int, int]] = defaultdict(dict)
    for step in ranks:
        for (stage, module), count in step.calls.items():
            counts[module][stage] = max(count, counts[module].get(stage, 0))

    def title(call: Call) -> str:
        number = call.number + sum(count for stage, count in counts[call.module].items() if stage < call.stage)
        return call.module + (f", call {number}" if number > 1 else "") + (f", output{call.path}" if call.path else "")

    return [{title(call): call for call in step.outputs} for step in ranks]


def _output(
    name: str,
    step: RankStep,
    rank: int,
    held: Output,
    reference: RankStep,
    expected: Output,
    place: Mapping[tuple[str, ...], int],
) -> Finding:
    rows = torch.tensor([place[key] for key in step.samples])
    if held.shape == expected.shape:
        difference, row = difference_of_fingerprints(held.rows, expected.rows[rows])
        return Finding(f"{name}, sample {int(rows[row])}", difference, rank)
    dim = _token_dim(step, held, reference, expected)
    if dim is None:
        message = f"shape {list(held.shape)} for each sample, in one process {list(expected.shape)}"
        if len(step.positions) != len(reference.positions):
            tokens = f"{len(step.positions)} of the {reference.num_positions} tokens of a sequence"
            message += f": this rank has {tokens}, and nothing else may be of another size"
        return Finding(name, Difference(math.inf), rank, message)
    own = [number for number, position in enumerate(step.positions) if position < reference.num_positions]
    if not own:  # padding only
        return Finding(name, Difference(0.0), rank)
    positions = [step.positions[number] for number in own]
    mine, others = held.by_token[dim][:, own], expected.by_token[dim][rows][:, positions]
    difference, worst = difference_of_fingerprints(mine.flatten(0, 1), others.flatten(0, 1))
    row, token = divmod(worst, len(own))
    return Finding(f"{name}, sample {int(rows[row])}, token {positions[token]}", difference, rank)


def _token_dim(step: RankStep, held: Output, reference: RankStep, expected: Output) -> int | None:
    """The one dim of a sample in which the shapes differ, by the tokens of the rank and those of a sequence."""
    if len(held.shape) != len(expected.shape):
        return None
    differing = [dim for dim, sizes in enumerate(zip(held.shape, expected.shape, strict=True)) if len({*sizes}) > 1]
    both = held.by_token.keys() & expected.by_token.keys()
    return differing[0] if len(differing) == 1 and differing[0] in both else None
