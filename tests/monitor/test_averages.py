"""Averages of weights: torch's `AveragedModel` of the whole weights is the oracle, under every plan."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.examples import ROOT
from helpers.fake_cuda import Waits, batch_on_device, run_fake_ranks
from helpers.long import long
from helpers.ranks import run_ranks
from helpers.training import BATCH, SIZES, batch_of, config_of
from helpers.twins import PlainGPT
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn
from torch.utils._python_dispatch import TorchDispatchMode

import colossus
from colossus.checkpoint import full_state_dict
from colossus.checkpoint.errors import CheckpointError
from colossus.config import ConfigError, load_config
from colossus.monitor.hooks import averages
from colossus.monitor.hooks.averages import EMA, SWA
from colossus.monitor.hooks.options import EMAOptions
from colossus.registry import HOOKS

STEPS = 10
PLANS: dict[str, tuple[int, dict[str, Any]]] = {
    "zero1": (4, dict(parallel=dict(data=4, zero=1))),
    "zero2_1d": (4, dict(parallel=dict(data=2, tensor=2, zero=2))),
    "zero3_pipeline": (4, dict(parallel=dict(data=2, pipeline=2, zero=3), schedule=dict(microbatches=2))),
    "2d": (4, dict(parallel=dict(tensor=dict(mode="2d", size=4)))),
    "zero3_sequence": (4, dict(parallel=dict(data=2, sequence=2, zero=3))),
    "3d": (4, dict(parallel=dict(tensor=dict(mode="3d", shape=(2, 1, 2))))),
}
DEFAULT = ("zero3_pipeline",)


def decay_with_warmup(updates: int) -> float:
    """As diffusers and TensorFlow cap it."""
    return min(0.5 ** (2 / 30), (1 + updates) / (10 + updates))


def oracles() -> dict[str, tuple[Any, AveragedModel, Any]]:
    """A hook, torch's average, and the steps (from 1) after which it is updated."""
    twin = PlainGPT(**SIZES).double()

    def warmed(average: Tensor, weights: Tensor, updates: Tensor) -> Tensor:
        decay = decay_with_warmup(int(updates))
        return decay * average + (1 - decay) * weights

    return {
        "ema": (EMA(decay=0.9), AveragedModel(twin, multi_avg_fn=get_ema_multi_avg_fn(0.9)), range(1, 11)),
        "warm": (EMA(half_life=30, warmup=True, every=2), AveragedModel(twin, avg_fn=warmed), range(2, 11, 2)),
        "swa": (SWA(start=4, every=3), AveragedModel(twin), (4, 7, 10)),
    }


def follow(rank: int, plans: dict[str, dict[str, Any]]) -> None:
    """Body of a rank: under each plan the hooks' averages are torch's of the whole weights of the same steps."""
    for title, plan in plans.items():
        engine = colossus.initialize(config_of({}, STEPS, "fp64", **plan))
        index, part = engine.context.index("data"), BATCH // engine.context.size("data")
        twin, found = PlainGPT(**SIZES).double(), oracles()
        engine.checkpoints.hooks = [hook for hook, _, _ in found.values()]
        for hook, _, _ in found.values():
            hook.on_train_start(engine)
            with pytest.raises(ValueError, match="has no average yet"), hook.averaged(engine):
                pass
        for step in range(1, STEPS + 1):
            mine = {key: value[index * part : (index + 1) * part] for key, value in batch_of(step).items()}
            result = engine.train_step(mine)
            twin.load_state_dict(full_state_dict(engine.model, engine.context))
            for hook, oracle, steps in found.values():
                hook.on_step_end(engine, result)
                if step in steps:
                    oracle.update_parameters(twin)
        before = full_state_dict(engine.model, engine.context)
        for name, (hook, oracle, _) in found.items():
            with hook.averaged(engine):
                inside = full_state_dict(engine.model, engine.context)
                loss = engine.eval_step(mine).loss
                with pytest.raises(RuntimeError, match=r"inside of averaged\(\)"):
                    engine.train_step(mine)
                with pytest.raises(CheckpointError, match=r"inside of averaged\(\)"):
                    engine.checkpoints.save()
            for key, value in oracle.module.state_dict().items():
                torch.testing.assert_close(inside[key], value, rtol=0, atol=1e-12, msg=f"{title}, {name}: {key}")
                assert not torch.equal(inside[key], before[key])
            total, count = oracle.module.loss_sum(*batch_of(STEPS).values())
            assert loss == pytest.approx((total / count).item(), rel=1e-11), (title, name)
        after = full_state_dict(engine.model, engine.context)
        copied = full_state_dict(copy.deepcopy(engine.model), engine.context)
        for key, value in before.items():
            assert torch.equal(after[key], value), (title, key)
            assert torch.equal(copied[key], value), (title, key)
        engine.train_step(mine)
        engine.close()


