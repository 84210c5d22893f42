"""``train.profile`` and ``colossus profile``: what is in a trace and in the table, and that nothing is left behind."""

from __future__ import annotations

import gzip
import json
import re
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.fake_cuda import Waits, run_fake_ranks
from helpers.launching import TINY, finish, start
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import SIZES, config_of

import colossus
from colossus.cli.main import main
from colossus.comm import step_regions
from colossus.config.training import Profile
from colossus.engine.fit import Hook, fit
from colossus.layers.block import TransformerBlock
from colossus.monitor.profiler import Profiler, mean_parts, table
from colossus.monitor.timed_regions import GATHERS, TimedRegions

STEPS, PROFILED = 5, (3, 4)
NUM_PROFILED = 2
MICROBATCHES = 2
#: seconds for which a slow stage sleeps in each forward
SLEEP = 0.1


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, split: str = "train") -> None:
        size = (16, SIZES["seq_len"])
        self.ids = torch.randint(0, SIZES["vocab_size"], size, generator=torch.Generator().manual_seed(len(split)))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.ids[index], "labels": self.ids[index]}


class Watch(Hook):
    """What the calls are in each step, and how long that takes without and with what is around it."""

    def __init__(self) -> None:
        self.profiled: dict[int, set[bool]] = {}
        self.seconds: dict[int, list[float]] = {}

    def on_train_start(self, engine: Any) -> None:
        train_step = engine.train_step

        def timed(batch: Any) -> Any:
            began = time.perf_counter()
            result = train_step(batch)
            self.seconds[result.step] = [time.perf_counter() - began]
            self.profiled[result.step] = step_regions._current is not None
            return result

        engine.train_step = timed

    def on_step_start(self, engine: Any) -> None:
        self.began = time.perf_counter()


