"""Short training runs of ranks on the device, beside the same run of one process on the CPU, in float64."""

from __future__ import annotations

from typing import Any

import torch
from helpers.training import Trace, assert_same_numbers, assert_same_run, config_of, relative, train

from benchmarks.gpu.ranks import RankPool

STEPS, BATCH = 3, 24
MODEL: dict[str, Any] = dict(num_layers=4, seq_len=16)
FP64 = dict(loss=1e-10, norm=1e-10, parameter=1e-9)
FP32 = dict(loss=1e-6, norm=1e-5, parameter=1e-4)


def run_of(
    parallel: dict[str, Any], device: torch.device, backend: str = "gloo", precision: str = "fp64", **more: Any
) -> dict[str, Any]:
    """The config of a run on the device; on CUDA its ranks share one under gloo."""
    comm = {"backend": backend, **more.pop("comm", {})} if device.type == "cuda" else more.pop("comm", {})
    model = {**MODEL, **more.pop("model", {})}
    training = {"global_batch_size": BATCH, **more.pop("train", {})}
    return config_of(
        parallel, STEPS, precision, model=model, train=training, comm=comm, device=device.type, **more
    )  # fmt: skip


class References:
    """Runs of one process on the CPU, each made once."""

    def __init__(self) -> None:
        self._pool = RankPool(torch.device("cpu"))
        self._made: dict[str, Trace] = {}

    def get(self, precision: str = "fp64", **more: Any) -> Trace:
        """Without what a plan says: data of one rank, one microbatch."""
        key = repr((precision, more))
        if key not in self._made:
            config = run_of({}, torch.device("cpu"), precision=precision, **more)
            self._made[key] = self._pool.run(1, traced, config)[0]
        return self._made[key]

    def close(self) -> None:
        self._pool.close()


def traced(rank: int, device: torch.device, config: dict[str, Any]) -> Trace:
    """Body of a rank."""
    return train(rank, config, STEPS)


def compare(traces: list[Trace], reference: Trace, precision: str = "fp64") -> dict[str, float]:
    """The largest gaps of losses and of norms, relative.

    Raises:
        AssertionError: as `assert_same_run`; in float64 of any element of any gradient and weight, too.
    """
    for rank, trace in enumerate(traces):
        assert trace.losses == traces[0].losses, f"rank {rank} reports losses {trace.losses}, rank 0 {traces[0].losses}"
        assert_same_run(trace, reference, **(FP64 if precision == "fp64" else FP32))
        if precision == "fp64":
            assert_same_numbers(trace, reference)
    return {
        "loss gap": max(map(relative, traces[0].losses, reference.losses)),
        "norm gap": max(map(relative, traces[0].norms, reference.norms)),
    }
