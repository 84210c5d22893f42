"""What the machine has, and whether it computes: where this fails, the other sections say nothing of colossus."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.section import Case, Figures, LeftOut


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    yield Case("what there is", lambda: _describe(device))
    yield Case("a product, forward and backward", lambda: _product(device))


def _describe(device: torch.device) -> Figures:
    if device.type != "cuda":
        raise LeftOut("no CUDA device: the cases below were run on the CPU, as far as they can be")
    found = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return {
        "name": found.name,
        "devices": torch.cuda.device_count(),
        "capability": f"{found.major}.{found.minor}",
        "GiB free": free / 2**30,
        "GiB": total / 2**30,
        "torch": torch.__version__,
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def _product(device: torch.device) -> Figures:
    """Integers, so that every dtype is exact."""
    x = torch.arange(12.0, dtype=torch.float64).view(3, 4)
    w = torch.arange(20.0, dtype=torch.float64).view(5, 4)
    wanted = x @ w.T, torch.ones(3, 5, dtype=torch.float64) @ w
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        there = x.to(device, dtype, copy=True).requires_grad_()
        y = there @ w.to(device, dtype).T
        y.backward(torch.ones_like(y))
        assert there.grad is not None
        for what, found, whole in (("y", y, wanted[0]), ("dx", there.grad, wanted[1])):
            exact = whole.to(dtype).double()
            assert torch.equal(found.detach().cpu().double(), exact), f"{what} in {dtype} is {found}, not {exact}"
    return {"dtypes": 4}
