"""Rows of the table of faults of runs that are restarted; `scripts/faults --restarts` runs and prints all of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers import restart_faults
from helpers.restart_faults import Case

REPRESENTATIVE = [
    Case("kill, from memory", "data 2"),
    Case("a loss spike", "data 2"),
    Case("while a restart builds the model", "zero 3"),
    Case("kill", "2 nodes"),
]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


def check(case: Case, folder: Path, undisturbed: Path) -> None:
    problems = restart_faults.run(case, folder, restart_faults.run_undisturbed(case, undisturbed))
    assert not problems, "\n".join(problems)


@pytest.mark.rest("while a restart builds the model under zero 3")
@pytest.mark.parametrize("case", REPRESENTATIVE, ids=str)
def test_a_run_that_is_restarted_ends_as_one_that_was_never_disturbed(
    case: Case, tmp_path: Path, undisturbed: Path
) -> None:
    check(case, tmp_path / "here", undisturbed)


@pytest.mark.long
@pytest.mark.usefixtures("short_grace")
@pytest.mark.parametrize("case", [case for case in restart_faults.cases() if case not in REPRESENTATIVE], ids=str)
def test_any_fault_under_any_plan_ends_so(case: Case, tmp_path: Path, undisturbed: Path) -> None:
    check(case, tmp_path / "here", undisturbed)
