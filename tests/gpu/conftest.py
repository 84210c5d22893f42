"""Tests of real devices: ``scripts/test-gpu``, or ``pytest tests/gpu --device cpu`` for what runs without a GPU.

The process of the tests never uses a device. Every test hands a body to ranks (`helpers.device_ranks`), so a crash or a
hang costs one test. The oracle is plain torch in one process on the same device, unless a test says otherwise.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks, Devices, find_devices, forget_launcher

FOLDER = Path(__file__).parent
#: what the other files rely on comes first, what takes long comes last; files that are not named are in between
FIRST, LAST = ("test_device", "test_layers", "test_staging"), ("test_plans", "test_modes", "test_launching")
NOT_ASKED = "real devices are tested by scripts/test-gpu; pytest tests/gpu --device cpu runs what needs none"


class Run:
    """A run of these tests on a device: what it found, its deadline, and its report.

    The report ``gpu.jsonl`` has a first line about the machine and a line for each test, written when the test ends:
    it is complete up to there whatever ends the run.

    Attributes:
        device: the device of the tests.
        devices: the CUDA devices of the machine, none with ``--device cpu``.
    """

    def __init__(self, config: pytest.Config) -> None:
        os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # asking for devices then does not use them
        forget_launcher()
        option = config.getoption("device")
        self.devices = Devices() if option == "cpu" else find_devices()
        if option == "cuda" and not self.devices.count:
            raise pytest.UsageError("--device cuda: torch finds no CUDA device")
        self.device = torch.device("cuda:0" if self.devices.count else "cpu")
        self.budget: float = config.getoption("budget")
        self.ends = time.monotonic() + self.budget
        folder = config.getoption("report") or os.environ.get("OUT") or tempfile.mkdtemp(prefix="colossus-test-gpu-")
        self.file = Path(folder) / "gpu.jsonl"
        self.file.parent.mkdir(parents=True, exist_ok=True)
        about = {"device": str(self.device), "name": self.devices.name, "devices": self.devices.count}
        self.file.write_text(json.dumps({**about, "torch": torch.__version__, "cuda": torch.version.cuda}) + "\n")
        self.figures: dict[str, str] = {}

    def pytest_report_header(self) -> str:
        return f"device {self.device} ({self.devices.name}), report in {self.file}"

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.outcome == "passed":
            return
        row = {"test": report.nodeid, "outcome": report.outcome, "seconds": round(report.duration, 2)}
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext
        figures = {name: value for name, value in report.user_properties if isinstance(value, int | float | str)}
        self.figures[report.nodeid] = ", ".join(f"{name} {_shortened(value)}" for name, value in figures.items())
        with self.file.open("a") as file:
            file.write(json.dumps({**row, "figures": figures, "reason": reason}, default=str) + "\n")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test, text in self.figures.items():
            if text:
                terminalreporter.write_line(f"{test.rpartition('/')[2]}: {text}")
        if self.device.type == "cpu":
            terminalreporter.write_line("nothing of this was run on a GPU")
        terminalreporter.write_line(f"written to {self.file}")


def _shortened(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else str(value)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("device") is not None:
        config.pluginmanager.register(Run(config), "run on a device")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    own = [item for item in items if FOLDER in item.path.parents]
    own.sort(
        key=lambda item: (item.path.stem not in FIRST, LAST.index(item.path.stem) if item.path.stem in LAST else -1)
    )
    items[:] = [item for item in items if item not in own] + own


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    run: Run | None = item.config.pluginmanager.get_plugin("run on a device")
    if run is None:
        pytest.skip(NOT_ASKED)
    if time.monotonic() > run.ends:
        pytest.skip(f"no time is left of {run.budget:g} s: give more with --budget")


@pytest.fixture(scope="session")
def devices(pytestconfig: pytest.Config) -> Devices:
    """Return the CUDA devices of the machine."""
    return pytestconfig.pluginmanager.get_plugin("run on a device").devices  # type: ignore[union-attr]


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """Return the device of the tests."""
    return pytestconfig.pluginmanager.get_plugin("run on a device").device  # type: ignore[union-attr]


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """Return the device, and skip the test where that is the CPU."""
    if device.type != "cuda":
        pytest.skip("no CUDA device")
    return device


@pytest.fixture(scope="module")
def ranks(device: torch.device, devices: Devices) -> Iterator[DeviceRanks]:
    """Yield the ranks of a file's tests."""
    pools = DeviceRanks(device, devices.count)
    yield pools
    pools.close()


@pytest.fixture(scope="module")
def host_ranks() -> Iterator[DeviceRanks]:
    """Yield ranks on the CPU, for tests that compare two devices."""
    pools = DeviceRanks(torch.device("cpu"))
    yield pools
    pools.close()


@pytest.fixture
def figures(record_property: Callable[[str, object], None]) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that puts numbers into the report."""

    def record(numbers: Mapping[str, Any]) -> None:
        for name, value in numbers.items():
            record_property(name, value)

    return record
