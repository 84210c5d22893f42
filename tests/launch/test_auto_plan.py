"""``parallel = "auto"``: what is asked of the search, and that runs train under what it answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.launching import LAUNCH, environment, finish, launch, rows_of, start, start_slurm_tasks

from colossus.cli.main import main
from colossus.config import Config, ConfigError, load_config, state_config
from colossus.launch.auto_plan import resolve_planned
from colossus.planner.candidates import plans
from colossus.planner.fixed_keys import FixedKeys
from colossus.planner.model_layouts import layouts
from colossus.planner.plan_estimate import PlanEstimate, PlanMemory, RankMemory, SearchResult, StoredBytes

GPT = """
parallel = {parallel}
model = dict(type="GPT", num_layers=2, hidden_size=32, num_heads=2, seq_len=16)
data = dict(type="PythonStdlib")
train = dict(steps=2, global_batch_size=8)
device = "cpu"
"""


class FakeSearch:
    """Takes the plan with the highest stage of ZeRO, then the fewest microbatches; bytes of activations are 1000."""

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}

    def __call__(self, config: Config, hardware: Any, **arguments: Any) -> SearchResult:
        self.asked = dict(hardware=hardware.name, **arguments)
        fixed, devices, hosts = FixedKeys.of(config, arguments["keep"]), arguments["devices"], arguments["hosts"]
        every = [
            plan
            for layout in layouts(fixed, devices, hosts=hosts)
            for plan in plans(fixed, devices, layout, hosts=hosts)
        ]
        fitting = [plan for plan in every if plan.config.parallel.pipeline.size == arguments["keep"].get("pipeline", 1)]
        best = max(fitting, key=lambda p: (p.config.parallel.zero.stage, -p.config.schedule.microbatches))
        stored = StoredBytes(24, 0, 0, 0, 0)
        memory = PlanMemory((RankMemory(0, (0,), 1, stored, dict(weights=24, activations=1000)),))
        estimate = PlanEstimate(best.config, best.overrides, 0.5, 4.0, None, None, memory, {}, {}, 0.0, [])
        fits = memory.fullest.total <= arguments["memory"]
        return SearchResult([estimate] if fits else [], len(every), None if fits else estimate, 0.1)


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> FakeSearch:
    fake = FakeSearch()
    monkeypatch.setitem(sys.modules, "colossus.planner.search", SimpleNamespace(search=fake))
    return fake


def config_file(folder: Path, parallel: Any) -> str:
    path = folder / "gpt.py"
    path.write_text(GPT.format(parallel=repr(parallel)))
    return str(path)


# -- what is asked, what is told ------------------------------------------------------------------------------


def test_what_is_given_stays_and_the_rest_is_asked_for(search: FakeSearch, tmp_path: Path) -> None:
    auto = dict(keep=dict(pipeline=2, schedule=dict(type="zb-h1")), hardware="h100", memory="60GB")
    path = config_file(
        tmp_path, dict(auto=auto, tensor=dict(mode="2d"), rank_order=["data", "pipeline", "sequence", "tensor"])
    )
    planned = resolve_planned(state_config(path, ["parallel.zero=1", "schedule.microbatches=1"]), 8, hosts=2)
    arguments = search.asked
    assert arguments["keep"] == {"tensor": {"mode": "2d"}, "zero": {"stage": 1}, **auto["keep"]}
    assert (arguments["devices"], arguments["hosts"], arguments["memory"]) == (8, 2, 60e9)
    assert arguments["hardware"] == "H100 (data sheet)"
    parallel = planned.config.parallel
    assert (parallel.pipeline.size, parallel.tensor.mode, parallel.zero.stage, parallel.auto) == (2, "2d", 1, None)
    assert planned.config.schedule.type == "zb-h1"
    assert parallel.rank_order[0] == "data"
    assert planned.lines[0].startswith("plan        data ")
    assert planned.lines[1] == "predicted   0.5 s a step, 1.02 KB on the fullest rank; H100 (data sheet)"


def test_without_hardware_the_plan_is_for_this_machine(search: FakeSearch, tmp_path: Path) -> None:
    resolve_planned(state_config(config_file(tmp_path, "auto")), 2)
    assert search.asked["hardware"] == "a typical CPU (round numbers)"
    assert search.asked["hosts"] == 1


def test_dry_run_and_show_tell_the_plan(search: FakeSearch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = config_file(tmp_path, "auto")
    assert main(["launch", path, "--nproc", "2", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "plan        data 2, ZeRO 3: 2 processes" in out
    assert "predicted   0.5 s a step" in out
    assert main(["show", path, "--nproc", "2"]) == 0
    printed = capsys.readouterr()
    assert "plan        data 2, ZeRO 3: 2 processes" in printed.out
    assert "predicted   0.5 s a step" in printed.err


def test_colossus_plan_asks_the_same(search: FakeSearch, tmp_path: Path) -> None:
    auto = dict(keep=dict(pipeline=2), hardware="a100", memory="1000 B")
    path = config_file(tmp_path, dict(auto=auto, tensor=dict(mode="1d")))
    assert main(["plan", path, "--devices", "4", "--keep", "zero=1"]) == 2  # which needs more than 1000 B
    assert search.asked["keep"] == {"tensor": {"mode": "1d"}, "pipeline": 2, "parallel": {"zero": 1}}
    assert (search.asked["hardware"], search.asked["memory"]) == ("A100 (data sheet)", 1000)


@pytest.mark.parametrize(
    ("parallel", "arguments", "message"),
    [
        ("auto", [], "the number of processes is not known: give --nproc"),
        (
            dict(auto=dict(memory="1000 B")),
            ["--nproc", "2"],
            "24 B too much; 1.00 KB of it are activations:\n  parallel.data=2",
        ),
        (dict(auto=dict(memory="much")), ["--nproc", "2"], "parallel.auto.memory: 'much' is no size of memory"),
        (dict(auto=dict(hardware="h10")), ["--nproc", "2"], "did you mean H100?"),
        (dict(auto=dict(hardware="none.json")), ["--nproc", "2"], "cannot be read as a file of measured times"),
        (dict(auto=dict(keep=dict(pipelin=2))), ["--nproc", "2"], "parallel.pipelin: no such key; did you mean"),
        ("automatic", ["--nproc", "2"], "parallel: must be a section, dict(...), got 'automatic'"),
    ],
)
def test_errors_come_before_a_process_is_started(
    search: FakeSearch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    parallel: Any,
    arguments: list[str],
    message: str,
) -> None:
    assert main(["launch", config_file(tmp_path, parallel), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_other_uses_of_a_config_want_a_plan() -> None:
    with pytest.raises(ConfigError, match=r"parallel\.auto: no plan is chosen here"):
        load_config(dict(parallel="auto"))


def test_a_config_with_a_plan_needs_no_torch(tmp_path: Path) -> None:
    path = config_file(tmp_path, dict(data=2))
    code = (
        "import sys; from colossus.config import state_config; from colossus.launch.auto_plan import resolve_planned; "
        f"resolve_planned(state_config({path!r}), 2)"
    )
    code += "; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env=environment(), check=False).returncode == 0


# -- runs -----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_run_trains_and_goes_on_with_another_number_of_processes(search: FakeSearch, tmp_path: Path) -> None:
    steps = ["parallel=auto", "checkpoint.every=1", "train.eval_every=0"]
    code, out, err = launch(tmp_path, *steps, "--nproc", "2", "train.steps=2", "train.schedule_steps=4")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("plan        data 2, ZeRO 3: the best of ")
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]
    assert (saved["data"], saved["zero"]["stage"], saved["auto"]) == (2, 3, None)

    code, out, err = launch(tmp_path, *steps, "--nproc", "4", "train.steps=4", "--resume")
    assert (code, err) == (0, "")
    assert out.splitlines()[0].startswith("plan        data 4, ZeRO 3: the best of ")
    rows = rows_of(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    (later,) = (tmp_path / "run").glob("config.step-*.json")
    assert json.loads(later.read_text())["parallel"]["data"] == 4


def test_under_slurm_every_rank_finds_the_same_plan(search: FakeSearch, tmp_path: Path) -> None:
    ended = [finish(task) for task in start_slurm_tasks(tmp_path, "parallel=auto", "--run-dir", "run")]
    assert [code for code, _, _ in ended] == [0, 0]
    assert "predicted   0.5 s a step" in ended[0][1]
    assert ended[1][1] == ""
    saved = json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]
    assert (saved["data"], saved["zero"]["stage"]) == (2, 3)


@pytest.mark.long
def test_under_torchrun_ranks_search_for_themselves(tmp_path: Path) -> None:
    """With the search as it is, in Pythons of their own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    code, out, err = finish(start([*torchrun, *LAUNCH[1:], "parallel=auto", "--run-dir", "run"], tmp_path))
    assert code == 0, err
    assert out.count("predicted   ") == 1
    assert json.loads((tmp_path / "run" / "config.json").read_text())["parallel"]["data"] == 2
    assert [row["step"] for row in rows_of(tmp_path / "run")] == [1, 2, 3, 4, 5]
