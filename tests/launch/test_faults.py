"""Rows of the table faults x moments x plans; `scripts/faults` runs and prints all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import faults
from helpers.faults import Case

REPRESENTATIVE = [
    Case("exit0", "constructor", "2 nodes"),
    Case("hang", "constructor", "data 2"),
    Case("kill", "backward", "tensor 2"),
    Case("disk", "between steps", "data 2"),
    Case("int-group", "evaluation", "tensor 2"),
]
#: likewise, but seen by other tests of launches too
FURTHER = [
    Case("term", "constructor", "data 2"),
    Case("sysexit", "data", "data 2"),
    Case("kill-launcher", "close", "data 2"),
]
#: every fault at every moment, under one plan after the other
ROTATED = [
    case
    for number, (moment, fault) in enumerate((moment, fault) for moment in faults.MOMENTS for fault in faults.FAULTS)
    for case in faults.cases()
    if (case.moment, case.fault, case.plan) == (moment, fault, list(faults.PLANS)[number % len(faults.PLANS)])
    or case == Case("hang", "forward", "pipeline 2")
]


def check(case: Case, folder: Path) -> None:
    with faults.nothing_runs_on(folder):
        outcome = faults.run(case, folder)
    assert not faults.problems(case, outcome, timed=False), outcome.text


@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
@pytest.mark.rest("exit0 at constructor under 2 nodes", "hang at constructor under data 2")
def test_a_fault_ends_as_it_should(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "TIMEOUT_SECONDS", 3.0)
    check(case, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(
    "case", [case for case in dict.fromkeys([*FURTHER, *ROTATED]) if case not in REPRESENTATIVE], ids=str
)
def test_any_fault_at_any_moment_ends_as_it_should(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path)