@pytest.mark.parametrize("rest", [False, *long(True)])
def test_averages_are_those_of_torch(rest: bool) -> None:
    run_ranks(
        4, follow, {key: plan for key, (_, plan) in PLANS.items() if (key in DEFAULT) != rest}, with_context=False
    )


# -- one process ----------------------------------------------------------------------------------------------


def test_a_skipped_step_is_no_update() -> None:
    """Of the running number, too, by which SWA divides, and which tells EMA its first update."""
    engine = colossus.initialize(config_of({}, STEPS, "fp32", train=dict(on_nonfinite="skip")))
    swa, ema, wanted = SWA(start=1), EMA(decay=0.5), []
    bias = engine.model.norm.bias
    for step in range(5):
        handle = bias.register_hook(lambda grad: grad * math.inf) if step in (0, 3) else None
        result = engine.train_step(batch_of(step))
        for hook in (swa, ema):
            hook.on_step_end(engine, result)
            assert hook.has_begun == (step > 0)
        if handle is None:
            wanted.append(bias.detach().clone())
        else:
            assert result.skipped
            handle.remove()
    first, second, third = wanted
    for hook, value in ((swa, (first + second + third) / 3), (ema, first.lerp(second, 0.5).lerp(third, 0.5))):
        with hook.averaged(engine):
            torch.testing.assert_close(bias.detach(), value, rtol=1e-6, atol=1e-9)
    engine.close()


def test_low_precision_is_averaged_in_float32() -> None:
    """What bfloat16 would round away is kept; both, weights and average, are the same to the bit after an exchange."""
    engine = colossus.initialize(config_of({}, STEPS, dict(params="bf16", optimizer="bf16")))
    ema, param, weights = EMA(decay=0.999), engine.model.blocks[0].mlp.up.weight, []
    assert param.dtype == torch.bfloat16
    for step in range(3):
        ema.on_step_end(engine, engine.train_step(batch_of(step)))
        weights.append(param.detach().float())
    average = ema.parameter_state()[param]["average"]
    torch.testing.assert_close(average, weights[0].lerp(weights[1], 0.001).lerp(weights[2], 0.001), rtol=0, atol=1e-8)
    before = average.clone()
    assert not torch.equal(before, before.bfloat16().float())
    with ema.averaged(engine):
        assert torch.equal(param, before.bfloat16())
    assert torch.equal(param, weights[2].bfloat16())
    assert torch.equal(average, before)
    engine.close()


def test_another_precision_takes_an_average_as_it_was_saved(tmp_path: Path) -> None:
    def saved(precision: Any, folder: Path | None) -> list[Tensor]:
        engine = colossus.initialize(config_of({}, STEPS, precision, checkpoint=dict(dir=str(tmp_path))))
        ema = EMA(decay=0.9)
        engine.checkpoints.hooks = [ema]
        if folder is not None:
            engine.checkpoints.load(folder)
        for step in range(0 if folder else 3):
            ema.on_step_end(engine, engine.train_step(batch_of(step)))
        engine.checkpoints.save().wait()
        engine.close()
        return [entries["average"] for entries in ema.parameter_state().values()]

    wide, low = saved("fp32", None), saved(dict(params="bf16", optimizer="bf16"), tmp_path)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(low, wide, strict=True))
    assert not torch.equal(wide[0], wide[0].bfloat16().float())


def test_what_a_resumed_run_trains_for_the_first_time_is_averaged_from_there(tmp_path: Path) -> None:
    def run(steps: int, folder: Path | None, **optimizer: Any) -> tuple[EMA, nn.Module]:
        config = config_of({}, STEPS, "fp64", checkpoint=dict(dir=str(tmp_path)), optimizer=optimizer)
        engine, ema = colossus.initialize(config), EMA(decay=0.5)
        engine.checkpoints.hooks = [ema]
        if folder is not None:
            engine.checkpoints.load(folder)
        for step in range(steps):
            ema.on_step_end(engine, engine.train_step(batch_of(step)))
        engine.checkpoints.save().wait()
        engine.close()
        return ema, engine.model

    run(2, None, groups=[dict(match="*", frozen=True), dict(match="norm.*", frozen=False)])
    ema, model = run(1, tmp_path)
    averages = ema.parameter_state()
    assert set(averages) == set(model.parameters())
    assert torch.equal(averages[model.blocks[0].mlp.up.weight]["average"], model.blocks[0].mlp.up.weight)
    assert not torch.equal(averages[model.norm.weight]["average"], model.norm.weight)


