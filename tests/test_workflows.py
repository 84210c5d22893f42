"""The workflows of .github are whole: what they call exists, and they test each Python that the package names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def _read(path: Path) -> dict[Any, Any]:
    workflow: dict[Any, Any] = yaml.safe_load(path.read_text())
    return workflow


def _steps(workflow: dict[Any, Any]) -> Iterator[dict[str, Any]]:
    for job in workflow["jobs"].values():
        yield from job["steps"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_calls_what_there_is(path: Path) -> None:
    workflow = _read(path)
    assert workflow["permissions"] == {"contents": "read"}
    triggers = workflow[True]  # YAML 1.1 reads the key `on` as a truth value
    assert {"pull_request", "workflow_dispatch"} <= triggers.keys()
    for pattern in (triggers["pull_request"] or {}).get("paths", []):
        assert list(ROOT.glob(pattern)), f"{pattern} is no file"
    for name, job in workflow["jobs"].items():
        assert re.fullmatch(r"(ubuntu|macos)-latest", job["runs-on"]), name
        assert 10 <= job["timeout-minutes"] <= 60, name
        checkout, setup = job["steps"][:2]
        assert checkout["uses"].startswith("actions/checkout@"), name
        assert (ROOT / setup["with"].get("cache-dependency-path", "")).exists(), name
    for step in _steps(workflow):
        if "uses" in step:
            assert re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"])
            continue
        for word in re.findall(r"(?:scripts|tests)/[\w./-]+", step["run"]):
            called = ROOT / word
            assert called.exists(), f"{path.name} calls {word}"
            assert called.parent.name != "scripts" or called.stat().st_mode & 0o111, f"{word} is not executable"


def test_every_python_of_the_package_is_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    workflow = _read(ROOT / ".github" / "workflows" / "test.yml")
    matrix = workflow["jobs"]["linux"]["strategy"]["matrix"]
    oldest = project["requires-python"].removeprefix(">=")
    assert matrix["python"][0] == oldest
    named = {line.rsplit(" ", 1)[1] for line in project["classifiers"] if ":: 3." in line}
    assert named <= {*matrix["python"]}
    (torch,) = (line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    assert dict(python=oldest, torch=f"{torch}.*") in matrix["include"]
    assert dict(python=matrix["python"][-1], torch="newest") in matrix["include"]
