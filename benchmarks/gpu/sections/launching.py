"""Runs that are started, that hang and that run out of memory: what is read of torch and CUDA is as colossus expects.

With one rank NCCL has nobody to wait for, so a collective is queued behind a kernel that takes longer than the
time-out: its watchdog sees one that does not end.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist
from torch.distributed.flight_recorder.components.loader import read_dump

from benchmarks.gpu.ranks import count_devices
from benchmarks.gpu.section import Case, Figures, LeftOut
from colossus.comm import flight_recorder
from colossus.context.local_ranks import RanksFailed, run_local_ranks
from colossus.doctor.devices import examine_devices
from colossus.launch import failures, rank_failure
from colossus.launch.advice import is_out_of_memory
from colossus.launch.rank_failure import RankRun
from colossus.launch.stop import StopSignals

_TIMEOUT_SECONDS = 3.0
_CONFIG = """
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


def cases(device: torch.device, budget: float) -> Iterator[Case]:
    yield Case("a run of one process", lambda: _run(device, 1), seconds=60)
    yield Case("two ranks on one device", lambda: _run(device, 2, "comm.backend=gloo"), seconds=60)
    yield Case("more ranks than devices are refused", lambda: _too_many(device), seconds=60)
    for name, body in (
        ("what doctor reads", _doctor),
        ("the flight recorder, one rank", _recorded),
        ("out of memory, in torch's words", _out_of_memory),
    ):
        yield Case(name, lambda body=body: _in_a_process(device, body), seconds=40)  # type: ignore[misc]
    yield Case("a collective that does not end, one rank", lambda: _does_not_end(device), seconds=60)
    yield Case("a rank that hangs under NCCL is named", lambda: _hangs(device), seconds=120)


def _in_a_process(device: torch.device, body: Callable[[torch.device], Figures]) -> Figures:
    if device.type != "cuda":
        raise LeftOut("no CUDA device")
    figures: Figures = run_local_ranks(1, lambda rank: body(device))[0]
    return figures


def _doctor(device: torch.device) -> Figures:
    found = examine_devices()
    first = found["devices"][0]
    assert 0 < first["free_bytes"] <= first["memory_bytes"], first
    assert all(found[key] for key in ("driver", "nccl", "cuda")), found
    return {"driver": found["driver"], "NCCL": found["nccl"], "apart": str(found["apart"])}


def _join(device: torch.device) -> None:
    torch.cuda.set_device(device)
    limit = timedelta(seconds=_TIMEOUT_SECONDS)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=limit, device_id=device)
    dist.all_reduce(torch.ones(3, 5, device=device))
    torch.cuda.synchronize()


def _sleep_and_reduce(device: torch.device, seconds: float) -> torch.Tensor:
    """A collective that cannot begin before a kernel of about this long has ended."""
    x = torch.ones(7, device=device)
    for _ in range(max(1, round(seconds * 4))):
        torch.cuda._sleep(500_000_000)  # about a quarter of a second at 2 GHz
    dist.all_reduce(x, async_op=True)
    return x


def _recorded(device: torch.device) -> Figures:
    _join(device)
    assert flight_recorder.is_recording()
    assert flight_recorder.failed_group() is None
    time.sleep(0.5)  # the watchdog looks ten times a second
    assert not flight_recorder.has_pending()
    _sleep_and_reduce(device, 1.0)
    assert flight_recorder.has_pending()
    with tempfile.TemporaryDirectory() as folder:
        path = failures.recording_of(Path(folder), 0)
        flight_recorder.write(path)
        dump = read_dump(failures.RECORDING, str(path))
    entries = dump["entries"]
    assert [each["input_sizes"] for each in entries] == [[[3, 5]], [[7]]], entries
    assert [each["state"] == "completed" for each in entries] == [True, False], entries
    torch.cuda.synchronize()
    time.sleep(0.5)
    assert not flight_recorder.has_pending()
    return {"format": dump["version"], "collectives": len(entries)}


def _out_of_memory(device: torch.device) -> Figures:
    held = torch.empty(2**20, device=device)
    free, _ = torch.cuda.mem_get_info(device)
    try:
        torch.empty(2 * free, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        messages = failures.messages_of(error)
    assert is_out_of_memory(messages), messages
    assert re.search(r"[\d.]+ [KMG]iB is allocated by PyTorch", messages[0]), messages
    assert re.search(r"[\d.]+ [\w]+ is reserved by PyTorch but unallocated", messages[0]), messages
    return {"error": messages[0].partition(":")[0], "held": held.nbytes}


def _lost(device: torch.device, folder: Path) -> None:
    _join(device)
    run = RankRun(0, StopSignals(), folder=folder, step=3)
    rank_failure.watch_nccl(run, _TIMEOUT_SECONDS)
    _sleep_and_reduce(device, _TIMEOUT_SECONDS + 20.0).sum().item()


def _does_not_end(device: torch.device) -> Figures:
    """The main thread waits for the device: the watcher writes the record, and ends the process before NCCL does."""
    if device.type != "cuda":
        raise LeftOut("no CUDA device")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder, codes = Path(name), {}
        try:
            run_local_ranks(1, lambda rank: _lost(device, folder))
        except RanksFailed as error:
            codes = error.exit_codes
        assert codes == {0: 1}, f"the process ended with {codes}, and should have given up the collective"
        (record,) = failures.read_all(folder)
        assert (record.kind, record.is_timeout) == ("communication", True), record
        assert "_lost" in record.traceback, record.traceback
        dump = read_dump(failures.RECORDING, str(failures.recording_of(folder, 0)))
        assert not all(entry["state"] == "completed" for entry in dump["entries"]), dump
    return {"seconds to the report": time.monotonic() - begin - _TIMEOUT_SECONDS}


def _launch(*arguments: str, **environ: str) -> tuple[int, str]:
    root = str(Path(__file__).resolve().parents[3])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.py").write_text(_CONFIG)
        command = [sys.executable, "-m", "colossus", "launch", "job.py", "--run-dir", "run", *arguments]
        kept = {**os.environ, "PYTHONPATH": root, **environ}
        done = subprocess.run(command, cwd=folder, env=kept, capture_output=True, text=True, check=False)
    print(done.stdout, done.stderr, sep="\n")
    return done.returncode, done.stdout + done.stderr


def _run(device: torch.device, ranks: int, *overrides: str) -> None:
    code, text = _launch(f"parallel.data={ranks}", f"device={device.type}", *overrides)
    assert code == 0, text
    assert f"{ranks} process(es) on {device.type}" in text, text
    assert "done: 5 steps" in text, text


def _too_many(device: torch.device) -> None:
    count = count_devices()
    if device.type != "cuda" or count > 7:
        raise LeftOut(
            "no CUDA device" if device.type != "cuda" else f"{count} devices: as many as the batch has samples"
        )
    code, text = _launch("parallel.data=8")
    assert code == 2, text
    assert f"device: 8 processes on this machine, but {count} CUDA device" in text, text


def _hangs(device: torch.device) -> None:
    if count_devices() < 2:
        raise LeftOut("two ranks of NCCL want two devices")
    code, text = _launch("parallel.data=2", f"comm.timeout_seconds={_TIMEOUT_SECONDS:g}", HANGS="1")
    assert code == 1, text
    assert "run failed: rank 1 at step 3" in text, text
    assert "time.sleep(600.0)" in text, text
    assert re.search(r"rank 0 waits in #\d+ all_reduce .*; rank 1 has not come to it", text), text
    assert "torch has recorded more" in text, text
