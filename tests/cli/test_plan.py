"""``colossus plan``: the tables, JSON and pictures of plans that are made by hand, and what is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colossus.arithmetic import parse_bytes
from colossus.cli import plan as command
from colossus.cli.main import main
from colossus.cli.plan_hardware import network_argument
from colossus.cli.plan_table import Question, as_json, plan_words
from colossus.config import load_config
from colossus.context.local_ranks import RanksFailed
from colossus.doctor import measure
from colossus.hardware.data_sheets import FromDataSheet
from colossus.hardware.hardware import Link
from colossus.hardware.named_hardware import default_hosts
from colossus.planner.plan_estimate import AxisCost, PlanEstimate, PlanMemory, RankMemory, SearchResult, StoredBytes
from colossus.schedule.actions import Action
from colossus.schedule.build import make_schedule
from colossus.schedule.simulate import play

REPOSITORY = Path(__file__).parents[2]
CONFIG = """
model = dict(type="GPT", num_layers=4, hidden_size=64, num_heads=8, vocab_size=256, seq_len=32)
data = dict(type="PythonStdlib")
train = dict(steps=10, global_batch_size=64)
"""
SECONDS = {"forward": 1e-3, "backward": 2e-3}
#: overrides, bubble, parts of a step in seconds, GB of weights, optimizer, activations and on the host
PLANS: list[tuple[list[str], float, dict[str, float], tuple[int, int, int, int]]] = [
    (
        ["parallel.data=4", "parallel.pipeline=4", "parallel.zero=1", "schedule.microbatches=8",
         "train.activation_checkpoint=full"],
        0.25,
        {"forward": 0.2, "backward": 0.4, "recomputation": 0.2, "over data": 0.1, "bubble": 0.3, "optimizer": 0.05},
        (20, 10, 30, 0),
    ),
    (
        ["parallel.data=2", "parallel.tensor=8", "parallel.tensor.weights=step", "parallel.tensor.gathered=keep"],
        0.0,
        {"forward": 0.25, "backward": 0.5, "over tensor": 0.7, "optimizer": 0.05},
        (30, 20, 25, 8),
    ),
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "small.py"
    path.write_text(CONFIG)
    return str(path)


def estimates(file: str) -> list[PlanEstimate]:
    """Of `PLANS`, on 16 devices."""
    plans = []
    for overrides, bubble, parts, sizes in PLANS:
        config = load_config(file, overrides)
        weights, optimizer, activations, on_host = (size * 10**9 for size in sizes)
        stored = StoredBytes(weights, 0, optimizer, 0, on_host)
        kinds = dict(weights=weights, gradients=0, optimizer=optimizer)
        size, schedule = config.parallel.pipeline.size, config.schedule
        actions = make_schedule(schedule.type, size, schedule.microbatches)
        plans.append(
            PlanEstimate(
                config=config,
                overrides=tuple(overrides),
                seconds=sum(parts.values()),
                tokens=2048,
                flops=1e15,
                peak_flops=16e15,
                memory=PlanMemory(
                    tuple(
                        RankMemory(
                            at,
                            (at,),
                            1,
                            stored,
                            {**kinds, "activations": activations // (1 + at), "on the host": -on_host},
                        )
                        for at in range(size)
                    )
                ),
                axes={part[5:]: AxisCost(3e9, 2 * parts[part], parts[part]) for part in parts if part[:5] == "over "},
                parts=parts,
                bubble=bubble,
                spans=play(actions, lambda action: SECONDS.get(action.kind, 0.0)),
            )
        )
    return plans


@pytest.fixture
def searched(config: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the search is asked for; it finds `PLANS`, or ``result``."""
    asked: dict[str, Any] = {"result": SearchResult(estimates(config), 1234, None, 2.5)}

    def search(config: Any, hardware: Any, **options: Any) -> SearchResult:
        asked.update(options, hardware=hardware)
        result: SearchResult = asked["result"]
        return result

    def check(estimate: PlanEstimate, *, hardware: Any, hosts: int) -> Any:
        asked["checked"] = estimate.overrides
        return SimpleNamespace(render=lambda: "all of it", as_json=lambda: {"ranks": 3}, is_equal=asked["is_equal"])

    fake = SimpleNamespace(import_module=lambda name: SimpleNamespace(search=search, check=check))
    monkeypatch.setattr(command, "importlib", fake)
    monkeypatch.setenv("COLUMNS", "100")
    return asked


def line(config: str, *more: str) -> list[str]:
    return ["plan", config, "--devices", "16", "--hardware", "h100", *more]


