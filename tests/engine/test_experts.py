"""Runs of models with experts: evaluation, checkpoints under other plans, what steps count, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import assert_chain_is_one_process, contents
from helpers.experts import NUM_EXPERTS, TOP_K, config_of_experts
from helpers.ranks import run_ranks
from helpers.training import BATCH, SIZES, batch_of

import colossus
from colossus import layers
from colossus.checkpoint.folder import name_of
from colossus.config import ConfigError, load_config
from colossus.monitor.metrics import Metrics
from colossus.state.model_state_dict import full_state_dict

TOKENS = BATCH * SIZES["seq_len"]
ROUTERS = ["blocks.0.mlp.router", "blocks.1.mlp.router"]


@pytest.mark.parametrize("plan", [dict(data=2, expert=2), dict(data=2, expert=2, zero=3)])
def test_ranks_with_fewer_samples_evaluate_with_the_others(plan: dict[str, Any]) -> None:
    """They run a forward that the others wait for, which counts nothing."""
    batch = batch_of(0)
    parts = [(0, 5), (5, 5), (5, 8)]

    def body(rank: int, parallel: dict[str, Any]) -> list[tuple[float, float]]:
        engine = colossus.initialize(config_of_experts(parallel, 1))
        sums_of_parts = []
        for index in range(2):
            own = [(0, 8)] if not parallel else [parts[index + engine.context.index("data")]]
            sums = engine.eval_step({key: value[slice(*own[0])] for key, value in batch.items()})
            sums_of_parts.append((sums.loss_sum, sums.count))
        engine.close()
        return sums_of_parts

    (whole, _), *_ = run_ranks(1, body, {}, with_context=False)
    for first, second in run_ranks(2, body, plan, with_context=False):
        assert first[0] + second[0] == pytest.approx(whole[0], rel=1e-12)
        assert first[1] + second[1] == whole[1]


CHAIN: list[tuple[int, dict[str, Any]]] = [
    (4, dict(data=4, expert=4)),
    (4, dict(data=4, expert=2, zero=3)),
    (4, dict(data=2, pipeline=2, expert=2)),
    (4, dict(sequence=2, tensor=2, expert=2)),
    (1, dict()),
]


def test_a_checkpoint_goes_on_with_another_number_of_expert_ranks(tmp_path: Path) -> None:
    def config(plan: dict[str, Any]) -> dict[str, Any]:
        schedule = dict(type="1f1b" if "pipeline" in plan else "gpipe", microbatches=2)
        return config_of_experts(plan, 50, "experts_with_bias", schedule=schedule, lr_schedule=dict(warmup_steps=2))

    assert_chain_is_one_process(tmp_path, CHAIN, config, batch_of, rel=1e-10)
    assert contents(tmp_path / "4" / name_of(5)).tensors["model/blocks.1.mlp.router.bias"].abs().min() > 0.01


@pytest.mark.rest("plan0")
@pytest.mark.parametrize("plan", [dict(data=2, pipeline=2, expert=2), dict(data=2, tensor=2, expert=2)])
def test_a_step_tells_what_its_routers_have_counted(plan: dict[str, Any], tmp_path: Path) -> None:
    """Of all stages, each token once, recomputed or not."""
    model, schedule = dict(activation_checkpoint="full"), dict(microbatches=2)

    def body(rank: int, parallel: dict[str, Any]) -> dict[str, dict[str, Any]]:
        config = config_of_experts(parallel, 1, "experts_with_losses", model=dict(model), schedule=schedule)
        engine = colossus.initialize(config)
        metrics = Metrics(tmp_path / f"{engine.context.world_size}.jsonl")
        metrics.on_train_start(engine)
        metrics.on_step_start(engine)
        index, count = engine.context.index("data"), engine.context.size("data")
        part = BATCH // count
        result = engine.train_step({key: x[index * part :][:part] for key, x in batch_of(0).items()})
        metrics.on_step_end(engine, result)
        engine.close()
        return result.experts

    (alone,) = run_ranks(1, body, {}, with_context=False)
    for counts in run_ranks(4, body, plan, with_context=False):
        assert list(counts) == ROUTERS
        for name, counted in counts.items():
            assert sum(counted["tokens"]) == TOKENS * TOP_K
            assert counted["tokens"] == alone[name]["tokens"]
            assert counted["max_over_mean"] == max(counted["tokens"]) * NUM_EXPERTS / (TOKENS * TOP_K)
            assert counted["entropy"] == pytest.approx(alone[name]["entropy"], rel=1e-10)
            assert counted["z_loss"] == pytest.approx(alone[name]["z_loss"], rel=1e-10)
            assert counted["aux_loss"] > 0
            assert counted["dropped"] == 0
    row = json.loads((tmp_path / "4.jsonl").read_text())
    assert row["experts"]["blocks.0.mlp.router"]["tokens"] == alone[ROUTERS[0]]["tokens"]


@pytest.mark.long
def test_low_precision() -> None:
    """Follows float32 roughly."""

    def body(rank: int, precision: str) -> tuple[list[float], torch.Tensor]:
        config = config_of_experts(dict(data=2, expert=2), 3, "experts_with_losses")
        config["train"]["precision"] = precision
        engine = colossus.initialize(config)
        losses = []
        for step in range(3):
            own = {key: x[rank * 4 :][:4] for key, x in batch_of(step).items()}
            losses.append(engine.train_step(own).grad_norm)
        router = dict(engine.model.named_parameters())["blocks.0.mlp.router.weight"].detach().clone()
        engine.close()
        return losses, router

    wanted, _ = run_ranks(2, body, "fp32", with_context=False)[0]
    for precision in ("bf16", "fp16"):
        for norms, _ in run_ranks(2, body, precision, with_context=False):
            assert norms == pytest.approx(wanted, rel=0.05), precision


@pytest.mark.parametrize("plan", [dict(data=2, expert=2, zero=3), dict(tensor=2, pipeline=1)])
def test_the_plain_copy_computes_the_same(plan: dict[str, Any]) -> None:
    ids = batch_of(0)["inputs"]

    def body(rank: int) -> None:
        engine = colossus.initialize(config_of_experts(plan, 1, "experts_with_bias"))
        copied = colossus.plain(engine)
        with torch.no_grad():
            want = layers.to_whole(engine.model(ids))
            out = copied(ids)
        torch.testing.assert_close(out, want, rtol=1e-10, atol=1e-10)
        assert copied.state_dict().keys() == full_state_dict(engine.model, engine.context).keys()
        engine.close()

    run_ranks(2, body, with_context=False)


def test_replicas_that_gossip_have_experts_inside_of_each() -> None:
    """With its experts on one rank or on two of its own each replica is the same."""

    def body(rank: int, plan: dict[str, Any]) -> dict[str, torch.Tensor]:
        engine = colossus.initialize(config_of_experts(dict(data=2, strategy="sgp", **plan), 3, "experts_with_bias"))
        index = engine.context.index("data")
        for step in range(3):
            own = {key: x[index * 4 :][:4] for key, x in batch_of(step).items()}
            engine.train_step(own)
        with engine.strategy.export():
            state = full_state_dict(engine.model, engine.context)
        engine.close()
        return state

    wanted = run_ranks(2, body, {}, with_context=False)[0]
    for state in run_ranks(4, body, dict(sequence=2, expert=2), with_context=False):
        for name, value in wanted.items():
            torch.testing.assert_close(state[name], value, rtol=1e-8, atol=1e-10, msg=name)


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "no divisor": (
        dict(parallel=dict(data=4, expert=3)), 4, r"parallel.expert = 3 is not a divisor of data 4; use 1 or 2 or 4",
    ),
    "nor with the sequence": (
        dict(parallel=dict(data=2, sequence=2, expert=8)), 4, "not a divisor of data 2 nor sequence 2 times one",
    ),
    "gossip": (
        dict(parallel=dict(data=4, expert=2, strategy="sgp")), 4,
        r"under parallel.strategy = 'sgp' each of these has a whole replica; take an expert size of 1, or the sequence",
    ),
    "compressed": (
        dict(parallel=dict(data=4, expert=2, strategy=dict(type="all_reduce", compress="bf16"))), 4,
        r"gradients are summed along data as a whole",
    ),
    "shard": (
        dict(parallel=dict(data=4, expert=4, zero=dict(stage=1, shard=2))), 4,
        r"parallel.zero.shard = 2 is no multiple of the 4 data ranks that share the experts",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_told(name: str) -> None:
    config, nproc, words = REFUSED[name]
    with pytest.raises(ConfigError, match=words):
        load_config({**config, "train": dict(global_batch_size=8)}, nproc=nproc)


def test_experts_that_do_not_divide_are_told() -> None:
    config = config_of_experts(dict(data=3, expert=3), 1)
    config["train"]["global_batch_size"] = 9

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match=r"num_experts = 4 is not a multiple of .*expert = 3; nearest: 3 or 6"):
            colossus.initialize(config)

    run_ranks(3, body, with_context=False)
