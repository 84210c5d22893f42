"""Compares the outputs of modules: each rank's with those of one process on the same samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from colossus.verify.difference import Gap, gap_of_rows
from colossus.verify.finding import Finding
from colossus.verify.records import Call, Output, RankStep


def compare_outputs(ranks: Sequence[RankStep], alone: RankStep) -> list[Finding]:
    """Each module's output, per sample on every rank that has it, in the order of the calls of one process."""
    place = {key: row for row, key in enumerate(alone.samples)}
    calls = titles(ranks)
    findings = []
    for name, call in titles([alone])[0].items():
        expected = alone.outputs[call]
        found: dict[int, Finding] = {}
        for rank, (step, titled) in enumerate(zip(ranks, calls, strict=True)):
            if name in titled:
                finding = _output(name, step, rank, step.outputs[titled[name]], expected, place)
                found[rank] = replace(finding, pipeline_stage=titled[name].stage)
        if found:
            worst = max(found.values(), key=lambda finding: finding.gap.relative)
            by_rank = {rank: finding.gap.relative for rank, finding in found.items()}
            findings.append(replace(worst, by_rank=by_rank))
    return findings


def titles(ranks: Sequence[RankStep]) -> list[dict[str, Call]]:
    """Each rank's outputs by their titles in the whole model, ``block, call 2, output[0]``.

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
    name: str, step: RankStep, rank: int, held: Output, expected: Output, place: Mapping[tuple[str, ...], int]
) -> Finding:
    if held.shape != expected.shape:
        words = f"shape {list(held.shape)} for each sample, in one process {list(expected.shape)}"
        return Finding(name, Gap(math.inf), rank, words)
    rows = torch.tensor([place[key] for key in step.samples])
    gap, row = gap_of_rows(held.rows, expected.rows[rows])
    return Finding(f"{name}, sample {int(rows[row])}", gap, rank)
