"""Batch norm over the samples of all ranks, against torch's own in one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modes import MODES, own
from helpers.ranks import RankError, grid, run_ranks
from helpers.resnet import SIZES, PlainResNet, ResNet
from helpers.training import Trace, assert_is_plain_torch, batch_of, config_of, run_cases
from torch import Tensor, nn

import colossus
from colossus import layers, torch_versions
from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict

BATCH, STEPS = 24, 4


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- the layer alone ------------------------------------------------------------------------------------------

#: class, shape of a sample, arguments
LAYERS: dict[str, tuple[str, tuple[int, ...], dict[str, Any]]] = {
    "1d": ("BatchNorm1d", (5,), {}),
    "1d of sequences": ("BatchNorm1d", (5, 7), dict(momentum=None)),
    "2d": ("BatchNorm2d", (5, 3, 7), dict(eps=1e-3, momentum=0.3)),
    "3d": ("BatchNorm3d", (3, 3, 1, 5), dict(affine=False)),
    "any": ("SyncBatchNorm", (3, 5), {}),
    "without a bias": ("BatchNorm1d", (5,), dict(bias=False)),
    "not tracked": ("BatchNorm2d", (3, 3, 3), dict(track_running_stats=False)),
}
if not torch_versions.batch_norm_has_bias:
    del LAYERS["without a bias"]


def passes(norm: nn.Module, xs: list[Tensor], dys: list[Tensor]) -> list[Tensor]:
    """Outputs and gradients of inputs in two training passes, and what evaluation gives."""
    tensors = []
    for x, dy in zip(xs, dys, strict=True):
        leaf = x.clone().requires_grad_()
        y = norm.train()(leaf)
        y.backward(dy)
        tensors += [y.detach(), leaf.grad]
    with torch.no_grad():
        return [*tensors, norm.eval()(xs[0])]  # type: ignore[list-item]


def drawn(norm: nn.Module) -> nn.Module:
    with torch.no_grad():
        for number, parameter in enumerate(norm.parameters()):
            parameter.copy_(numbers(*parameter.shape, seed=7 + number))
    return norm


@pytest.mark.parametrize("split", [(12,), (6, 6), (1, 4, 7)])
def test_layer_is_torchs(split: tuple[int, ...]) -> None:
    """Of samples that ranks split unevenly: outputs, every gradient and the running statistics, on all ranks alike;
    on one rank to the bit."""

    def data(sample: tuple[int, ...]) -> list[list[Tensor]]:
        return [[numbers(12, *sample, seed=seed) * 3 + 5 for seed in seeds] for seeds in ((0, 1), (2, 3))]

    def body(context: ParallelContext) -> dict[str, Any]:
        states = {}
        for name, (kind, sample, arguments) in LAYERS.items():
            make = partial(getattr(layers, kind), sample[0], **arguments)
            norm = drawn(colossus.build(make, context, dtype=torch.float64))
            xs, dys = ([x.split(split)[context.index("data")] for x in batches] for batches in data(sample))
            outs = passes(norm, xs, dys)
            states[name] = outs, full_state_dict(norm, context), full_state_dict(norm, context, gradients=True)
        return states

    by_rank = run_ranks(len(split), body, plan=grid(data=len(split)))
    close = dict(rtol=0.0, atol=0.0) if len(split) == 1 else dict(rtol=1e-10, atol=1e-10)
    for name, (kind, sample, arguments) in LAYERS.items():
        twin = drawn(getattr(nn, kind)(sample[0], dtype=torch.float64, **arguments))
        wanted = passes(twin, *data(sample))
        results = [states[name] for states in by_rank]
        for number, want in enumerate(wanted):
            mine = torch.cat([outs[number] for outs, _, _ in results])
            if number < len(wanted) - 1 or twin.track_running_stats or len(split) == 1:
                torch.testing.assert_close(mine, want, **close, msg=f"{name}: tensor {number}")
        for _, state, _ in results:
            assert state.keys() == twin.state_dict().keys()
            for key, value in twin.state_dict().items():
                torch.testing.assert_close(state[key], value, **close, msg=f"{name}: {key}")
                assert torch.equal(state[key], results[0][1][key]), f"{name}: {key} differs between ranks"
        for key, parameter in twin.named_parameters():
            total = torch.stack([gradients[key] for _, _, gradients in results]).sum(0)  # each of its samples
            torch.testing.assert_close(total, parameter.grad, **close, msg=f"{name}: gradient of {key}")


def test_samples_split_by_a_tensor_mode() -> None:
    """And features split as between blocks, which are made whole; evaluation without running statistics is of all."""
    x = numbers(12, 6)

    def body(context: ParallelContext) -> list[tuple[Tensor, Tensor]]:
        make = partial(layers.BatchNorm1d, 6, track_running_stats=False)
        norm = colossus.build(make, context, dtype=torch.float64)
        outs = []
        for training in (True, False):
            y = layers.to_whole(norm.train(training)(layers.to_residual(own(context, x), norm.parallel)))
            outs.append((own(context, numbers(12, 1)), y.detach()))
        return outs

    want = nn.BatchNorm1d(6, dtype=torch.float64)(x).detach()
    place = {row: number for number, row in enumerate(numbers(12, 1).flatten().tolist())}
    for name in ("2d_2x3", "3d_2x1x2"):
        for outs in MODES[name].run(body):
            for rows, y in outs:
                torch.testing.assert_close(y, want[[place[row] for row in rows.flatten().tolist()]])


def test_communication_is_the_formula_and_evaluation_sends_nothing() -> None:
    channels, ranks = 5, 3

    def body(context: ParallelContext) -> tuple[Any, ...]:
        norm = colossus.build(partial(layers.BatchNorm2d, channels), context, dtype=torch.float32)
        x = torch.randn(2, channels, 3, 3, requires_grad=True)
        with accounting.count() as forward:
            y = norm(x)
        with accounting.count() as backward:
            y.sum().backward()
        with accounting.count() as evaluation:
            norm.eval()(x)
        return forward.bytes(), backward.bytes(), evaluation.bytes()

    gathered = (ranks - 1) * (2 * channels + 1) * 4
    summed = 2 * (ranks - 1) / ranks * 2 * channels * 4
    assert run_ranks(ranks, body, plan=grid(data=ranks)) == [(gathered, pytest.approx(summed), 0)] * ranks


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"BatchNorm2d: it takes 4 dims, with 3 channels in dim 1.*\(2, 3\)"):
        layers.BatchNorm2d(3)(torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"takes 2 or 3 dims, with 3 channels in dim 1.*\(2, 4\)"):
        layers.BatchNorm1d(3)(torch.ones(2, 4))

    def body(context: ParallelContext) -> None:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm, self.linear = layers.BatchNorm1d(4), nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                return self.norm(self.linear(x).mT)

        engine = colossus.initialize(
            dict(parallel=dict(sequence=2), device="cpu"), model=Net, loss_fn=lambda y, batch: (y.sum(), len(y))
        )
        engine.train_step(torch.ones(2, 4, 4))

    with pytest.raises(RankError, match=r"norm \(BatchNorm1d\): its statistics need all tokens"):
        run_ranks(2, body, with_context=False)


# -- a ResNet in training -------------------------------------------------------------------------------------

#: ranks, microbatches, plan
PLANS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "data 2": (2, 1, dict(parallel=dict(data=2))),
    "data 2, accumulation": (2, 2, dict(parallel=dict(data=2))),
    "data 2, zero 1": (2, 1, dict(parallel=dict(data=2, zero=1))),
    "data 2, zero 3": (2, 1, dict(parallel=dict(data=2, zero=3))),
    "pipeline 2": (2, 2, dict(parallel=dict(pipeline=2))),
    "data 2, recomputed": (2, 2, dict(parallel=dict(data=2), train=dict(activation_checkpoint="full"))),
    "data 2, selective": (2, 1, dict(parallel=dict(data=2), train=dict(activation_checkpoint="selective"))),
    "data 4": (4, 1, dict(parallel=dict(data=4))),
    "2d": (4, 1, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
    "3d": (4, 2, dict(parallel=dict(tensor=dict(mode="3d", shape=(2, 1, 2))))),
    "pipeline 2, data 2": (4, 2, dict(parallel=dict(pipeline=2, data=2))),
}


def config(microbatches: int, more: dict[str, Any]) -> dict[str, Any]:
    settings = config_of(
        {}, STEPS, "fp64", model=dict(type=ResNet, **SIZES), schedule=dict(microbatches=microbatches),
        train=dict(global_batch_size=BATCH),
    )  # fmt: skip
    settings["train"] |= more.get("train", {})
    modules = dict(modules=["1", "2", "3"])
    if kind := settings["train"].get("activation_checkpoint"):
        settings["train"]["activation_checkpoint"] = dict(type=kind, **modules)
    return settings | {"parallel": more["parallel"]}


def require(trace: Trace, microbatches: int) -> None:
    assert_is_plain_torch(trace, PlainResNet(microbatches), SIZES, STEPS, BATCH)


@pytest.mark.long
@pytest.mark.parametrize("world", [2, 4])
def test_resnet_is_plain_torch(world: int) -> None:
    """Losses, gradients, weights and running statistics, the same to the bit on all ranks."""
    chosen = {name: plan for name, plan in PLANS.items() if plan[0] == world}
    runs = run_cases(world, {name: config(plan[1], plan[2]) for name, plan in chosen.items()}, STEPS)
    for name, traces in runs.items():
        try:
            for trace in traces:
                require(trace, chosen[name][1])
                for key, value in trace.end.items():
                    assert "running" not in key or torch.equal(value, traces[0].end[key]), key
        except AssertionError as error:
            error.add_note(f"under {name}")
            raise


def test_a_checkpoint_goes_on_under_another_plan(tmp_path: Path) -> None:
    def steps(rank: int, data: int, number: int, name: str) -> dict[str, Tensor]:
        checkpoint = dict(dir=str(tmp_path / name), resume="auto")
        engine = colossus.initialize(config(2, dict(parallel=dict(data=data))) | dict(checkpoint=checkpoint))
        engine.checkpoints.resume()
        for _ in range(number):
            batch = batch_of(engine.completed_steps, SIZES, BATCH)
            engine.train_step({key: value.chunk(data)[rank] for key, value in batch.items()})
        engine.checkpoints.save()
        state = {name: value.clone() for name, value in full_state_dict(engine.model, engine.context).items()}
        engine.close()
        return state

    (whole,) = run_ranks(1, steps, 1, 4, "whole", with_context=False)
    run_ranks(2, steps, 2, 2, "resumed", with_context=False)
    (resumed,) = run_ranks(1, steps, 1, 2, "resumed", with_context=False)
    assert resumed["0.1.num_batches_tracked"] == 8
    for name, value in whole.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-8, atol=1e-10, msg=name)


def test_replicas_with_parameters_of_their_own_have_statistics_of_their_own() -> None:
    x = numbers(8, 3)

    def body(rank: int) -> tuple[Tensor, Tensor]:
        plan = dict(data=2, strategy=dict(type="local_sgd", period=4))
        engine = colossus.initialize(
            dict(parallel=plan, train=dict(precision="fp64", global_batch_size=8, steps=4), device="cpu"),
            model=partial(layers.BatchNorm1d, 3, momentum=None),
            loss_fn=lambda y, batch: (y.square().sum(), len(y)),
        )
        own = x.chunk(2)[rank]
        engine.train_step(own)
        return own, engine.model.running_mean.clone()  # type: ignore[union-attr, operator, return-value]

    for own_samples, mean in run_ranks(2, body, with_context=False):
        torch.testing.assert_close(mean, own_samples.mean(0))


def test_low_precision_takes_statistics_in_float32() -> None:
    x = (numbers(2048, 3) + 40.0).to(torch.bfloat16)

    def body(context: ParallelContext) -> tuple[Tensor, Tensor]:
        make = partial(layers.BatchNorm1d, 3)
        norm = colossus.build(make, context, dtype=torch.bfloat16, wide_dtype=torch.float32)
        assert {value.dtype for value in (*norm.parameters(), norm.running_mean, norm.running_var)} == {torch.float32}
        return norm(x.chunk(2)[context.index("data")]).detach(), norm.running_var

    want = nn.BatchNorm1d(3)
    y = want(x.float()).detach()
    results = run_ranks(2, body, plan=grid(data=2))
    torch.testing.assert_close(torch.cat([mine for mine, _ in results]), y.to(torch.bfloat16))
    for _, variance in results:
        torch.testing.assert_close(variance, want.running_var)