class After(Hook):
    """The last of the hooks."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def on_step_end(self, engine: Any, result: Any) -> None:
        self.watch.seconds[result.step].append(time.perf_counter() - self.watch.began)


def profile(
    rank: int,
    folder: Path,
    plan: dict[str, Any],
    slow_stage: int | None = None,
    same_without: bool = False,
    **more: Any,
) -> tuple[dict[int, set[bool]], dict[int, list[float]]]:
    """Body of a rank: a short run with a profile of `PROFILED` steps."""
    section = Profile(steps=PROFILED, ranks=more.pop("ranks", (0,)))
    settings = config_of(plan, STEPS, "fp32", schedule=dict(microbatches=MICROBATCHES), **more)
    engine = colossus.initialize(settings, data=dict(type=Samples))
    engine.run.folder = folder
    if engine.context.index("pipeline") == slow_stage:
        blocks = [module for module in engine.model.modules() if isinstance(module, TransformerBlock)]
        blocks[-1].register_forward_hook(lambda *_: time.sleep(SLEEP))
    watch = Watch()
    loss = fit(engine, [watch, Profiler(section), After(watch)]).loss
    assert step_regions._current is None
    engine.close()
    if same_without:
        engine = colossus.initialize(settings, data=dict(type=Samples))
        assert fit(engine).loss == loss
        engine.close()
    return watch.profiled, watch.seconds


def summary_of(folder: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((folder / "profile" / "summary.json").read_text())
    return summary


def regions_of(folder: Path, rank: int) -> Counter[str]:
    """Name of a region -> how often it is in a trace."""
    with gzip.open(folder / "profile" / f"rank{rank}.trace.json.gz") as file:
        events = json.load(file)["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def per_step(regions: Counter[str], name: str) -> float:
    return regions[name] / NUM_PROFILED


def test_a_pipeline_with_a_slow_stage(tmp_path: Path) -> None:
    plan = dict(pipeline=2, data=2)
    body = partial(profile, folder=tmp_path, plan=plan, slow_stage=1, ranks=(0, 3))
    by_rank = run_ranks(4, body, with_context=False)
    summary = summary_of(tmp_path)
    assert summary["steps"] == list(PROFILED)
    assert adds_up(summary)
    assert [(one["rank"], one["stage"]) for one in summary["ranks"]] == [(0, 0), (1, 0), (2, 1), (3, 1)]
    for one, (profiled, seconds) in zip(summary["ranks"], by_rank, strict=True):
        assert set(one["seconds"]) <= set(summary["parts"])
        inside, around = (sum(seconds[step][at] for step in PROFILED) / NUM_PROFILED for at in (0, 1))
        assert inside < one["step_seconds"] < around
        assert profiled == {step: step in PROFILED for step in range(1, STEPS + 1)}
    first, second, third, fourth = (one["seconds"] for one in summary["ranks"])
    for early, late in ((first, third), (second, fourth)):
        assert early["pipeline idle"] > SLEEP / 2  # it waits for the slow stage
        assert late["forward"] > early["forward"]
        assert late["forward"] > MICROBATCHES * SLEEP
        assert early["over data"] > 0
        assert early["optimizer"] > 0

    assert sorted(path.name for path in (tmp_path / "profile").glob("*.gz")) == [
        "rank0.trace.json.gz",
        "rank3.trace.json.gz",
    ]
    for rank, stage, other in ((0, 0, 1), (3, 1, 0)):
        regions = regions_of(tmp_path, rank)
        for microbatch in range(MICROBATCHES):
            for kind in ("forward", "backward"):
                assert per_step(regions, f"{kind} stage {stage} microbatch {microbatch}") == 1
                assert per_step(regions, f"{kind} stage {other} microbatch {microbatch}") == 0
            of_each = {0: "gradient", 1: "activation"}
            awaited = f"{of_each[stage]} of microbatch {microbatch} from stage {other} to stage {stage}"
            assert per_step(regions, f"wait for the {awaited}") == 1
            sent = f"{of_each[other]} of microbatch {microbatch} from stage {stage} to stage {other}"
            assert (
                per_step(regions, f"send of the {sent}: start") == per_step(regions, f"send of the {sent}: wait") == 1
            )
        for name in ("data wait", "optimizer step", "gradient norm", "optimizer update", "all_reduce over data: wait"):
            assert per_step(regions, name) == 1, name
        assert [regions[f"step {step}"] for step in range(1, STEPS + 1)] == [0, 0, 1, 1, 0]


def adds_up(summary: dict[str, Any]) -> bool:
    return all(sum(one["seconds"].values()) == pytest.approx(one["step_seconds"], rel=1e-9) for one in summary["ranks"])


@pytest.mark.long
def test_gathers(tmp_path: Path) -> None:
    for name, world, plan, ranks in (
        ("zero", 2, dict(data=2, zero=3), (0,)),
        ("2d", 4, dict(tensor=dict(size=4, mode="2d")), ()),
    ):
        run_ranks(world, partial(profile, folder=tmp_path / name, plan=plan, ranks=ranks), with_context=False)
        assert adds_up(summary_of(tmp_path / name))
        assert min(one["seconds"][GATHERS] for one in summary_of(tmp_path / name)["ranks"]) > 0
        assert len(list((tmp_path / name / "profile").glob("*.gz"))) == len(ranks)
    regions = regions_of(tmp_path / "zero", 0)
    # each block in forward and in backward of each microbatch, what belongs to no block once
    assert per_step(regions, "gather of weights: wait") == 1 + 2 * SIZES["num_layers"] * MICROBATCHES
    assert regions["gather of weights: start"] >= regions["gather of weights: wait"]
    assert regions["reduce_scatter over data: start"] == regions["reduce_scatter over data: wait"] > 0


@pytest.mark.parametrize("recomputed", ["none", *long("selective")])
def test_collectives_of_tensor_ranks_and_the_same_numbers(recomputed: str, tmp_path: Path) -> None:
    train = dict(activation_checkpoint=recomputed)
    body = partial(profile, folder=tmp_path, plan=dict(tensor=2), ranks="all", train=train, same_without=True)
    run_ranks(2, body, with_context=False)
    regions, summary = regions_of(tmp_path, 1), summary_of(tmp_path)
    # in forward and in backward of each block two sums over the tensor ranks
    assert per_step(regions, "all_reduce over tensor: wait") >= 4 * SIZES["num_layers"] * MICROBATCHES
    assert regions["all_reduce over tensor: start"] == regions["all_reduce over tensor: wait"]
    assert summary["parts"] == ["forward", "backward", "over tensor", "optimizer", "data wait", "rest"]
    assert adds_up(summary)


def test_split_backwards_evaluations_and_stops(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """zb-h1 has weight gradients of its own; a run that is stopped has the table of what was profiled."""

    def body(rank: int) -> None:
        train = dict(eval_every=2, eval_batches=1)
        settings = config_of(dict(pipeline=2), 9, "fp32", schedule=dict(type="zb-h1", microbatches=2), train=train)
        engine = colossus.initialize(settings, data=dict(type=Samples, validation=Samples("validation")))
        engine.run.folder = tmp_path

        class Stop(Hook):
            def on_step_start(self, engine: Any) -> None:
                if engine.completed_steps == 2:
                    engine.request_stop()

        fit(engine, [Stop(), Profiler(Profile(steps=(2, 8)))])
        engine.close()

    run_ranks(2, body, with_context=False)
    regions = regions_of(tmp_path, 0)
    assert summary_of(tmp_path)["steps"] == [2, 3]
    for microbatch in range(2):
        assert per_step(regions, f"wgrad stage 0 microbatch {microbatch}") == 1
        assert per_step(regions, f"backward of inputs stage 0 microbatch {microbatch}") == 1
    assert regions["evaluation"] == 1
    assert regions["forward stage 0 microbatch 0"] > NUM_PROFILED  # that of the evaluation, which is no part of a step
    assert summary_of(tmp_path)["ranks"][0]["seconds"]["wgrad"] > 0


def test_a_resumed_run_counts_from_its_beginning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config_of(dict(data=1), 6, "fp32")
    for completed, lines, steps in ((4, 1, None), (3, 0, [4, 4])):
        engine = colossus.initialize(settings, data=dict(type=Samples))
        engine.run.folder, engine.run.completed_steps = tmp_path, completed
        fit(engine, [Profiler(Profile(steps=PROFILED, ranks=()))])
        engine.close()
        printed = capsys.readouterr().out
        assert printed.count("no profile: steps 3 to 4 were over before step 4\n") == lines
        assert (summary_of(tmp_path)["steps"] if steps else None) == steps
        assert (tmp_path / "profile").exists() == bool(steps)


def test_no_profile_is_left_after_a_failure(tmp_path: Path) -> None:
    class Fail(Hook):
        def on_step_start(self, engine: Any) -> None:
            if engine.completed_steps == 3:
                assert step_regions._current is not None
                raise ArithmeticError

    engine = colossus.initialize(config_of(dict(data=1), STEPS, "fp32"), data=dict(type=Samples))
    engine.run.folder = tmp_path
    with pytest.raises(ArithmeticError):
        fit(engine, [Profiler(Profile(steps=PROFILED, ranks=())), Fail()])
    engine.close()
    assert step_regions._current is None


# -- regions without a run ------------------------------------------------------------------------------------------


class Clock:
    """One second passes from each look to the next."""

    def __init__(self) -> None:
        self.looks = 0

    def now(self) -> int:
        self.looks += 1
        return self.looks

    def seconds(self, began: int, ended: int) -> float:
        return float(ended - began)

    def settle(self) -> None: ...


def test_each_second_belongs_to_the_innermost_region() -> None:
    seconds = TimedRegions(torch.device("cpu"))
    seconds._clock = Clock()  # type: ignore[assignment]

    def elsewhere() -> None:
        with seconds.region("a thread", "of a thread"):
            pass

    with seconds.region("before", "a part of no step"):
        pass
    with seconds.step(1), seconds.region("forward", "forward"):
        with seconds.region("wait", "over data"), seconds.region("wait", "over data"):
            pass
        with seconds.region("gather", GATHERS), seconds.region("all_gather", "over data"):
            pass
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert seconds.steps == [{"rest": 2.0, "forward": 3.0, "over data": 1.0, GATHERS: 3.0}]
    assert mean_parts([*seconds.steps, {"forward": 1.0}]) == {
        "forward": 2.0,
        "over data": 0.5,
        GATHERS: 1.5,
        "rest": 1.0,
    }


def test_the_table_of_many_ranks_has_a_row_for_each_stage() -> None:
    ranks = [
        {
            "rank": rank,
            "stage": rank // 10,
            "step_seconds": 0.5,
            "seconds": {"forward": 0.1 * (rank // 10), "rest": 0.4},
        }
        for rank in range(20)
    ]
    lines = table({"steps": [1, 2], "parts": ["forward", "rest"], "ranks": ranks}).splitlines()
    assert [line.split() for line in lines[1:]] == [
        ["step", "forward", "rest"],
        ["stage", "0", "500.0", "ms", "0.0", "0%", "400.0", "80%"],
        ["stage", "1", "500.0", "ms", "100.0", "20%", "400.0", "80%"],
        ["mean", "500.0", "ms", "50.0", "10%", "400.0", "80%"],
    ]


def on_device(rank: int, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Of a step: what waits for the device."""
    settings = config_of(dict(data=1), 9, "fp32", device="cuda", model=dict(num_layers=1))
    engine = colossus.initialize(settings, data=dict(type=Samples))
    engine.run.folder = folder
    batch = {key: torch.zeros(8, SIZES["seq_len"], dtype=torch.int64, device="cuda") for key in ("inputs", "labels")}
    profiler = Profiler(Profile(steps=(2, 3), ranks=()))
    for _ in range(3):
        Waits.begin_step()
        with Waits(allowed=True) as waits:
            profiler.on_step_start(engine)
            result = engine.train_step(batch)
        profiler.on_step_end(engine, result)
    engine.close()
    return waits.found, summary_of(folder)


