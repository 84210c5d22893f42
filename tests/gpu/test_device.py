"""The devices of the machine compute: where this fails, the other tests say nothing about colossus."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from helpers.device_ranks import DeviceRanks


def test_the_device_is_described(cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None]) -> None:
    figures(ranks.run_one(describe))


def describe(rank: int, device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": properties.name,
        "devices": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "GiB free": free / 2**30,
        "GiB": total / 2**30,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def test_a_product_is_exact(ranks: DeviceRanks) -> None:
    ranks.run_one(multiply)


def multiply(rank: int, device: torch.device) -> None:
    """Multiply integers, forward and backward: every dtype is exact."""
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    w = torch.arange(20.0, dtype=torch.float64).view(5, 4)
    expected = x @ w.T, torch.ones(3, 5, dtype=torch.float64) @ w
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        mine = x.to(device, dtype, copy=True).requires_grad_()
        y = mine @ w.to(device, dtype).T
        y.backward(torch.ones_like(y))
        assert mine.grad is not None
        for name, value, whole in (("y", y, expected[0]), ("dx", mine.grad, expected[1])):
            exact = whole.to(dtype).double()
            assert torch.equal(value.detach().cpu().double(), exact), f"{name} in {dtype} is {value}, not {exact}"