def test_a_key_that_is_no_part_of_a_plan_may_follow_those_to_keep(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    keep = ["--keep", "pipeline=4", "train.activation_checkpoint=none", "model.num_layers=4", "train.precision=fp32"]
    assert main(line(config, *keep)) == 0
    assert searched["keep"] == {"parallel": {"pipeline": 4}, "train": {"activation_checkpoint": "none"}}
    (run,) = (words for words in capsys.readouterr().out.split("\n\n") if "colossus launch" in words)
    assert {"model.num_layers=4", "train.precision=fp32"} <= set(run.split())


def test_the_table(config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    words = line(
        config, "model.num_layers=4", "train.precision=fp32", "--keep", "pipeline=4", "schedule.microbatches=8"
    )
    assert main(words) == 0
    out, err = capsys.readouterr()
    assert not err
    assert max(map(len, out.replace(config, "s.py").splitlines())) <= 100
    head, plans, memory, step, sent, run = out.split("\n\n")
    assert head.splitlines()[1:] == [
        "model       GPT, fp32",
        "batch       64 sequences, 2,048 tokens a step",
        "devices     16 on 2 hosts, 80.0 GB each",
        "hardware    H100 (data sheet); between hosts 14 us and 40 GB/s per device",
        "tried       1,234 plans in 2.5 s",
    ]
    assert plans.splitlines() == [
        "     step  tokens/s    MFU   memory  bubble  exposed  plan",
        "1  1.25 s     1,638  5.0 %  60.0 GB  25.0 %    8.0 %  data 4 x pipeline 4, ZeRO 1, 1f1b, 8",
        "                                                      microbatches, full checkpointing",
        "2   1.5 s     1,365  4.2 %  67.0 GB   0.0 %   46.7 %  data 2 x tensor 8 (1d), weights gathered once",
        "                                                      per step, gathered inputs kept",
    ]
    assert memory.splitlines()[0] == "the best    60.0 GB of 80.0 GB on pipeline rank 0 of 4"
    assert [row.split()[:3] for row in memory.splitlines()[1:]] == [
        ["weights", "20.0", "GB"], ["optimizer", "10.0", "GB"], ["activations", "30.0", "GB"], ["total", "60.0", "GB"]
    ]  # fmt: skip
    assert ["over", "data", "100", "ms", "8.0", "%"] in [row.split() for row in step.splitlines()]
    assert sent.splitlines()[-1].split() == ["data", "3.00", "GB", "200", "ms", "100", "ms"]
    place, *lines = run.splitlines()
    assert place == "run it on each host"
    assert all(line.endswith(" \\") for line in lines[:-1])
    shell = ["colossus", "launch", config, "model.num_layers=4", "train.precision=fp32", *PLANS[0][0]]
    assert shlex.split(" ".join(line.rstrip("\\") for line in lines)) == [
        *shell,
        "--nnodes",
        "2",
        "--rdzv-endpoint",
        "HOST:PORT",
    ]
    assert searched["keep"] == {"parallel": {"pipeline": 4}, "schedule": {"microbatches": 8}}
    assert (searched["devices"], searched["hosts"], searched["memory"], searched["top"]) == (16, 2, 80e9, 10)


def test_usual_plans_that_do_not_fit_are_listed_too(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = estimates(config)
    searched["result"] = replace(searched["result"], usual={"FSDP": one, "HSDP": two})
    assert main(line(config, "--memory", "65GB")) == 0
    rows = capsys.readouterr().out.split("usual plans\n")[1].split("\n\n")[0].splitlines()
    assert rows[1].split()[:2] == ["FSDP", "1.25"]
    assert rows[3].startswith("HSDP, does not fit   1.5 s")
    assert searched["usual"]


def test_one_plan_explained(config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line(config, "--explain")) == 0
    first = capsys.readouterr().out
    assert first.startswith("plan 1 of 2, 1.25 s a step: data 4 x pipeline 4, ZeRO 1,")
    # of 1F1B: (microbatches + stages - 1) times a forward and a backward, here 1 and 2 ms
    assert next(row for row in first.splitlines() if row.startswith("time  ")).split() == ["time", "0", "33"]
    rows = [row.split() for row in first.splitlines()]
    assert ["pipeline", "4", "ranks", "over", "2", "hosts"] in rows
    assert ["data", "4", "ranks", "inside", "a", "host"] in rows
    assert " ".join(first.split("why ")[1].split()) == (
        "250 ms (16.7 %) less per step than plan 2, data 2 x tensor 8 (1d), weights gathered once per step, "
        "gathered inputs kept: over tensor -700 ms, bubble +300 ms, recomputation +200 ms, over data +100 ms"
    )
    assert main(line(config, "--explain", "2", "--json", "-")) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert [span["kind"] for span in plans[1]["timeline"][0]][:2] == ["forward", "backward"]
    assert "timeline" not in plans[0]
    assert main(line(config, "--explain", "2")) == 0
    last = capsys.readouterr().out
    assert "why" not in last
    assert "optimizer" in last


def test_the_timeline_of_many_microbatches_ends_with_the_last_that_is_shown(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = estimates(config)[0]
    long = load_config(config, [*PLANS[0][0], "schedule.microbatches=64", "train.global_batch_size=256"])
    actions = [
        [*own, Action("reduce", stage, 0), Action("step", stage, 0)]
        for stage, own in enumerate(make_schedule("1f1b", 4, 64))
    ]
    seconds = {**SECONDS, "reduce": 5e-3, "step": 5e-3}
    spans = play(actions, lambda action: seconds.get(action.kind, 0.0))
    searched["result"] = SearchResult([replace(plan, config=long, spans=spans)], 1, None, 0.1)
    assert main(line(config, "--explain")) == 0
    timeline = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert timeline[0] == "timeline    milliseconds, of the first 12 microbatches of 64"
    # the first 12 of 64 microbatches of 3 ms, and three stages on the way; the whole step takes (64 + 3) * 3 + 10 ms
    assert 12 * 3 <= float(next(row for row in timeline if row.startswith("time  ")).split()[-1]) <= (12 + 6) * 3


def test_json_has_all_numbers(config: str) -> None:
    one, two = estimates(config)
    question = Question("f.py", (), load_config(config), FromDataSheet("h100"), 16, 2, 70e9)
    numbers = json.loads(json.dumps(as_json(question, SearchResult([one, two], 9, None, 1.0))))
    assert (numbers["memory"], numbers["hardware"]["is_measured"], numbers["tried"]) == (70e9, False, 9)
    plan = numbers["plans"][0]
    assert (plan["step_seconds"], plan["tokens_per_second"], plan["mfu"]) == (1.25, 2048 / 1.25, 1e15 / 1.25 / 16e15)
    assert sum(plan["parts"].values()) == pytest.approx(1.25)
    assert plan["axes"] == {"data": {"bytes": 3e9, "seconds": 0.2, "exposed": 0.1}}
    assert plan["memory"]["ranks"][1]["total"] == 45e9
    assert plan["overrides"] == PLANS[0][0]


def test_ctrl_c_prints_what_was_found(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    searched["result"] = replace(searched["result"], stopped=True)
    assert main(line(config)) == 130
    out, err = capsys.readouterr()
    assert ("data 2 x tensor 8" in out, err) == (True, "stopped by Ctrl-C after 1,234 plans\n")
    searched["result"] = SearchResult([], 3, None, 0.1, stopped=True)
    assert main(line(config)) == 130
    assert capsys.readouterr().err == "colossus: stopped by Ctrl-C\n"


@pytest.mark.parametrize(("is_equal", "code"), [(True, 0), (False, 3)])
def test_a_plan_is_checked(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str], is_equal: bool, code: int
) -> None:
    searched["is_equal"] = is_equal
    assert main(line(config, "--check", "2")) == code
    assert capsys.readouterr().out.endswith("plan 2\nall of it\n")
    assert searched["checked"] == tuple(PLANS[1][0])
    assert main(line(config, "--check", "--json", "-")) == code
    assert json.loads(capsys.readouterr().out)["plans"][0]["check"] == {"ranks": 3}
    assert main(line(config, "--check", "3")) == 2
    assert capsys.readouterr().err == "colossus: --check 3: the list has 2 plans\n"


def test_where_nothing_fits_the_nearest_is_told(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    searched["result"] = SearchResult([], 99, estimates(config)[1], 0.1)
    assert main(line(config, "--memory", "60GB", "--keep", "data=2")) == 2
    err = capsys.readouterr().err
    assert "in this order: leave open what is kept (parallel.data); use more --devices, devices of more" in err
    assert (
        "no plan for 16 devices of 60.0 GB fits (99 tried). The nearest needs 67.0 GB on each rank, 7.00 GB too" in err
    )
    assert "data 2 x tensor 8 (1d)" in err
    assert ["activations", "25.0", "GB"] in [row.split()[:3] for row in err.splitlines()]


def test_files_that_cannot_be_written(
    config: str, searched: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(line(config, "--json", str(tmp_path))) == 2
    assert "colossus: --json: [Errno 21] Is a directory" in capsys.readouterr().err


def test_the_plan_of_the_file_counts_for_nothing(
    config: str, searched: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    own = ["parallel.data=2", "schedule.microbatches=2", "train.global_batch_size=7"]
    assert main(line(config, *own)) == 0
    assert "batch       7 sequences" in capsys.readouterr().out
    assert main(["plan", config, "--hardware", "h100", *own]) == 2
    assert "train.global_batch_size = 7 is not a multiple of data 2 x microbatches 2" in capsys.readouterr().err


#: words of a command line, and what of its error is told
REFUSED = [
    (["--devices", "0"], "--devices: must be a whole number of at least 1"),
    (["--devices", "6", "--hosts", "4"], "--hosts 4: 6 devices cannot be spread evenly over 4 hosts"),
    (["--explain", "12"], "--explain 12: the list has 10 plans"),
    (["--hardware", "h1000"], "--hardware: 'h1000' has no data sheet here with memory and links; B200, H100"),
    (["--hardware", "none.json"], "none.json: cannot be read as a file of measured times"),
    (
        ["--hardware", "cpu", "--devices", "64"],
        "this machine's CPU is measured with 8 ranks at most, not with 64 ranks",
    ),
    (["--memory", "8x"], "--memory: '8x' is no size of memory; write 80GB"),
    (["--network", "10us"], "--network: '10us' is no latency and bandwidth; write 10us,50GB/s"),
    (["--json", "nowhere/plan.json"], "--json nowhere/plan.json: the folder nowhere does not exist"),
    (["data=None"], "data: the config has none"),
    (["model=None"], "model: the config has none"),
    (["--hardware", "h100", "--keep", "tensr=2"], "parallel.tensr: no such key; did you mean parallel.tensor?"),
    (["train.global_batch=3"], "train.global_batch: no such key"),
]


def test_what_is_refused_without_torch(config: str) -> None:
    code = f"""
import contextlib, io, json, sys
from colossus.cli.main import main
for words in {[words for words, _ in REFUSED]!r}:
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(["plan", {config!r}, *words])
    print(json.dumps([code, err.getvalue(), "torch" in sys.modules]))
"""
    environment = {key: value for key, value in os.environ.items() if key != "WORLD_SIZE"}
    environment["PYTHONPATH"] = str(REPOSITORY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(REFUSED), done.stderr
    for (_, message), (code, err, has_torch) in zip(REFUSED, answers, strict=True):
        assert (code, has_torch) == (2, False), err
        assert message in err


def test_this_machine_is_its_gpu_by_the_data_sheet_or_else_its_cpu_measured(
    config: str, searched: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, code, words in [
        ("NVIDIA H100 80GB HBM3", 0, "hardware    H100 (data sheet)"),
        (
            "NVIDIA L4",
            2,
            "colossus: --hardware: 'NVIDIA L4' has no data sheet here with memory and links; B200, H100",
        ),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        assert main(["plan", config, "--devices", "16"]) == code
        assert words in "".join(capsys.readouterr())

    def fails(ranks: int, device: str, sizes: Any) -> None:
        assert (ranks, device, sizes.dtypes) == (4, "cpu", ("bf16", "fp32"))
        raise RanksFailed({1: "no room"}, {}, [])

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(measure, "measure_ranks", fails)
    assert main(["plan", config, "--devices", "4", "train.precision=bf16"]) == 2
    assert "--hardware: this machine could not be measured: rank 1" in capsys.readouterr().err


def test_sizes_and_links() -> None:
    assert [parse_bytes(text) for text in ("80GB", "1.5 KiB", "500")] == [80 * 10**9, 1536, 500]
    for text in ("8x", "0GB", "0.5B", "1iB"):
        with pytest.raises(ValueError, match=f"'{text}' is no size of memory; write 80GB"):
            parse_bytes(text)
    assert network_argument("10us,50GB/s") == Link(1e-5, 50e9)
    assert network_argument("0.5ms,400Gb/s") == Link(5e-4, 50e9)


def test_hosts_that_nobody_names() -> None:
    sheet = FromDataSheet("h100")
    assert [default_hosts(sheet, devices) for devices in (1, 8, 12, 20, 22, 4096)] == [1, 1, 2, 4, 11, 512]


# with the search itself

KEPT = [
    "--keep",
    "sequence=1",
    "tensor=1",
    "schedule=dict(type='1f1b', microbatches=4)",
    "train.activation_checkpoint=none",
]


def test_what_is_found_can_be_launched(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", config, "--devices", "4", "--hardware", "h100", "train.global_batch_size=32", *KEPT]
    assert main([*words, "--top", "3", "--json", "-"]) == 0
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert len(plans) == 3
    assert [plan["step_seconds"] for plan in plans] == sorted(plan["step_seconds"] for plan in plans)
    for plan in plans:
        launched = load_config(config, ["train.global_batch_size=32", *plan["overrides"]], nproc=4)
        assert plan_words(launched) == plan["plan"]
        assert plan["tokens_per_step"] == 32 * 32
        assert sum(plan["parts"].values()) == pytest.approx(plan["step_seconds"])
    assert main([*words, "--memory", "20KB"]) == 2
    assert "no plan for 4 devices of 20.0 KB fits" in capsys.readouterr().err
