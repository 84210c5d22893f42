"""``colossus doctor``: what it measures, what it prints of devices and the environment, and what it advises."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colossus.doctor import devices, environment, network
from colossus.doctor import examine as doctor
from colossus.doctor.devices import advise_devices, device_rows, examine_devices

GB = 10**9


def test_it_measures_between_ranks(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LARGE_BYTES", 1024 * 1024)
    measured: list[dict[str, float]] = []
    measure = network.measure
    monkeypatch.setattr(
        network, "measure", lambda *arguments, **more: measured.append(measure(*arguments, **more)) or measured[0]
    )
    assert doctor.run(nproc=2) == 0
    (between,) = measured
    assert all(value > 0 for value in between.values())
    moved = between["all_reduce_bytes_per_second"] * between["all_reduce_large_seconds"]
    assert moved == pytest.approx(1024 * 1024)  # 2 (n-1)/n of the size, n = 2
    out = capsys.readouterr().out
    assert f"\ntorch       {torch.__version__}\n" in out
    assert f"\n2 ranks     all-reduce 4 KB {1e3 * between['all_reduce_small_seconds']:.2f} ms\n" in out
    assert "send 64 MB" in out


def test_ranks_that_cannot_talk_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(nproc: int, cuda: bool, rank: int) -> None:
        raise SystemExit(5 if rank == 1 else 0)

    monkeypatch.setattr(network, "_rank", dies)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert doctor.run(nproc=2) == 1
    out = capsys.readouterr().out
    assert "2 ranks     cannot talk: " in out
    assert "with exit codes {" in out
    assert "GLOO_SOCKET_IFNAME=lo may be wrong" in out


def test_ranks_that_spin_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a rank that waits for another uses its core, so that only NCCL's own limit ends it."""
    limits = {}

    def run(nproc: int, body: Callable[[int], Any], **options: Any) -> list[dict[str, float]]:
        limits[options["backend"]] = options.get("collective_timeout")
        return [{}] * nproc

    monkeypatch.setattr(network, "run_local_ranks", run)
    network.measure(2, cuda=False, timeout=7.0)
    network.measure(2, cuda=True, timeout=7.0)
    assert limits == {"gloo": None, "nccl": 7.0}


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert network.port_is_taken(port)
    assert not network.port_is_taken(port)


def test_advice_on_the_host_name() -> None:
    for address, words in ((None, "does not resolve"), ("198.51.100.7", "not an address of this machine")):
        assert words in network.advise_name("box", address)[0]


# devices, which are patched in


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SimpleNamespace]:
    """Four of one kind, which reach their neighbour only; the list may be changed."""
    kinds = [
        SimpleNamespace(name="NVIDIA H100", major=9, minor=0, total_memory=85 * GB, free=80 * GB) for number in range(4)
    ]
    driver = tmp_path / "version"
    driver.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@x)  Sun Jul 27 2025\n"
        "GCC version:  gcc version 12.3.0\n"
    )
    monkeypatch.setattr(devices, "_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(kinds))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: kinds[index])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (kinds[index].free, 85 * GB))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: one // 2 == other // 2)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 5))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return kinds


def test_devices_are_shown_with_what_joins_them(
    four_devices: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = examine_devices()
    assert devices["apart"] == [(0, 2), (0, 3), (1, 2), (1, 3)]
    rows = device_rows(devices)
    assert rows[0] == ("device 0", "NVIDIA H100, 85.0 GB (80.0 GB free), compute capability 9.0")
    assert rows[4:] == [("", "driver 580.65.06, CUDA 13.0, NCCL 2.27.5")]
    (advice,) = advise_devices(devices)
    assert advice.startswith("devices 0 and 2 do not reach each other directly (4 such pairs)")
    used: list[dict[str, Any]] = []

    def measure(nproc: int, **options: Any) -> None:
        used.append(options)
        raise RuntimeError("nothing was measured")

    monkeypatch.setattr(network, "measure", measure)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    shown, _, _ = doctor.examine(2)
    assert {("device", "cuda (4 here)"), ("backend", "nccl"), ("environment", "NCCL_DEBUG=WARN")} < set(shown)
    assert ("backend", "gloo") in doctor.examine(8)[0]
    assert used == [{"cuda": True}, {"cuda": False}]


def test_devices_that_make_trouble(four_devices: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: True)
    assert advise_devices(examine_devices()) == []
    four_devices[1].free = 60 * GB
    four_devices[2].name = "NVIDIA A40"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,9")

    def memory(index: int) -> tuple[int, int]:
        if index == 0:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nCUDA kernel errors might")
        return four_devices[index].free, 85 * GB

    monkeypatch.setattr(torch.cuda, "mem_get_info", memory)
    advice = advise_devices(examine_devices())
    assert advice[0].startswith("CUDA_VISIBLE_DEVICES=0,1,2,3,9 names 5, but CUDA shows 4")
    assert advice[1:] == [
        "devices differ (NVIDIA H100, NVIDIA A40): every step takes as long as the slowest takes",
        "device 0 cannot be used: CUDA error: all CUDA-capable devices are busy or unavailable",
        "25.0 GB of device 1 are used by other processes: `nvidia-smi` names them",
    ]


def test_devices_that_torch_does_not_see(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "_NODES", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert advise_devices(examine_devices()) == []  # a machine without any
    (tmp_path / "nvidia0").touch()
    (advice,) = advise_devices(examine_devices())
    assert advice.startswith(f"this machine has 1 NVIDIA device, but torch {torch.__version__} (CUDA ")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert advise_devices(examine_devices())[0].startswith("CUDA_VISIBLE_DEVICES= hides all devices: unset it")


# the environment


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("NCCL_IB_DISABLE=1", "machines use TCP"),
        ("NCCL_P2P_DISABLE=0", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "ranks wait forever for a collective"),
    ],
)
def test_advice_on_the_environment(setting: str, words: str | None) -> None:
    name, _, value = setting.partition("=")
    advice = environment.advise_environment({name: value, "PATH": "/bin"})
    assert len(advice) == (words is not None)
    assert words is None or words in advice[0]
