"""A training step of a GPT in one process beside the loop of bare torch: the same losses first, then time and memory.

Both clip, both have torch's fused AdamW, nobody reads a loss while the clock runs. A row says ms of both, the ratio
(its median over blocks in which both take turns, and the quartiles), tokens per second, the share of the device's peak
that is reached (MFU, ``n/a`` where the peak is not known) and the most memory of tensors, weights and optimizer
included.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.cases import LOW_TOLERANCE, TOLERANCE
from benchmarks.common import Spread, ratio
from benchmarks.gpu.section import Case, Figures, LeftOut
from benchmarks.peers.ours import ColossusCase
from benchmarks.peers.plain import PlainCase
from benchmarks.timing import PeakOnDevice, compare
from benchmarks.workload import State, Workload
from colossus.monitor.mfu import device_peak

#: on a GPU, and where it has less memory than `ROOMY`
LARGE = Workload(hidden=2048, layers=8, heads=16, tokens=1024, batch=16, vocab=32768)
MIDDLE = Workload(hidden=768, layers=8, heads=12, tokens=512, batch=8, vocab=32768)
#: whose step is over before a host that is slow has told the device about the next
SMALL = Workload(hidden=256, layers=4, heads=4, tokens=64, batch=8, vocab=512)
ON_CPU = Workload(hidden=64, layers=2, heads=4, tokens=32, batch=4, vocab=128)
ROOMY = 60 << 30
CHECKED_STEPS = 4
#: a step of ours that takes longer than that over bare torch's on a GPU is a failure; compiled and small ones are
#: only told
SLOWEST = 1.25


@dataclass(frozen=True)
class Variant:
    """How both are run.

    Attributes:
        precision: ``train.precision`` of ours; the plain loop's autocast.
        compiled: each block on its own, by `torch.nn.Module.compile`.
    """

    name: str
    precision: str = "fp32"
    tf32: bool = False
    compiled: bool = False
    small: bool = False

    @property
    def tolerance(self) -> float:
        """Of losses and norms: numbers of bf16 and of tf32 are 2^-8 and 2^-11 apart."""
        return TOLERANCE if self.precision == "fp32" and not self.tf32 else LOW_TOLERANCE


VARIANTS = (
    Variant("fp32"),
    Variant("tf32", tf32=True),
    Variant("bf16", "bf16"),
    Variant("fp32, small: the host's time", small=True),
    Variant("bf16, small: the host's time", "bf16", small=True),
    Variant("bf16, compiled blocks", "bf16", compiled=True),  # to compile takes longest
    Variant("tf32, compiled blocks", tf32=True, compiled=True),
)


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    states: dict[Workload, State] = {}
    share = budget / len(VARIANTS)
    for variant in VARIANTS:
        yield Case(variant.name, partial(_run, variant, device, states, share / 4), seconds=max(4 * share, 120))


def workload_for(device: torch.device, variant: Variant) -> Workload:
    """The size that suits the device. Its first use starts the device."""
    if device.type != "cuda":
        return ON_CPU
    if variant.small:
        return replace(SMALL, device="cuda")
    total = torch.cuda.get_device_properties(device).total_memory
    return replace(LARGE if total >= ROOMY else MIDDLE, device="cuda")


def require(variant: Variant, device: torch.device) -> None:
    """
    Raises:
        LeftOut: what a variant needs is not there.
    """
    on_cuda = device.type == "cuda"
    if variant.small and not on_cuda:
        raise LeftOut("no CUDA device: on the CPU host and device are one")
    if variant.tf32 and not (on_cuda and torch.cuda.get_device_capability(device) >= (8, 0)):
        raise LeftOut("tf32 is of CUDA devices of capability 8.0 and more")
    if variant.precision == "bf16" and on_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise LeftOut("this device has no bf16")
    if variant.compiled and not on_cuda:
        raise LeftOut("no CUDA device: to compile for the CPU takes minutes, and says nothing of a GPU")
    if variant.compiled and importlib.util.find_spec("triton") is None:
        raise LeftOut("torch.compile wants triton, which is not installed")
    if variant.compiled and not (os.environ.get("CC") or any(map(shutil.which, ("clang", "gcc")))):
        raise LeftOut("torch.compile wants a C compiler for what triton launches its kernels with: gcc, clang or $CC")
    if variant.compiled and not (headers := Path(sysconfig.get_path("include"))).joinpath("Python.h").exists():
        raise LeftOut(f"torch.compile wants Python.h for what triton launches its kernels with; {headers} has none")


@contextmanager
def float32_products(tf32: bool) -> Iterator[None]:
    """In TensorFloat-32, or whole."""
    usual = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(usual)


@contextmanager
def compiling() -> Iterator[None]:
    """With nothing compiled before. What torch would give up to compile, and run as it is, fails."""
    dynamo: Any = importlib.import_module("torch._dynamo")
    dynamo.reset()
    with dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield
    dynamo.reset()


def weights_of(workload: Workload, device: torch.device, states: dict[Workload, State]) -> State:
    """The initial weights, drawn once for the variants of a size. They stay on the device, where no case counts them:
    what it takes is counted on top of what is there."""
    if workload not in states:
        states[workload] = workload.state(device)
    return states[workload]


def _run(variant: Variant, device: torch.device, states: dict[Workload, State], seconds: float) -> Figures:
    require(variant, device)
    workload = workload_for(device, variant)
    state, low = weights_of(workload, device, states), variant.precision == "bf16"
    with ExitStack() as stack:
        if device.type == "cuda":
            stack.enter_context(float32_products(variant.tf32))
        if variant.compiled:
            stack.enter_context(compiling())
        with PeakOnDevice(device) as plain_peak:
            plain = PlainCase(workload, 0, 1, low=low, state=state)
            _compile(variant, plain.model)
            wanted = [plain.step(index) for index in range(CHECKED_STEPS)]
        with PeakOnDevice(device) as peak:
            ours = ColossusCase(workload, 0, 1, precision=variant.precision, state=state)
            stack.enter_context(closing(ours.engine))
            with torch.no_grad():  # what layers note at their first call would be a graph of its own
                ours.engine.model(ours.batches[0]["inputs"][:1])
            _compile(variant, ours.engine.model)
            found = [ours.step(index) for index in range(CHECKED_STEPS)]
        check(found, wanted, variant.tolerance)
        series = compare({"colossus": partial(ours.run, 0), "torch": partial(plain.run, 0)}, device, seconds)
        flops_per_second = device_peak(device, variant.precision)
    times = {name: Spread.of(taken).median for name, taken in series.items()}
    over_torch = ratio(series, "colossus", "torch")
    figures: dict[str, Any] = {
        "ms": times["colossus"] * 1e3,
        "ms of torch": times["torch"] * 1e3,
        "time / torch": over_torch.median,
        "quartiles": f"{over_torch.low:.3f}-{over_torch.high:.3f}",
        "tokens/s": workload.batch * workload.tokens / times["colossus"],
        "MFU": _utilisation(workload, times["colossus"], flops_per_second),
        "MFU of torch": _utilisation(workload, times["torch"], flops_per_second),
        "GiB at most": _gib(peak),
        "GiB of torch": _gib(plain_peak),
        "hidden x layers": f"{workload.hidden} x {workload.layers}",
    }
    require_plausible(figures, judged=device.type == "cuda" and not variant.compiled and not variant.small)
    return figures


def _compile(variant: Variant, model: nn.Module) -> None:
    if variant.compiled:
        blocks: Any = model.blocks
        for block in blocks:
            block.compile()


def check(found: list[tuple[float, float]], wanted: list[tuple[float, float]], tolerance: float) -> None:
    """
    Raises:
        AssertionError: with the first step whose loss or gradient norm is not that of bare torch.
    """
    for step, (ours, torchs) in enumerate(zip(found, wanted, strict=True), 1):
        for what, a, b in zip(("loss", "gradient norm"), ours, torchs, strict=True):
            if not abs(a - b) <= tolerance * max(1.0, abs(b)):
                raise AssertionError(f"{what} {a:.6f} at step {step}, but bare torch has {b:.6f}")


def require_plausible(figures: dict[str, Any], *, judged: bool) -> None:
    """
    Raises:
        AssertionError: a device does more than it can, or, where times are ``judged``, ours are too slow.
    """
    told = ", ".join(f"{name} {value}" for name, value in figures.items())
    for name in ("MFU", "MFU of torch"):
        if figures[name] is not None and not 0 < figures[name] < 1:
            raise AssertionError(f"{name} is {figures[name]:.3g}: the peak or the clock is wrong ({told})")
    if judged and figures["time / torch"] > SLOWEST:
        raise AssertionError(f"a step takes {figures['time / torch']:.2f} times as long as bare torch's ({told})")


def _utilisation(workload: Workload, seconds: float, peak: float | None) -> float | None:
    return None if peak is None else workload.flops / seconds / peak


def _gib(peak: PeakOnDevice) -> float | None:
    return None if peak.bytes is None else peak.bytes / 2**30
