"""``colossus bench``: what is refused before a process starts, one small real measurement, its end by Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from helpers.launching import TINY, children, finish, start, wait_for

from colossus.cli.main import main
from colossus.comm.accounting import sent
from colossus.compare import timed_plan
from colossus.compare.bench_table import Measured, over_first
from colossus.compare.interleaved import Spread
from colossus.compare.timed_steps import Block

BENCH = [sys.executable, "-m", "colossus", "bench", str(TINY)]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data=2", "data=3", "dat=2"], ["data=3: train.global_batch_size = 4", "dat=2: parallel.dat: no such key"]),
        (["parallel.tensor"], ["'parallel.tensor' has no '='"]),
        (["parallel.strategy=server"], ["needs parameter servers, which bench does not start"]),
        (["--overrides", "model=None"], ["model: the config has none"]),
        (["--json", "nowhere/bench.json"], ["--json nowhere/bench.json: there is no folder nowhere"]),
        (["data=2", "--steps", "0"], ["--steps: must be a whole number of at least 1"]),
    ],
)
def test_refused(arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", str(TINY), *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out
    for word in words:
        assert word in err


def test_plans_are_timed_side_by_side_and_one_that_fails_is_told(tmp_path: Path) -> None:
    plans = ["data=1", "data=2", "data=4", "data=1"]
    line = [*BENCH, *plans, "--warmup", "1", "--steps", "2", "--blocks", "3", "--json", "bench.json"]
    code, out, err = finish(start(line, tmp_path, TROUBLE="raise", TROUBLED_RANK="3"))
    assert code == 1, err
    assert "data=4 failed: rank 3" in err
    assert "tiny.py" in err  # the traceback
    found = json.loads((tmp_path / "bench.json").read_text())
    assert (found["warmup"], found["steps"], found["blocks"]) == (1, 2, 3)
    assert found["environment"]["device"] == "cpu, backend gloo"
    one, two, failed, again = found["plans"]
    assert [plan["label"] for plan in found["plans"]] == [*plans[:3], "data=1 (again)"]
    assert failed["failure"] == "rank 3: ValueError: the third step is one too many"
    assert "step_seconds" not in failed
    assert f"data=4: failed: {failed['failure']}" in out
    assert (one["ranks"], two["ranks"], two["threads"]) == (1, 2, 1)
    for plan in (one, two, again):
        times = plan["block_step_seconds"]
        assert len(times) == 3
        assert plan["step_seconds"] == vars(Spread.of(times))
        ratios = [mine / first for mine, first in zip(times, one["block_step_seconds"], strict=True)]
        assert plan["over_first"] == vars(Spread.of(ratios))
        assert plan["tokens_per_step"] == 4  # the loss counts samples
        assert plan["tokens_per_second"] == pytest.approx(4 / plan["step_seconds"]["median"])
        assert plan["mfu"] is None  # nobody knows the peak of a CPU
        assert plan["peak_memory_bytes"] > 1e7
        cells = next(line for line in out.splitlines() if line.startswith(f"{plan['label']}  ")).split()
        assert f"{4 / plan['step_seconds']['median']:,.0f}" in cells
    assert one["sent_bytes_per_step"] == {}
    # ten gradients in float32; what else there is are the numbers of the step
    gradients = sent("all_reduce", 2, 10 * 4)
    assert gradients < two["sent_bytes_per_step"]["data"] <= gradients + 100


def test_what_a_table_says_of_several_ranks() -> None:
    def block(*ranks: tuple[float, dict[str, float], int]) -> list[Block]:
        return [
            Block(seconds, 100.0, 0.5, {axis: {"calls": 1, "bytes": size} for axis, size in of.items()}, memory)
            for seconds, of, memory in ranks
        ]

    first = Measured("a", "", 1, 1, [block((1.0, {}, 5)), block((2.0, {}, 6)), block((4.0, {}, 7))])
    second = Measured("b", "", 2, 1)
    second.blocks = [
        block((2.0, {"data": 8.0}, 3), (1.0, {"data": 2.0, "tensor": 4.0}, 9)),
        block((3.0, {"data": 8.0}, 3), (6.0, {"data": 2.0}, 9)),
        block((4.0, {"data": 5.0}, 3), (1.0, {"data": 2.0}, 9)),
    ]
    assert (second.seconds, second.peak_memory, second.mfu) == ([2.0, 6.0, 4.0], 9, 0.125)
    assert second.sent == {"data": 7.0, "tensor": pytest.approx(4 / 3)}
    assert over_first([first, second]) == [Spread(1.0, 1.0, 1.0), Spread(2.0, 1.5, 2.5)]
    assert over_first([Measured("c", "", 1, 1, failure="why"), first]) == [None, None]


def test_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    process = start([*BENCH, "data=1", "data=2", "--blocks", "1000"], tmp_path, STEP_SECONDS="0.05")
    wait_for(lambda: len(children(process.pid)) == 3, process.pid)
    ranks = children(process.pid)
    os.kill(process.pid, signal.SIGINT)
    code, _, err = finish(process)
    assert code == 130, err
    assert "stopped by Ctrl-C" in err
    for rank in ranks:
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


class Stopped:
    """A plan of which the second is stopped in its third block."""

    def __init__(self, label: str, *_: object) -> None:
        self.measured = Measured(label, "", 1, 1)

    def start(self, *_: object) -> None:
        pass

    def block(self, steps: int) -> float:
        if len(self.measured.blocks) == 2 and self.measured.label == "data=2":
            raise KeyboardInterrupt
        self.measured.blocks.append([Block(1.0, 100.0, None, {}, 5)])
        return 1.0


def test_ctrl_c_tells_the_blocks_that_all_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(timed_plan, "TimedPlan", Stopped)
    monkeypatch.setattr(timed_plan, "one_thread", bool)
    written = tmp_path / "bench.json"
    assert main(["bench", str(TINY), "data=1", "data=2", "--json", str(written)]) == 130
    found = json.loads(written.read_text())
    assert (found["blocks"], [len(plan["block_step_seconds"]) for plan in found["plans"]]) == (2, [2, 2])
    out, err = capsys.readouterr()
    assert ("over 2 blocks" in out, err) == (True, "stopped by Ctrl-C after 2 blocks of each plan\n")
