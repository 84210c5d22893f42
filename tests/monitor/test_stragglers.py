"""``train.stragglers``: a rank that computes slowly is named, one that only waits is not."""

from __future__ import annotations

import json
import logging
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import SIZES, config_of

import colossus
from colossus.comm import step_regions
from colossus.config import ConfigError, load_config
from colossus.config.training import Profile, StragglerSection
from colossus.engine.fit import Hook, fit
from colossus.layers.block import TransformerBlock
from colossus.monitor.metrics import Metrics
from colossus.monitor.profiler import Profiler
from colossus.monitor.stragglers import Stragglers, compare, computing
from colossus.monitor.timed_regions import HostClock

STEPS, ROWS = 6, 3
#: seconds for which each rank sleeps in a block, and the slow one. Both are far longer than what a rank of this size
#: waits for a core on a busy machine: that is computing slowly, too, and would be named.
SLEEP, SLOW_SLEEP = 0.1, 0.5


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __init__(self, split: str = "train") -> None:
        self.ids = torch.randint(0, SIZES["vocab_size"], (16, SIZES["seq_len"]))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.ids[index], "labels": self.ids[index]}


def train(rank: int, folder: Path, plan: dict[str, Any], slow: int) -> list[str]:
    """What the logging rank says in the log."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("colossus.monitor").addHandler(handler)
    engine = colossus.initialize(config_of(plan, STEPS, "fp32", train=dict(log_every=1)), data=dict(type=Samples))
    seconds = SLOW_SLEEP if engine.context.rank == slow else SLEEP
    for module in engine.model.modules():
        if isinstance(module, TransformerBlock):
            module.register_forward_hook(lambda *_: time.sleep(seconds))
    fit(engine, [Metrics(folder / "metrics.jsonl"), Stragglers(StragglerSection(factor=3.0, rows=ROWS))])
    engine.close()
    return messages


@pytest.mark.parametrize(("plan", "slow"), [(dict(data=2, pipeline=2), 3), (dict(data=2, tensor=2), 2)])
@pytest.mark.rest("plan1-2")
def test_the_rank_that_computes_slowly_is_named_with_its_host(tmp_path: Path, plan: dict[str, Any], slow: int) -> None:
    messages = run_ranks(4, train, tmp_path, plan, slow, with_context=False)
    assert messages[1:] == [[], [], []]
    (line,) = messages[0]
    assert line.startswith(f"rank {slow} (")
    assert f"host {socket.gethostname()})" in line
    assert "times as long as the" in line
    rows = [json.loads(text) for text in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("slowest_rank") for row in rows[-2:]] == [slow, slow]
    assert rows[-1]["slowest_ratio"] > 3.0


def train_profiled(rank: int, folder: Path) -> set[str]:
    """The parts of a profile of steps that `Stragglers` would time, too."""
    section = Profile(steps=(3, 4), ranks=())
    more = dict(train=dict(log_every=1, profile=dict(steps=section.steps)))
    engine = colossus.initialize(config_of(dict(data=2), STEPS, "fp32", **more), data=dict(type=Samples))
    engine.run.folder = folder
    stragglers = Stragglers(StragglerSection(rows=ROWS))
    fit(engine, [Metrics(folder / "metrics.jsonl"), stragglers, Profiler(section)])
    assert step_regions._current is None
    engine.close()
    return set(json.loads((folder / "profile" / "summary.json").read_text())["parts"])


def test_a_profile_is_not_disturbed(tmp_path: Path) -> None:
    for parts in run_ranks(2, train_profiled, tmp_path, with_context=False):
        assert {"forward", "backward", "over data", "optimizer"} <= parts


def train_failing(rank: int) -> None:
    """A device may be stuck then: nobody asks for its time, and nothing stays wrapped."""
    engine = colossus.initialize(
        config_of(dict(data=2), STEPS, "fp32", train=dict(log_every=2)), data=dict(type=Samples)
    )
    hooks = [Hook(), Stragglers(StragglerSection(rows=ROWS))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostClock, "settle", lambda clock: pytest.fail("the device is waited for"))
        patch.setattr(hooks[0], "on_step_end", lambda *_: 1 / 0 if engine.completed_steps == 2 else None)
        with pytest.raises(ZeroDivisionError) as error:
            fit(engine, hooks)
    assert not hasattr(error.value, "__notes__")
    assert step_regions._current is None


def test_after_an_error_no_device_is_waited_for() -> None:
    run_ranks(2, train_failing, with_context=False)


def test_waits_are_no_computing() -> None:
    parts = {
        "forward": 1.0,
        "backward": 2.0,
        "over data": 7.0,
        "over 2xtensor": 5.0,
        "pipeline idle": 4.0,
        "gathers": 3.0,
    }
    assert computing({**parts, "rest": 0.5, "optimizer": 0.25}) == 3.75


def test_a_rank_is_compared_with_the_others_of_its_stage() -> None:
    stages = {0: 0, 1: 0, 2: 1, 3: 1, 4: 2}
    seconds = {0: [1.0, 9.0, 1.0], 1: [1.0], 2: [4.0, 4.0], 3: [8.0, 2.0, 8.0], 4: [50.0]}
    ratios = {slow.rank: slow.ratio for slow in compare(seconds, stages)}
    assert ratios == {0: 1.0, 1: 1.0, 2: 0.5, 3: 2.0}


def test_the_key_is_a_number_or_a_section() -> None:
    assert load_config({}, ["train.stragglers=2"]).train.stragglers == StragglerSection(factor=2.0)
    with pytest.raises(ConfigError, match="greater than 1"):
        load_config({}, ["train.stragglers=1.0"])
