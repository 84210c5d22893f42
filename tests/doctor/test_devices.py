"""``colossus doctor`` on devices and on the environment of NCCL: the devices are patched in, the variables given."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from colossus.doctor import devices, nccl, network
from colossus.doctor import examine as doctor
from colossus.doctor.devices import advise_devices, device_rows, examine_devices

GB = 10**9


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[SimpleNamespace]:
    """Four of one kind, which reach their neighbour only; the list may be changed."""
    kinds = [
        SimpleNamespace(
            name="NVIDIA H100", major=9, minor=0, multi_processor_count=132, total_memory=85 * GB, free=80 * GB
        )
        for number in range(4)
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


def test_devices_are_shown_with_what_joins_them(four_devices: list[SimpleNamespace]) -> None:
    found = examine_devices()
    assert (found["driver"], found["cuda"], found["nccl"]) == ("580.65.06", "13.0", "2.27.5")
    assert found["peers"] == [[1], [0], [3], [2]]
    rows = device_rows(found)
    assert rows[0] == ("device 0", "NVIDIA H100, 85.0 GB (80.0 GB free), compute capability 9.0")
    assert rows[4:] == [("", "driver 580.65.06, CUDA 13.0, NCCL 2.27.5"), ("peer access", "between 2 of 6 pairs")]
    (advice,) = advise_devices(found)
    assert advice.startswith("devices 0 and 2 do not reach each other directly (of 4 pair(s))")


def test_doctor_tells_of_devices(four_devices: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[dict[str, Any]] = []
    monkeypatch.setattr(network, "measure", lambda nproc, **options: used.append(options) or {})
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    found = doctor.examine(2)
    assert used == [{"cuda": True}]
    assert (found["device"], found["backend"]) == ("cuda", "nccl")
    text = doctor.render(found)
    assert "device      cuda (4 here)\ndevice 0    NVIDIA H100, 85.0 GB" in text
    assert "environment NCCL_DEBUG=WARN" in text
    assert doctor.examine(8)["backend"] == "gloo"


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
    assert advice == [
        "CUDA_VISIBLE_DEVICES=0,1,2,3,9 names 5, of which CUDA shows 4: it stops at the first that is not there, shows "
        "none where one is named twice, and one MIG instance to a process",
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
    (tmp_path / "nvidiactl").touch()
    for version, words in ((None, "is built without CUDA"), ("13.0", "is the driver (None) one for CUDA 13.0?")):
        monkeypatch.setattr(torch.version, "cuda", version)
        (advice,) = advise_devices(examine_devices())
        assert advice.startswith("this machine has 1 NVIDIA device(s), but torch")
        assert words in advice
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (advice,) = advise_devices(examine_devices())
    assert advice.startswith("CUDA_VISIBLE_DEVICES= hides all devices: unset it")


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("NCCL_DEBUG=WARN", None),
        ("NCCL_DEBUG=info", "every rank prints many lines"),
        ("NCCL_SOCKET_IFNAME=eth", None),
        ("NCCL_SOCKET_IFNAME=^docker,lo", None),
        ("NCCL_SOCKET_IFNAME==eth", "names no interface of this machine (lo, eth0, ib0): NCCL would not start"),
        ("NCCL_SOCKET_IFNAME=lo", "the loopback reaches no other machine"),
        ("GLOO_SOCKET_IFNAME=eth", "names no interface of this machine (lo, eth0, ib0): GLOO would not start"),
        ("NCCL_IB_DISABLE=1", "mlx5_0 would not be used, and machines talk through TCP"),
        ("NCCL_IB_DISABLE=0", None),
        ("NCCL_P2P_DISABLE=1", "talk through the host's memory"),
        ("NCCL_P2P_DISABLE=0", None),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=0", "would be waited for without end"),
        ("TORCH_NCCL_ASYNC_ERROR_HANDLING=3", None),
        ("TORCH_FR_BUFFER_SIZE=0", "the flight recorder is off"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", "FSDP and ZeRO 3 lose by it"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=8", None),
        ("NVIDIA_TF32_OVERRIDE=0", "overrides what torch and the config say"),
    ],
)
def test_advice_on_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, setting: str, words: str | None
) -> None:
    (tmp_path / "mlx5_0").mkdir()
    monkeypatch.setattr(nccl, "_INFINIBAND", tmp_path)
    monkeypatch.setattr(nccl.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    name, _, value = setting.partition("=")
    advice = nccl.advise_environment({name: value, "PATH": "/bin"})
    assert len(advice) == (words is not None)
    assert words is None or words in advice[0]
