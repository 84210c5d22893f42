"""Training runs on a device, and the same run by plain torch in one process on that device."""

from __future__ import annotations

from typing import Any

import torch
from helpers.device_ranks import DeviceRanks
from helpers.training import Trace, assert_same_numbers, assert_same_run, batch_of, config_of, relative, train
from helpers.twins import PlainGPT
from torch import nn

STEPS, BATCH = 3, 24
MODEL: dict[str, Any] = dict(num_layers=4, seq_len=16)
FP64 = dict(loss=1e-10, norm=1e-10, parameter=1e-9)


def run_config(ranks: DeviceRanks, world: int, parallel: dict[str, Any], **more: Any) -> dict[str, Any]:
    """Return the config of a run in float64 whose ranks share the device, or have one each."""
    comm = {**ranks.comm(world), **more.pop("comm", {})}
    model = {**MODEL, **more.pop("model", {})}
    training = {"global_batch_size": BATCH, **more.pop("train", {})}
    return config_of(
        parallel, STEPS, "fp64", model=model, train=training, comm=comm, device=ranks.device.type, **more
    )  # fmt: skip


def train_ours(rank: int, device: torch.device, config: dict[str, Any], steps: int = STEPS) -> Trace:
    """Return what `helpers.training.train` records of a rank (a body of `DeviceRanks`)."""
    return train(rank, config, steps)


def make_twin(model: dict[str, Any], device: torch.device, dtype: torch.dtype) -> nn.Module:
    with torch.device(device):
        return PlainGPT(**{name: value for name, value in model.items() if name != "type"}).to(dtype)


def train_plain(
    rank: int,
    device: torch.device,
    config: dict[str, Any],
    dtype: torch.dtype = torch.float64,
    steps: int = STEPS,
    cycle: int | None = None,
) -> Trace:
    """Return the trace of plain torch's modules and loop on the device, from the first weights of the config's run.

    The learning rate is warmed up, if at all, for more steps than there are.

    Args:
        cycle: number of batches that take turns; None: each step has its own.
    """
    start = train(0, config, 0).start
    twin = make_twin(config["model"], device, dtype)
    twin.load_state_dict({name: value.to(dtype) for name, value in start.items()})
    parameters = dict(twin.named_parameters())
    options = dict(config["optimizer"])
    optimizer = getattr(torch.optim, options.pop("type"))(parameters.values(), **options)
    warmup = config["lr_schedule"]["warmup_steps"]
    trace = Trace()
    trace.start = start
    for step in range(steps):
        batch = batch_of(step % cycle if cycle else step, config["model"], config["train"]["global_batch_size"])
        with torch.device(device):
            total, count = twin.loss_sum(*(batch[key].to(device) for key in ("inputs", "labels")))
        optimizer.zero_grad()
        (total / count).backward()
        norm = nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        trace.losses.append((total / count).item())
        trace.norms.append(norm.item())
        if step in (0, steps - 1):
            trace.gradients.append({name: parameter.grad.clone() for name, parameter in parameters.items()})
        for group in optimizer.param_groups:
            group["lr"] = options["lr"] * ((step + 1) / warmup if warmup else 1.0)
        optimizer.step()
    trace.end = {name: value for name, value in twin.state_dict().items() if name in start}
    return trace


def compare_traces(traces: list[Trace], expected: Trace) -> dict[str, float]:
    """Return the largest relative gaps of losses and of norms.

    Raises:
        AssertionError: a loss, a norm, or an element of a gradient or of a weight differs.
    """
    for rank, trace in enumerate(traces):
        assert trace.losses == traces[0].losses, f"rank {rank} reports losses {trace.losses}, rank 0 {traces[0].losses}"
        assert_same_run(trace, expected, **FP64)
        assert_same_numbers(trace, expected)
    return {
        "loss gap": max(map(relative, traces[0].losses, expected.losses)),
        "norm gap": max(map(relative, traces[0].norms, expected.norms)),
    }
