"""Stages of equal predicted time: what the estimate counts of them, beside every other split."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from colossus.config import Config, ConfigError, load_config, state_config
from colossus.hardware.data_sheets import FromDataSheet
from colossus.launch.auto_plan import resolve_planned
from colossus.planner.estimate import Estimator
from colossus.planner.score import block_seconds

#: an embedding that is large, and takes no time
GPT = dict(type="GPT", num_layers=5, hidden_size=64, num_heads=4, seq_len=64, vocab_size=2000, tie_embeddings=False)


def config_of(split: Any, **model: Any) -> Config:
    return load_config(
        dict(
            model={**GPT, **model},
            data=dict(type="PythonStdlib"),
            parallel=dict(pipeline=dict(size=3, split=split)),
            schedule=dict(microbatches=4),
            train=dict(global_batch_size=32),
        )
    )


def test_the_slowest_stage_is_the_least_slow_of_all_splits() -> None:
    estimator, config = Estimator(FromDataSheet("a100")), config_of("time")
    stated, overrides = estimator.with_stated_split(config, ("parallel.pipeline=3",))
    counts = stated.parallel.pipeline.split
    assert overrides[-1] == f"parallel.pipeline.split={list(counts)}".replace(" ", "")
    times = block_seconds(estimator.profile(config), estimator.player(config))

    def slowest(split: tuple[int, ...]) -> float:
        bounds = [0, *itertools.accumulate(split)]
        return max(sum(times[start:stop]) for start, stop in itertools.pairwise(bounds))

    every = [split for split in itertools.product(range(1, 6), repeat=3) if sum(split) == len(times)]
    assert slowest(counts) == pytest.approx(min(map(slowest, every)))

    estimate, by_parameters = estimator.estimate(config), estimator.estimate(config_of("parameters"))
    assert estimate.config.parallel.pipeline.split == counts
    assert estimate.overrides == overrides[1:]
    assert estimate.seconds < by_parameters.seconds
    assert estimate.seconds == estimator.estimate(config_of(counts)).seconds


def test_one_stage_and_stated_stages_stay_as_they_are() -> None:
    estimator = Estimator(FromDataSheet("a100"))
    for overrides in (["parallel.pipeline.split=[2,2,3]"], ["parallel.pipeline.size=1"]):
        config = load_config(dict(model=GPT, parallel=dict(pipeline=dict(size=3, split="time"))), overrides)
        assert estimator.with_stated_split(config, overrides) == (config, overrides)


def test_more_stages_than_blocks_are_refused() -> None:
    config = config_of("time", num_layers=1)
    interleaved = config.model_copy(update={"schedule": type(config.schedule)(type="zb-v", microbatches=4)})
    with pytest.raises(ConfigError, match="6 stages"):
        Estimator(FromDataSheet("a100")).with_stated_split(interleaved)


def test_a_launch_gets_numbers_of_blocks(tmp_path: Any) -> None:
    path = tmp_path / "gpt.py"
    path.write_text(
        f"model = {GPT}\ndata = 'PythonStdlib'\ndevice = 'cpu'\n"
        "parallel = dict(pipeline=dict(size=3, split='time'))\nschedule = dict(microbatches=4)\n"
    )
    planned = resolve_planned(state_config(str(path)), 3)
    counts = planned.config.parallel.pipeline.split
    assert isinstance(counts, tuple)
    assert (len(counts), sum(counts)) == (3, 7)
    stated = [f"parallel.pipeline.split={counts}"]
    assert load_config(path, stated, 3) == planned.config
