"""Devices against ranks: refused before a process starts, and in words. The devices are patched in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.launching import TINY

from colossus.context.visible_devices import explain_visible
from colossus.context.world import pick_device
from colossus.launch import command

Devices = Callable[..., None]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> Devices:
    """``devices(2, "0,1")``: torch finds 2, and what CUDA_VISIBLE_DEVICES says (None: it is not set)."""

    def pretend(found: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return pretend


@pytest.mark.parametrize(
    ("value", "found", "words"),
    [
        (None, 4, ""),
        ("", 0, "CUDA_VISIBLE_DEVICES= hides all devices: unset it"),
        ("0,1", 2, "CUDA_VISIBLE_DEVICES=0,1 shows 2"),
        ("0,1,0", 0, "names 3, but CUDA shows 0: it stops at the first missing device, shows none if one"),
    ],
)
def test_what_cuda_visible_devices_does_is_said(value: str | None, found: int, words: str) -> None:
    said = explain_visible({} if value is None else {"CUDA_VISIBLE_DEVICES": value}, found)
    assert words in said
    assert bool(said) == bool(words)


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("found", "visible", "overrides", "options", "words"),
    [
        (
            *(1, None, ["parallel.data=4"], {}),
            "device: 4 processes on this machine, but 1 CUDA device here: --nproc 1 is the most, "
            "and a plan of as many processes\n  nearest plans that fit 1 process:\n    parallel.data=1\n"
            "  or keep the plan with more machines (--nnodes), ranks that share a device (comm.backend='gloo')",
        ),
        (1, "0,", ["parallel.data=4"], {"dry_run": True}, "(CUDA_VISIBLE_DEVICES=0, names 2, but CUDA shows 1: "),
        (
            *(1, None, ["parallel.data=4"], {"nnodes": (2, 2), "rdzv_endpoint": "host:29400"}),
            "2 processes on each of 2 machines, but 1 CUDA device here: --nproc 1 is the most, and a plan of as many "
            "processes\n  nearest plans that fit 2 processes:\n    parallel.data=2",
        ),
        (0, "-1", ["device=cuda"], {}, "torch finds no CUDA device here (CUDA_VISIBLE_DEVICES=-1 hides all devices"),
    ],
)
def test_more_ranks_than_devices_are_refused_before_a_process_starts(
    devices: Devices,
    capsys: pytest.CaptureFixture[str],
    found: int,
    visible: str | None,
    overrides: list[str],
    options: dict[str, Any],
    words: str,
) -> None:
    devices(found, visible)
    assert command.run(str(TINY), overrides, **options) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("colossus: ")
    assert words in printed.err
    assert printed.out == ""


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize(
    ("found", "variables", "is_refused"),
    [
        (2, {}, False),
        (1, {}, True),
        (1, {"CUDA_VISIBLE_DEVICES": "3"}, False),  # a script around the ranks shows each its own
        (1, {"CUDA_VISIBLE_DEVICES": ""}, True),
    ],
)
def test_under_torchrun_ranks_without_a_device_are_refused_on_each_node(
    devices: Devices,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    found: int,
    variables: dict[str, str],
    is_refused: bool,
) -> None:
    devices(found)
    started = []
    monkeypatch.setattr(command, "run_worker", lambda *arguments, **options: started.append(arguments) or 0)
    torchrun = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    monkeypatch.setattr(command.os, "environ", {**command.os.environ, **torchrun, **variables})
    assert command.run(str(TINY), ["parallel.data=4"]) == (2 if is_refused else 0)
    assert len(started) == (not is_refused)
    told = "device: 2 processes on each of 2 machines, but 1 CUDA device here"
    assert (told in capsys.readouterr().err) == is_refused


def test_each_local_rank_has_its_device(devices: Devices, monkeypatch: pytest.MonkeyPatch) -> None:
    devices(2)
    picked = []
    for rank in range(2):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        picked.append(pick_device("auto"))
    assert picked == [torch.device("cuda", 0), torch.device("cuda", 1)]
    devices(1, "5")  # of this task alone, perhaps
    assert pick_device("cuda") == torch.device("cuda", 0)
    devices(0, "")
    assert pick_device("auto") == torch.device("cpu")
    with pytest.raises(ValueError, match="CUDA_VISIBLE_DEVICES= hides all devices"):
        pick_device("cuda")