def test_running_statistics_are_measured_anew_as_torch_does() -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 2)).double()

    batches = list(torch.randn(5, 8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    settings = dict(train=dict(global_batch_size=8, precision="fp64"), device="cpu")
    engine = colossus.initialize(settings, model=net, loss_fn=lambda y, x: (y.square().sum(), len(x)))
    swa, twin = SWA(start=1), net()
    oracle = AveragedModel(twin)
    for x in batches:
        swa.on_step_end(engine, engine.train_step(x))
        twin.load_state_dict(full_state_dict(engine.model, engine.context))
        oracle.update_parameters(twin)
    with swa.averaged(engine), engine.context:
        for key, value in oracle.module.state_dict().items():
            torch.testing.assert_close(engine.model.state_dict()[key], value, rtol=0, atol=1e-12)
        update_bn(batches[:3], engine.model)
        update_bn(batches[:3], oracle)
        torch.testing.assert_close(engine.model.eval()(batches[4]), oracle.eval()(batches[4]), rtol=0, atol=1e-12)
    engine.close()


def updates(rank: int) -> list[list[str]]:
    """What waits in the updates of both hooks where steps may be skipped."""
    engine = colossus.initialize(config_of({}, STEPS, "fp16", device="cuda", model=dict(num_layers=1)))
    batch, found = batch_on_device(batch_of(0)), []
    ema, swa = EMA(decay=0.9, warmup=True), SWA(start=1)
    for _ in range(3):
        result = engine.train_step(batch)
        with Waits(allowed=True) as waits:
            ema.on_step_end(engine, result)
            swa.on_step_end(engine, result)
        found.append(waits.found)
    engine.close()
    return found


def test_no_update_waits_for_a_device() -> None:
    assert run_fake_ranks(1, updates) == [[[]] * 3]


class Counted(TorchDispatchMode):
    """Counts the operators of several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += "foreach" in func.name()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weight", [0.25, 1.0])
def test_a_device_moves_all_averages_in_few_kernels(weight: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averages, "_MOVED_BYTES", 1600)
    params = [nn.Parameter(torch.randn(100).to(dtype)) for dtype in (torch.float32, torch.bfloat16) * 6]
    moved = {param: torch.randn(100) for param in params}
    wanted = {param: average.lerp(param.detach().float(), weight) for param, average in moved.items()}
    with Counted() as counted, torch.no_grad():
        averages._move_on_device(moved, torch.tensor(weight, dtype=torch.float64))
    assert counted.number == 3 * 4  # four averages of 400 bytes at once
    for param, average in moved.items():
        torch.testing.assert_close(average, wanted[param], rtol=0, atol=0 if weight == 1 else 1e-6)


@pytest.mark.parametrize(
    ("hook", "words"),
    [
        (dict(type="EMA"), "hooks.0: .*needs decay .* or half_life .*got neither"),
        (dict(type="EMA", decay=0.9, half_life=3), "got both"),
        (dict(type="EMA", decay=1.5), r"hooks\.0\.decay: .*less than 1"),
        (dict(type="EMA", decay=0.9, evrey=2), r"hooks\.0\.evrey: .*every"),
        ("SWA", r"hooks\.0\.start"),
    ],
)
def test_options_are_checked_before_a_process_starts(hook: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(dict(hooks=[hook]))


def test_the_config_of_the_page_is_right() -> None:
    section = (ROOT / "docs" / "averages.md").read_text()
    values: dict[str, Any] = {"train": {"eval_every": 100}}
    exec(section.split("```python\n")[1].split("```")[0], {}, values)
    config = load_config(values)
    for hook in config.hooks:
        options = HOOKS.build(hook.spec()).options
        assert options.problems(config) == []


def test_replicas_with_weights_of_their_own_are_refused() -> None:
    def problems(data: int, strategy: Any) -> list[str]:
        config = load_config(dict(parallel=dict(data=data, strategy=strategy)))
        return EMAOptions(decay=0.9, evaluate=True).problems(config)

    refused, unasked = problems(2, "local_sgd")
    assert refused.startswith("cannot average under local_sgd: each replica has weights of its own there")
    assert "train.eval_every = 0" in unasked
    assert problems(2, "hierarchical") == [unasked]
    assert "or servers have them" in problems(2, dict(type="server", servers=1))[0]
