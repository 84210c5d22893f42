"""Token budgets: the cut of a step, one process with plain torch under every plan, exact resumes, refusals in words."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.documents import Documents
from helpers.laws import assert_parity
from helpers.long import but
from helpers.plans import plans
from helpers.ranks import run_ranks
from helpers.training import (
    SIZES,
    Trace,
    assert_close_states,
    assert_is_plain_torch,
    config_of,
    is_key_bias,
    relative,
)
from helpers.twins import PlainGPT
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import colossus
from colossus.config import ConfigError, load_config
from colossus.data import Microbatches, Packed, build_loaders
from colossus.data.sampler import BatchShard, SampleOrder
from colossus.data.token_budget import TokenBudget
from colossus.engine.fit import fit
from colossus.state.model_state_dict import full_state_dict
from colossus.verify.run_verify import _check_config

SAMPLES, BATCH, BUDGET, STEPS = 29, 8, 24, 3


class Sentences:
    """Samples of 1 to 12 tokens, some without a label."""

    def __init__(self, dtype: Any = np.int64) -> None:
        self.lengths = np.array([(7 * number) % SIZES["seq_len"] + 1 for number in range(SAMPLES)], dtype)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(0, SIZES["vocab_size"], (int(self.lengths[index]) + 1,), generator=generator)
        labels = ids[1:].clone()
        labels[: index % 4] = -100
        return {"inputs": ids[:-1], "labels": labels}


def config(parallel: dict[str, Any], budget: int = BUDGET, **more: Any) -> dict[str, Any]:
    # of 29 samples for validation the last batch has one
    train = dict(global_batch_size=BATCH, tokens_per_microbatch=budget, eval_batch_size=28)
    data = dict(type=Sentences, validation=dict(type=Sentences))
    own = config_of(parallel, STEPS, "fp64", train=train, data=data)
    return own | {key: {**own.get(key, {}), **value} for key, value in more.items()}


# -- the cut of a step ------------------------------------------------------------------------------------------------

LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@given(
    lengths=LENGTHS,
    data=st.sampled_from([1, 2, 4]),
    ways=st.sampled_from([1, 2, 3]),
    multiple=st.sampled_from([1, 4]),
    least=st.integers(1, 5),
    room=st.integers(0, 200),
)
def test_each_sample_is_in_one_microbatch_that_fits(
    lengths: list[int], data: int, ways: int, multiple: int, least: int, room: int
) -> None:
    own = np.array(lengths)
    budget = TokenBudget(40 * ways + room, ways, multiple, least)
    ranks = budget.cut(own, data)
    assert sorted(place for rank in ranks for places in rank for place in places.tolist()) == [*range(len(own))]
    (number,) = {len(rank) for rank in ranks}
    assert number >= least
    for places in (places for rank in ranks for places in rank):
        rows, tokens = budget.shape(own[places])
        assert rows * tokens <= budget.tokens
        assert (rows % ways, tokens % multiple) == (0, 0)
        assert tokens >= max(own[places].tolist(), default=1)
        assert rows - len(places) < ways or not len(places)
    # no microbatch more than a step needs: the longest samples that are left, as many as fit
    remaining, needed = sorted(lengths, reverse=True), 0
    while remaining:
        longest = -(-remaining[0] // multiple) * multiple
        remaining, needed = (
            remaining[max(n for n in range(ways, 999, ways) if n * longest <= budget.tokens) :],
            needed + 1,
        )
    assert number == max(least, -(-needed // data))


def test_samples_of_near_lengths_share_a_microbatch_and_ranks_have_near_ones() -> None:
    lengths = np.random.default_rng(0).integers(1, 512, 256)
    ranks = TokenBudget(4096).cut(lengths, 4)
    padded = sum(TokenBudget(4096).shape(lengths[places])[1] * len(places) for rank in ranks for places in rank)
    assert padded < 1.08 * lengths.sum()
    costs = [sum(TokenBudget(4096).shape(lengths[places])[1] * len(places) for places in rank) for rank in ranks]
    assert max(costs) < 1.1 * min(costs)


def loader_of(rank: int, data: int, budget: TokenBudget, source: Any = None) -> Any:
    source = source or Sentences()
    loaders = build_loaders(source, seed=3, global_batch_size=BATCH, data_rank=rank, data_size=data, budget=budget)
    return loaders.train


def rows_of(batch: Microbatches) -> dict[int, list[int]]:
    """Place in the global batch -> ids of the sample, without its padding; padding has no labels."""
    rows: dict[int, list[int]] = {}
    for part, numbers in zip(*batch, strict=True):
        for row, number in enumerate(numbers.tolist()):
            ids, labels = part["inputs"][row], part["labels"][row]
            if number < 0:
                assert {*labels.tolist(), *ids.tolist()} == {-100, 0}
            rows[number] = ids.tolist()
    rows.pop(-1, None)
    return rows


@given(
    step=st.integers(0, 200),
    data=st.sampled_from([1, 2, 4]),
    now=st.sampled_from([1, 2, 4]),
    tokens=st.integers(24, 100),
    ways=st.sampled_from([1, 2]),
)
def test_any_ranks_read_the_samples_of_the_step_and_go_on_at_any_step(
    step: int, data: int, now: int, tokens: int, ways: int
) -> None:
    dataset, budget = Sentences(), TokenBudget(tokens, ways, 2)
    order = SampleOrder(BatchShard(3, BATCH, 0, 1, True), SAMPLES)
    state = None
    for rank in range(data):
        loader = loader_of(rank, data, budget)
        loader.set_step(step)
        next(loader)
        state = loader.state_dict()
    rows: dict[int, list[int]] = {}
    for rank in range(now):  # other ranks and another budget
        loader = loader_of(rank, now, TokenBudget(tokens + 7))
        loader.load_state_dict(state)
        rows |= rows_of(next(loader))
    for place, index in enumerate(order.indices(step + 1, (0, BATCH)).tolist()):
        ids = dataset[index]["inputs"].tolist()
        assert rows[place][: len(ids)] == ids
        assert not any(rows[place][len(ids) :])
    assert rows.keys() == {*range(BATCH)}


def test_workers_read_the_same() -> None:
    budget = TokenBudget(30, 2)
    own, workers = (
        [*islice(loader_of(1, 2, budget, dict(type=Sentences, num_workers=number)), 5)] for number in (0, 2)
    )
    for one, other in zip(own, workers, strict=True):
        assert len(one.batches) == len(other.batches)
        for mine, theirs in zip(one.batches + one.samples, other.batches + other.samples, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


class Featured(Sentences):
    """Samples with as many features as some have tokens."""

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return super().__getitem__(index) | {"features": torch.full((8,), float(index))}


def test_only_what_is_as_long_as_every_sample_is_padded() -> None:
    dataset = Featured()
    assert 8 in dataset.lengths.tolist()
    for step, batch in enumerate(islice(loader_of(0, 1, TokenBudget(200), dataset), 4)):
        order = SampleOrder(BatchShard(3, BATCH, 0, 1, True), SAMPLES).indices(step, (0, BATCH))
        ((part,), _) = batch
        assert torch.equal(part["features"], torch.from_numpy(order).float()[:, None].expand(-1, 8))
        assert part["inputs"].shape == part["labels"].shape == (BATCH, dataset.lengths[order].max())


def test_rows_of_packed_documents_lose_their_padding() -> None:
    rows = Packed(Documents([3, 9, 1, 5, 12, 2, 7, 4] * 4), 12, "none", validation_fraction=0)
    assert sorted(rows.lengths.tolist()) == sorted([3, 9, 1, 5, 12, 2, 7, 4] * 4)
    packed = Packed(Documents([3, 9, 1, 5, 12, 2, 7, 4] * 4), 12, validation_fraction=0)
    for dataset in (rows, packed):
        for batch in islice(loader_of(0, 1, TokenBudget(24), dataset), 6):
            for part, numbers in zip(*batch, strict=True):
                inputs = part["inputs"]
                assert inputs["ids"].numel() <= 24
                assert {x.shape for x in (*inputs.values(), part["labels"])} == {inputs["ids"].shape}
                assert len(numbers) == len(inputs["ids"])
        whole = dataset.batch(np.arange(len(dataset)))["labels"]
        lengths = torch.from_numpy(dataset.lengths)[:, None]
        assert (whole[torch.arange(12)[None] >= lengths] == -100).all()


# -- parity -----------------------------------------------------------------------------------------------------------

PLANS = plans(
    "data2",
    "1d",
    "1d_sharded",
    "2d",
    "pipeline2",
    "zero3",
    "data2_2d",
    "data2_pipeline2",
    "zero2_pipeline2",
    "3d_2x1x2",
)
PLANS |= {
    "data4": (4, dict(data=4)),
    "sequence2": (2, dict(sequence=2)),
    "ulysses2_data2": (4, dict(data=2, sequence=dict(size=2, mode="ulysses"))),
    "sequence2_1d": (4, dict(sequence=2, tensor=2)),
    "zero3_1d": (4, dict(data=2, tensor=2, zero=3)),
    "sequence2_zb": (4, dict(pipeline=2, sequence=2)),
    "interleaved": (2, dict(pipeline=2)),
    "zero2_zbv": (4, dict(data=2, pipeline=2, zero=2)),
}
MORE: dict[str, dict[str, Any]] = {
    "data2_pipeline2": dict(schedule=dict(microbatches=2)),
    "sequence2_zb": dict(schedule=dict(type="zb-h1")),
    "interleaved": dict(schedule=dict(type="interleaved")),
    "zero2_zbv": dict(schedule=dict(type="zb-v")),
}
LONG = (
    "data2", "1d", "pipeline2", "1d_sharded", "data2_2d", "zero2_pipeline2", "3d_2x1x2", "ulysses2_data2",
    "sequence2_1d", "zero3_1d", "sequence2_zb", "interleaved", "zero2_zbv",
)  # fmt: skip


def trained(rank: int, own: dict[str, Any]) -> tuple[Trace, float, set[tuple[int, int]]]:
    """The trace of a run on its own loader, the loss of an evaluation, and the shapes of its microbatches."""
    engine = colossus.initialize(own)
    trace, shapes = Trace(), set()
    trace.start = full_state_dict(engine.model, engine.context)
    for step in range(STEPS):
        batch = next(engine.loader)
        if isinstance(batch, Microbatches):
            shapes |= {tuple(part["inputs"].shape) for part in batch.batches}
        result = engine.train_step(batch)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        trace.tokens.append(result.tokens)
        if step in (0, STEPS - 1):
            trace.gradients.append(full_state_dict(engine.model, engine.context, gradients=True))
    trace.end = full_state_dict(engine.model, engine.context)
    evaluated = engine.evaluate()
    assert evaluated.tokens == sum(max(0, length - number % 4) for number, length in enumerate(Sentences().lengths))
    engine.close()
    return trace, evaluated.loss, shapes


def global_batch(step: int, sizes: dict[str, Any], batch: int) -> dict[str, Tensor]:
    """The batch of a step of plain torch."""
    order = SampleOrder(BatchShard(3, batch, 0, 1, True), SAMPLES)
    return whole_of(order.indices(step, (0, batch)).tolist(), sizes["seq_len"])


def whole_of(samples: Any, size: int) -> dict[str, Tensor]:
    """Samples that are all padded to the longest of the data."""
    dataset = Sentences()
    inputs, labels = torch.zeros(len(samples), size).long(), torch.full((len(samples), size), -100)
    for row, index in enumerate(samples):
        sample = dataset[index]
        inputs[row, : len(sample["inputs"])], labels[row, : len(sample["labels"])] = sample["inputs"], sample["labels"]
    return {"inputs": inputs, "labels": labels}


@pytest.fixture(scope="module")
def alone() -> tuple[Trace, float, set[tuple[int, int]]]:
    (result,) = run_ranks(1, trained, config({}), with_context=False)
    return result


def test_one_process_is_plain_torch(alone: tuple[Trace, float, set[tuple[int, int]]]) -> None:
    trace, evaluated, shapes = alone
    assert len(shapes) > 3
    twin = PlainGPT(**SIZES).double()
    assert_is_plain_torch(trace, twin, SIZES, STEPS, BATCH, global_batch)
    loss_sum, count = twin.loss_sum(*whole_of(range(SAMPLES), SIZES["seq_len"]).values())
    assert relative(evaluated, (loss_sum / count).item()) < 1e-7  # the twin's key biases went another way


@pytest.mark.parametrize("plan", but(LONG, PLANS))
def test_every_plan_follows_it(plan: str, alone: tuple[Trace, float, set[tuple[int, int]]]) -> None:
    world, parallel = PLANS[plan]
    budget = 48 if plan.startswith("3d") else BUDGET
    results = run_ranks(world, trained, config(parallel, budget, **MORE.get(plan, {})), with_context=False)
    assert_parity([trace for trace, _, _ in results], alone[0], "fp64")
    assert all(relative(evaluated, alone[1]) < 1e-10 for _, evaluated, _ in results)
    if parallel.get("data", 1) > 1:
        assert len({frozenset(shapes) for _, _, shapes in results}) > 1, "ranks have different shapes"


DROPOUT = dict(model=dict(dropout=0.2, attention_dropout=0.1))


@pytest.mark.parametrize("plan", but(("1d_sharded", "zero2_zbv"), ("2d", "1d_sharded", "zero2_zbv")))
def test_dropout_drops_the_same_under_every_plan(plan: str) -> None:
    world, parallel = PLANS[plan]
    (reference, loss, _), *_ = run_ranks(1, trained, config({}, 60, **DROPOUT), with_context=False)
    results = run_ranks(world, trained, config(parallel, **DROPOUT, **MORE.get(plan, {})), with_context=False)
    assert_parity([trace for trace, _, _ in results], reference, "fp64")
    assert relative(results[0][1], loss) < 1e-10


# -- resumes ----------------------------------------------------------------------------------------------------------


def test_a_run_resumes_under_another_plan_and_budget(tmp_path: Path) -> None:
    def body(rank: int, parallel: dict[str, Any], budget: int, steps: int, workers: int) -> Any:
        own = config(parallel, budget, checkpoint=dict(dir=str(tmp_path), every=2, resume="auto"))
        own["data"]["num_workers"] = workers
        own["train"]["steps"] = steps
        own["lr_schedule"] = dict(type="constant")
        engine = colossus.initialize(own)
        fit(engine)
        weights = full_state_dict(engine.model, engine.context)
        engine.close()
        return weights

    run_ranks(2, body, dict(data=2), 24, 2, 0, with_context=False)
    resumed, *_ = run_ranks(4, body, dict(data=2, pipeline=2), 40, 6, 1, with_context=False)
    whole = config(dict(data=2))
    whole["train"]["steps"], whole["lr_schedule"] = 6, dict(type="constant")

    def at_once(rank: int) -> Any:
        engine = colossus.initialize(whole)
        for batch in islice(engine.loader, 6):
            engine.train_step(batch)
        weights = full_state_dict(engine.model, engine.context)
        engine.close()
        return weights

    wanted, *_ = run_ranks(2, at_once, with_context=False)
    own, wanted = ({name: x for name, x in state.items() if not is_key_bias(name)} for state in (resumed, wanted))
    assert_close_states(own, wanted, "weight", atol=1e-10)


# -- what is refused --------------------------------------------------------------------------------------------------


class Unlike(Sentences):
    def __init__(self, lengths: Any) -> None:
        self.lengths = lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return Sentences()[index]


class Whole(Sentences):
    lengths = None  # type: ignore[assignment]

    def __init__(self) -> None:
        pass


def test_samples_that_do_not_fit_are_refused_in_words() -> None:
    cases: list[tuple[Any, TokenBudget, str]] = [
        (Sentences(), TokenBudget(11), r"= 11: sample 5 of Sentences has 12 tokens: set it to 12 or more"),
        (Sentences(), TokenBudget(15, 1, 16), r"sample 5 of Sentences has 12 tokens, padded to 16: set it to 16 or"),
        (
            Sentences(),
            TokenBudget(23, 2),
            r"has 12 tokens, and a microbatch has 2 samples at least, which tensor ranks",
        ),
        (Whole(), TokenBudget(24), r"Whole has no attribute `lengths`, the tokens of each sample, \[samples\]: add it"),
        (Unlike(np.ones(3, int)), TokenBudget(24), r"Unlike.lengths is int64\[3\] from 1 on: it has a number .* of 29"),
        (
            Unlike(np.arange(29)),
            TokenBudget(40),
            r"Unlike.lengths is int64\[29\] from 0 on: it has a number of tokens, 1",
        ),
        (Unlike(np.ones(29)), TokenBudget(24), r"Unlike.lengths is float64\[29\]"),
        (iter([]), TokenBudget(24), r"for a dataset whose samples are read by number .* list_iterator yields batches"),
    ]
    for source, budget, message in cases:
        with pytest.raises(ValueError, match=message):
            loader_of(0, 1, budget, source)
    with pytest.raises(
        ValueError, match=r"has 1 tokens by Unlike.lengths, but no tensor with as many in dim 0: \['inp"
    ):
        next(loader_of(0, 1, TokenBudget(24), Unlike(np.full(29, 1))))


def test_a_collate_fn_may_pad_to_the_longest_sample_and_no_further() -> None:
    def collate(samples: list[dict[str, Tensor]], longest: int | None = None) -> dict[str, Tensor]:
        size = longest or max(len(sample["inputs"]) for sample in samples)
        values = {"inputs": 0, "labels": -100}
        return {
            key: torch.stack([torch.nn.functional.pad(x[key], (0, size - len(x[key])), value=value) for x in samples])
            for key, value in values.items()
        }

    budget = TokenBudget(32, 2, 4)
    own, padded = ([*islice(loader_of(0, 2, budget, dict(type=Sentences, collate_fn=fn)), 5)] for fn in (collate, None))
    for one, other in zip(own, padded, strict=True):
        for mine, theirs in zip(one.batches, other.batches, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0)
    far = dict(type=Sentences, collate_fn=lambda samples: collate(samples, 40))
    with pytest.raises(
        ValueError, match=r"data.collate_fn makes 40 tokens of samples whose longest has \d+ by Sentences"
    ):
        next(loader_of(0, 1, budget, far))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "interaction": (dict(train=dict(samples_interact=True)), "and pads dim 1: leave out samples_interact"),
    "dims": (
        dict(train=dict(batch_dims=dict(inputs=1))),
        "chooses the samples of a microbatch .* leave out batch_dims",
    ),
    "no number": (dict(train=dict(tokens_per_microbatch=0)), "tokens_per_microbatch"),
    "pairs": (
        dict(model=dict(objective=dict(type="dpo"), reference={})),
        "model.objective compares pairs: leave it out",
    ),
    "further tokens": (dict(model=dict(mtp_weight=0.1)), "model.mtp_weight, whose loss counts the labels of a step"),
    "experts": (dict(model=dict(type="Llama", experts=dict(num=2))), "routers of experts count padding, too"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_go_together_are_refused_in_words(name: str) -> None:
    more, message = REFUSED[name]

    def body(rank: int) -> None:
        with pytest.raises((ConfigError, ValueError), match=message):
            colossus.initialize(load_config(config({}, **more), nproc=1))

    run_ranks(1, body, with_context=False)


def test_verify_refuses_a_budget_in_words() -> None:
    own = config({})
    with pytest.raises(ConfigError, match=r"a budget gives each plan other ones: add train.tokens_per_microbatch=None"):
        _check_config(load_config(own, nproc=1))
