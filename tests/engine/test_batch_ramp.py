"""A global batch that grows: its sizes, its samples, the run of plain torch under any plan, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from helpers.training import SIZES, assert_close_states, config_of, is_key_bias, relative
from helpers.twins import PlainGPT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import colossus
from colossus.config import ConfigError, load_config
from colossus.config.batch_sizes import BatchRamp, BatchSizes
from colossus.data.sampler import BatchShard, SampleOrder
from colossus.schedule.actions import placement
from colossus.schedule.build import make_schedule
from colossus.state.model_state_dict import full_state_dict

SAMPLES, STEPS, SAVED = 29, 8, 4
RAMP = dict(start=4, steps=5)
#: of 12 samples: two increments in five steps
GROWING = [4, 4, 4, 8, 8, 12, 12, 12]


class Sentences(Dataset[dict[str, Tensor]]):
    """Every one has another number of valid tokens."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        ids = torch.randint(
            0, SIZES["vocab_size"], (SIZES["seq_len"] + 1,), generator=torch.Generator().manual_seed(index)
        )
        labels = ids[1:].clone()
        labels[: index % SIZES["seq_len"]] = -100
        return {"inputs": ids[:-1], "labels": labels}


def config(parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    train = dict(global_batch_size=12, batch_ramp=RAMP)
    schedule, rate = dict(microbatches=3), dict(type="wsd", warmup_steps=2, decay=0.5)
    return config_of(parallel, STEPS, "fp64", train=train, schedule=schedule, lr_schedule=rate, data=Sentences()) | more


def endless_order() -> list[int]:
    """The samples that all epochs are made of, one after the other."""
    order = SampleOrder(BatchShard(3, 1, 0, 1, True), SAMPLES)
    return [int(order.indices(place, (0, 1))[0]) for place in range(sum(GROWING))]


# -- sizes and samples ------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 30), st.integers(1, 40))
def test_sizes_add_up(start: int, increment: int, number: int, steps: int) -> None:
    sizes = BatchSizes(start + increment * number, BatchRamp(start=start, steps=steps, increment=increment))
    batch_sizes = [sizes.at(step) for step in range(steps + 3)]
    assert batch_sizes == [start + increment * min(number, step * number // steps) for step in range(steps + 3)]
    assert [sizes.before(step) for step in range(steps + 3)] == [sum(batch_sizes[:step]) for step in range(steps + 3)]
    assert sizes.full_from == batch_sizes.index(sizes.full)
    assert sizes.all == sorted({*batch_sizes})


@pytest.mark.parametrize("data", [1, 2, 4])
def test_no_sample_is_left_out_or_comes_twice(data: int) -> None:
    order = endless_order()
    ranks = [SampleOrder(BatchShard(3, 12, rank, data, True, BatchRamp(**RAMP)), SAMPLES) for rank in range(data)]
    numbers: list[int] = []
    for step, size in enumerate(GROWING):
        spans = [rank.span(step) for rank in ranks]
        assert [stop - start for start, stop in spans] == [size // data] * data
        numbers += [
            number for rank, span in zip(ranks, spans, strict=True) for number in rank.indices(step, span).tolist()
        ]
    assert numbers == order
    again = SampleOrder(ranks[0].shard, SAMPLES)  # of a run that goes on there
    assert again.indices(6, again.span(6)).tolist() == order[sum(GROWING[:6]) :][: 12 // data]


# -- runs -------------------------------------------------------------------------------------------------------------


class RecordedRun:
    """Of a run: losses and tokens by step, and the weights at its two ends."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.tokens: list[int] = []
        self.start: dict[str, Tensor] = {}
        self.end: dict[str, Tensor] = {}

    def train(self, engine: Any, steps: int) -> None:
        self.start = self.start or full_state_dict(engine.model, engine.context)
        for batch in engine.loader:
            result = engine.train_step(batch)
            self.losses.append(result.loss)
            self.tokens.append(result.tokens)
            if result.step == steps:
                break
        self.end = full_state_dict(engine.model, engine.context)


PLANS: dict[str, dict[str, Any]] = {
    "data": dict(parallel=dict(data=2)),
    "pipeline": dict(parallel=dict(pipeline=2)),
    "zero": dict(parallel=dict(data=2, zero=1)),
    "dropout, data": dict(parallel=dict(data=2), model=dict(type="GPT", dropout=0.2, **SIZES)),
    "dropout, pipeline": dict(parallel=dict(pipeline=2), model=dict(type="GPT", dropout=0.2, **SIZES)),
    "local_sgd": dict(parallel=dict(data=2, strategy=dict(type="local_sgd", period=2))),
}
#: saved in the middle of the ramp, and gone on under another plan
RESUMED = ("data", "pipeline")


def runs_of(rank: int, folder: str) -> dict[str, RecordedRun]:
    runs = {name: RecordedRun() for name in (*PLANS, "resumed")}
    for name, plan in PLANS.items():
        engine = colossus.initialize(config(**plan))
        runs[name].train(engine, STEPS)
        engine.close()
    for plan in RESUMED:
        checkpoint = dict(dir=folder, resume="auto")
        engine = colossus.initialize(config(PLANS[plan]["parallel"], checkpoint=checkpoint))
        engine.checkpoints.resume()
        assert engine.loader.step == engine.completed_steps == len(runs["resumed"].losses)
        runs["resumed"].train(engine, SAVED if plan == RESUMED[0] else STEPS)
        engine.checkpoints.save(background=False).wait()
        engine.close()
    return runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, RecordedRun]:
    return run_ranks(2, runs_of, str(tmp_path_factory.mktemp("saved")), with_context=False)[0]


@pytest.mark.parametrize("name", ["data", "pipeline", "zero", "resumed"])
def test_a_growing_batch_is_the_run_of_plain_torch(name: str, runs: dict[str, RecordedRun]) -> None:
    run, samples, place = runs[name], Sentences(), 0
    twin = PlainGPT(**SIZES).double()
    twin.load_state_dict(run.start)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=0.0, weight_decay=0.1)
    order = endless_order()
    rates = [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25]
    for step, size in enumerate(GROWING):
        batch = [samples[at] for at in order[place : place + size]]
        place += size
        inputs, labels = (torch.stack([sample[key] for sample in batch]) for key in ("inputs", "labels"))
        loss_sum, count = twin.loss_sum(inputs, labels)
        optimizer.zero_grad()
        (loss_sum / count).backward()
        torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-3 * rates[step]
        optimizer.step()
        assert run.tokens[step] == int(count)
        assert relative(run.losses[step], (loss_sum / count).item()) < 1e-10, f"step {step + 1}"
    end, wanted = (
        {key: value for key, value in state.items() if not is_key_bias(key)} for state in (run.end, twin.state_dict())
    )
    assert_close_states(end, wanted, "weight", atol=1e-10)


def test_dropout_follows_the_samples(runs: dict[str, RecordedRun]) -> None:
    mine, other = runs["dropout, data"], runs["dropout, pipeline"]
    assert mine.losses == pytest.approx(other.losses, rel=1e-10)
    assert relative(mine.losses[0], runs["data"].losses[0]) > 1e-4


def test_replicas_that_step_by_themselves_have_their_part_of_the_batch(runs: dict[str, RecordedRun]) -> None:
    order, samples, place = endless_order(), Sentences(), 0
    for step, size in enumerate(GROWING):
        own = order[place : place + (size if step % 2 else size // 2)]  # every other step is of all replicas
        assert runs["local_sgd"].tokens[step] == sum(int((samples[at]["labels"] >= 0).sum()) for at in own)
        place += size


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("train", "more", "words"),
    [
        (dict(start=12, steps=5), {}, "train: batch_ramp.start = 12 is not below global_batch_size = 12"),
        (dict(start=4, steps=5, increment=3), {}, "12 - start 4 = 8; nearest: 2 or 4"),
        (dict(start=5, steps=5), {}, "batch_ramp.increment = 5 does not divide global_batch_size 12 - start 5 = 7"),
        (dict(steps=5), {}, "train.batch_ramp.start: is missing"),
        (
            dict(start=4, steps=5, increment=2),
            {},
            "train.batch_ramp.increment = 2 is not a multiple of data 2 x 2 samples of a microbatch = 4; nearest: 4\n"
            "  or keep the ramp and take smaller microbatches: schedule.microbatches=6",
        ),
        (
            dict(start=6, steps=5),
            dict(schedule=dict(microbatches=1)),
            "train.batch_ramp.start = 6 is not a multiple of data 2 x 6 samples of a microbatch = 12; nearest: 12",
        ),
    ],
)
def test_a_ramp_that_does_not_fit_is_told(train: dict[str, Any], more: dict[str, Any], words: str) -> None:
    values = config(dict(data=2), **more)
    values["train"]["batch_ramp"] = train
    with pytest.raises(ConfigError) as caught:
        load_config(values)
    assert words in str(caught.value)


def test_batches_of_ones_own_do_not_grow() -> None:
    with pytest.raises(ValueError, match=r"train\.batch_ramp is for a dataset .* but DataLoader yields batches"):
        colossus.initialize(config(dict(data=1), data=DataLoader(Sentences(), batch_size=12)))
    engine = colossus.initialize(config(dict(data=1)))
    try:
        with pytest.raises(ValueError, match=r"step 1 takes 4 samples = data 1 x 4, but this data rank's batch has 12"):
            engine.train_step(next(iter(DataLoader(Sentences(), batch_size=12))))
    finally:
        engine.close()


@pytest.mark.parametrize("kind", ["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_schedules_complete_stages_in_one_order_for_any_number_of_microbatches(kind: str) -> None:
    for stages in (1, 2, 3):
        orders = set()
        for microbatches in range(1, 9):
            actions = make_schedule(kind, stages, microbatches)
            reduced = tuple(tuple(action.stage for action in own if action.kind == "reduce") for own in actions)
            orders.add((reduced, tuple(placement(actions).items())))
        assert len(orders) == 1


def test_a_run_whose_ramp_has_changed_goes_on_behind_its_samples() -> None:
    engine = colossus.initialize(config(dict(data=1)))
    engine.loader.set_step(4)
    state = engine.loader.state_dict()
    engine.close()
    values = config(dict(data=1))
    values["train"]["batch_ramp"] = dict(start=4, steps=8)
    other = colossus.initialize(values)
    other.loader.load_state_dict(state)
    assert other.loader.state_dict() == {**state, "samples": 20}
    other.close()