def test_on_cuda_the_device_tells_the_time_and_nobody_waits_in_a_step(tmp_path: Path) -> None:
    ((waits, summary),) = run_fake_ranks(1, on_device, tmp_path)
    assert waits == []
    (of_rank,) = summary["ranks"]  # an interval is a millisecond there
    assert of_rank["seconds"]["forward"] == pytest.approx(1e-3)
    assert sum(of_rank["seconds"].values()) == pytest.approx(of_rank["step_seconds"])


# -- the command ----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    words = [
        "profile",
        str(TINY),
        "--warmup",
        "1",
        "--steps",
        "2",
        "--ranks",
        "1",
        "--out",
        "out",
        "checkpoint.every=1",
    ]
    code, out, err = finish(start([sys.executable, "-m", "colossus", *words], tmp_path))
    assert code == 0, err
    folder = tmp_path / "out"
    assert summary_of(folder)["steps"] == [2, 3]
    assert table(summary_of(folder)) in out
    assert re.findall("^trace: .*", out, re.MULTILINE) == ["trace: out/profile/rank1.trace.json.gz"]
    assert "step 3/3" in out
    assert "validation loss" not in out
    assert not (folder / "checkpoints").exists()
    assert per_step(regions_of(folder, 1), "forward stage 0 microbatch 0") == 1
    code, _, err = finish(start([sys.executable, "-m", "colossus", *words], tmp_path))
    assert (code, "--out out: holds the metrics of another run already" in err) == (2, True)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ranks", "0,2"], "train.profile.ranks: no rank 2: this plan has ranks 0 to 1"),
        (["--ranks", "0;2"], "argument --ranks: must be ranks with commas between them (0,2) or all, got '0;2'"),
        (["--steps", "0"], "argument --steps: must be a whole number of at least 1, got '0'"),
    ],
)
def test_refusals(words: list[str], message: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", str(TINY), *words]) == 2
    assert message in capfd.readouterr().err
