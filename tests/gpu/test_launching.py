"""Runs that are started, that hang and that run out of memory: torch and CUDA say what colossus reads.

With one rank NCCL has nobody to wait for, so a collective is queued behind a kernel that takes longer than the
time-out: its watchdog sees a collective that does not end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.device_ranks import DeviceRanks, Devices
from helpers.launching import failed_ranks
from torch import distributed as dist
from torch.distributed.flight_recorder.components.loader import read_dump

from colossus.comm import flight_recorder
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.doctor.devices import examine_devices
from colossus.launch import rank_failure, recordings
from colossus.launch.advice import is_out_of_memory
from colossus.launch.rank_failure import RankRun
from colossus.launch.stop import StopSignals

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 3.0
CONFIG = """
import os, time, torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.calls = torch.nn.Linear(4, 2), 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3 and os.environ["RANK"] == os.environ.get("HANGS"):
            time.sleep(600.0)
        return self.layer(x)
    def loss(self, out, batch):
        return out.square().sum(), len(batch)
class Numbers(torch.utils.data.Dataset):
    def __init__(self, split="train"):
        self.values = torch.randn(64, 4, generator=torch.Generator().manual_seed(len(split)))
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return self.values[index]
model, data = dict(type=Net), dict(type=Numbers)
optimizer = dict(type="SGD", lr=0.1)
train = dict(steps=5, global_batch_size=8, log_every=2)
"""


def launch(folder: Path, *arguments: str, **environ: str) -> tuple[int, str]:
    """Return exit code and output of ``colossus launch``."""
    (folder / "job.py").write_text(CONFIG)
    command = [sys.executable, "-m", "colossus", "launch", "job.py", "--run-dir", "run", *arguments]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environ}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False, timeout=200)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("world", [1, 2])
def test_a_launched_run(device: torch.device, ranks: DeviceRanks, tmp_path: Path, world: int) -> None:
    backend = [f"comm.backend={ranks.backend(world)}"] if world > 1 else []
    code, text = launch(tmp_path, f"parallel.data={world}", f"device={device.type}", *backend)
    assert code == 0, text
    assert f"{world} {'process' if world == 1 else 'processes'} on {device.type}" in text, text
    assert "done: 5 steps" in text, text


def test_more_ranks_than_devices_are_refused(cuda: torch.device, devices: Devices, tmp_path: Path) -> None:
    if devices.count > 7:
        pytest.skip(f"{devices.count} devices: as many as the batch has samples")
    code, text = launch(tmp_path, "parallel.data=8")
    assert code == 2, text
    assert f"device: 8 processes on this machine, but {devices.count} CUDA device" in text, text


def test_doctor_reads_the_devices(cuda: torch.device, ranks: DeviceRanks, figures: Callable[[Any], None]) -> None:
    report = ranks.run_one(examine)
    first = report["devices"][0]
    assert 0 < first["free_bytes"] <= first["memory_bytes"], first
    assert all(report[key] for key in ("driver", "nccl", "cuda")), report
    figures({"driver": report["driver"], "NCCL": report["nccl"]})


def examine(rank: int, device: torch.device) -> dict[str, Any]:
    return examine_devices()


def join(device: torch.device) -> None:
    torch.cuda.set_device(device)
    limit = timedelta(seconds=TIMEOUT_SECONDS)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit, device_id=device)
    dist.all_reduce(torch.ones(3, 5, device=device))
    torch.cuda.synchronize()


def sleep_and_reduce(device: torch.device, seconds: float) -> torch.Tensor:
    """Start a collective that cannot begin before a kernel of about this long has ended."""
    x = torch.ones(7, device=device)
    for _ in range(max(1, round(seconds * 4))):
        torch.cuda._sleep(500_000_000)  # about a quarter of a second at 2 GHz
    dist.all_reduce(x, async_op=True)
    return x


def test_the_flight_recorder_of_one_rank(cuda: torch.device, ranks: DeviceRanks, tmp_path: Path) -> None:
    ranks.run_one(record, tmp_path)


def record(rank: int, device: torch.device, folder: Path) -> None:
    join(device)
    assert flight_recorder.is_recording()
    assert flight_recorder.failed_group() is None
    time.sleep(0.5)  # the watchdog looks ten times a second
    assert not flight_recorder.has_pending()
    sleep_and_reduce(device, 1.0)
    assert flight_recorder.has_pending()
    path = recordings.recording_of(folder, 0)
    flight_recorder.write(path)
    entries = read_dump(recordings.RECORDING, str(path))["entries"]
    assert [entry["input_sizes"] for entry in entries] == [[[3, 5]], [[7]]], entries
    assert [entry["state"] == "completed" for entry in entries] == [True, False], entries
    torch.cuda.synchronize()
    time.sleep(0.5)
    assert not flight_recorder.has_pending()
    dist.destroy_process_group()


def test_out_of_memory_in_torchs_words(cuda: torch.device, ranks: DeviceRanks) -> None:
    messages = ranks.run_one(exhaust_memory)
    assert is_out_of_memory(messages), messages
    assert re.search(r"[\d.]+ [KMG]iB is allocated by PyTorch", messages[0]), messages
    assert re.search(r"[\d.]+ [\w]+ is reserved by PyTorch but unallocated", messages[0]), messages


def exhaust_memory(rank: int, device: torch.device) -> list[str]:
    torch.empty(2**20, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    try:
        torch.empty(2 * free, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        return list(rank_failure.messages_of(error))
    return ["nothing was raised"]


def test_a_collective_that_does_not_end(cuda: torch.device, figures: Callable[[Any], None], tmp_path: Path) -> None:
    """The main thread waits for the device: the watcher writes the record and ends the process before NCCL does."""
    begin, codes = time.monotonic(), {}
    try:
        run_local_ranks(1, lambda rank: wait_for_ever(cuda, tmp_path))
    except RanksFailed as error:
        codes = error.exit_codes
    assert codes == {0: 1}, f"the process ended with {codes}, and should have given up the collective"
    (failure,) = failed_ranks(tmp_path)
    assert (failure.kind, failure.is_timeout) == ("communication", True), failure
    assert "wait_for_ever" in failure.traceback, failure.traceback
    dump = read_dump(recordings.RECORDING, str(recordings.recording_of(tmp_path, 0)))
    assert not all(entry["state"] == "completed" for entry in dump["entries"]), dump
    figures({"seconds to the report": time.monotonic() - begin - TIMEOUT_SECONDS})


def wait_for_ever(device: torch.device, folder: Path) -> None:
    join(device)
    run = RankRun(0, StopSignals(), has_launcher=False, folder=folder, step=3)
    rank_failure.watch_nccl(run, TIMEOUT_SECONDS)
    sleep_and_reduce(device, TIMEOUT_SECONDS + 20.0).sum().item()


def test_a_rank_that_hangs_is_named(device: torch.device, devices: Devices, tmp_path: Path) -> None:
    if devices.count == 1:
        pytest.skip("two ranks of NCCL need two devices")
    limit = f"comm.timeout_seconds={TIMEOUT_SECONDS:g}"
    code, text = launch(tmp_path, "parallel.data=2", f"device={device.type}", limit, HANGS="1")
    assert code == 1, text
    assert "run failed: rank 1 at step 3" in text, text
    assert "time.sleep(600.0)" in text, text
    assert re.search(r"rank 0 waits in #\d+ all_reduce .*; rank 1 did not come to it", text), text
    if device.type == "cuda":
        assert "torch has recorded more" in text, text
