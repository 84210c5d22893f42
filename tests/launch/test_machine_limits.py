"""Limits of a machine that a run meets: each is named, with its number and what to do."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.datasets import Numbers, loaders
from helpers.faults import native
from helpers.launching import LAUNCH, TINY, finish, launch, start

from colossus import machine
from colossus.config import ConfigError, load_config
from colossus.data import workers
from colossus.launch import advice, attempt_log, rank_failure, run_folder
from colossus.launch.rank_failure import RankRun, fail
from colossus.launch.report import describe_death
from colossus.launch.stop import StopSignals

GLOO = "[enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/loop.cc:105] fd_ != -1. epoll_create: "
CONFIG = load_config({"parallel": {"data": 2}, "train": {"global_batch_size": 2}})
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def limited(script: str, *arguments: str, tmp_path: Path, namespaces: str = "") -> tuple[int, str]:
    """Return exit code and output of a launch after commands of sh, in namespaces of its own where they are named."""
    words = ["sh", "-c", f'{script} && exec "$@"', "sh", *LAUNCH, "--run-dir", "run", *arguments]
    if namespaces:
        if subprocess.run(["unshare", namespaces, "true"], capture_output=True).returncode:
            pytest.skip("needs new namespaces")
        words = ["unshare", namespaces, *words]
    code, out, err = finish(start(words, tmp_path, new_python=True))
    return code, out + err


# -- open files -----------------------------------------------------------------------------------------------


def test_few_open_files_are_a_rank_s_own_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "open_files", lambda: 48)
    for error in (native(RuntimeError(f"{GLOO}Too many open files")), OSError(errno.EMFILE, os.strerror(errno.EMFILE))):
        assert rank_failure.kind_of(error) == "error"
        hint = advice.advise(rank_failure.messages_of(error), CONFIG, 3, None)
        assert hint.startswith("a process may open 48 files here (ulimit -n), which are too few")
    assert rank_failure.kind_of(native(RuntimeError(f"{GLOO}Connection closed by peer"))) == "communication"
    assert advice.advise(["ValueError: of the user"], CONFIG, 3, None) == ""
    assert 'if it says "Too many open files" above: a process may open 48 files' in describe_death(-6)
    monkeypatch.setattr(machine, "open_files", lambda: 65536)
    assert "shapes or dtypes differ" in describe_death(-6)


def test_a_launch_raises_the_soft_limit_of_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (48, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.update(now=limit))
    machine.raise_open_files()
    assert (limits["now"], machine.open_files()) == ((4096, 4096), 4096)
    limits["now"] = (48, resource.RLIM_INFINITY)
    machine.raise_open_files()
    assert machine.open_files() is None


@pytest.mark.long
def test_a_run_under_a_limit_of_open_files(tmp_path: Path) -> None:
    code, err = limited("ulimit -n 24", tmp_path=tmp_path)
    assert code == 1
    assert "a process may open 24 files here (ulimit -n), which are too few" in err
    code, err = limited("ulimit -Sn 24", "--run-dir", "other", tmp_path=tmp_path)
    assert code == 0, err


# -- disks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "No space left on device: less than 1 MB is left; make room, or give another folder"),
        (errno.EDQUOT, "Disk quota exceeded: less than 1 MB is left; make room, or give another folder"),
        (errno.EROFS, "Read-only file system"),
    ],
)
def test_a_run_does_not_begin_on_a_full_disk(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write_bytes(path: Path, data: bytes) -> int:
        raise OSError(number, os.strerror(number))

    run_folder.prepare(tmp_path / "run").close()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["rank.lock", "run.lock"]
    monkeypatch.setattr(Path, "write_bytes", write_bytes)
    with pytest.raises(ConfigError) as refused:
        run_folder.prepare(tmp_path / "run")
    assert str(refused.value) == f"run folder {tmp_path / 'run'}: cannot be written to: {words}"


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, words in (
        (7, f"full: the disk of {tmp_path} (7 bytes are free)"),
        (1 << 30, "a disk is full, or a quota"),
    ):
        monkeypatch.setattr(advice.shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert words in advice.advise(rank_failure.messages_of(NO_ROOM), CONFIG, 3, tmp_path)


def test_a_run_that_goes_on_does_not_need_its_config_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def write_text(path: Path, text: str) -> int:
        raise NO_ROOM

    monkeypatch.setattr(Path, "write_text", write_text)
    run_folder.write_start(tmp_path, CONFIG)
    assert f"{tmp_path / 'config.json'} cannot be written (No space left on device); training continues" in (
        capsys.readouterr().err
    )


def test_a_failure_is_told_where_its_record_cannot_be_written(tmp_path: Path) -> None:
    """Meet a run folder whose disk is full; here a folder is in the way."""
    (tmp_path / "run" / attempt_log.ROWS).mkdir(parents=True)
    code, _, err = launch(tmp_path, TROUBLE="raise")
    assert code == 1
    assert "raised ValueError" in err
    assert "the third step is one too many" in err
    assert "without an exception" not in err


def test_a_record_without_a_place_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLOSSUS_RANK_FILES", str(tmp_path / "removed"))
    fail(RankRun(0, StopSignals(), folder=tmp_path, config=CONFIG), ValueError("the one"))
    assert "rank 0: no record of its failure" in (err := capsys.readouterr().err)
    assert "ValueError: the one" in err


@pytest.mark.long
def test_a_run_on_a_disk_that_is_full(tmp_path: Path) -> None:
    """Before it begins, and from the second step on."""
    (tmp_path / "run").mkdir()
    fill = "mount -t tmpfs -o size=64k none run && dd if=/dev/zero of=run/fill bs=1k count={} 2>/dev/null; true"
    for kilobytes in (64, 60, 8):
        code, err = limited(fill.format(kilobytes), tmp_path=tmp_path, namespaces="-m")
        assert (code, err) == (
            2,
            "colossus: run folder run: cannot be written to: No space left on device: less than 1 MB is left; make "
            "room, or give another folder\n",
        )


# -- shared memory --------------------------------------------------------------------------------------------


def test_workers_that_have_no_shared_memory_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    options: Any = loaders({"type": Numbers(), "num_workers": 1}).train.source._options
    words = r"data.num_workers = 1: workers send batches through /dev/shm, which is too small: .* --shm-size=8g"
    for error in (
        NO_ROOM,
        RuntimeError("unable to allocate shared memory(shm) for file </torch_1_2_3>: No space left on device (28)"),
        RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
                     "workers are out of shared memory. Please try to raise your shared memory limit."),
    ):  # fmt: skip
        with pytest.raises(RuntimeError, match=words):
            workers.require_shared_memory(options, error)
    for error in (ValueError("of the user"), OSError(errno.ENOSPC, "No space left on device", "a file of the user's")):
        workers.require_shared_memory(options, error)


@pytest.mark.long
@pytest.mark.parametrize("size", ["64k", "256k"])
def test_a_run_with_little_shared_memory(size: str, tmp_path: Path) -> None:
    """At the start of workers, and with their first batch."""
    (tmp_path / "large.py").write_text(
        f"import torch\nexec(open({str(TINY)!r}).read())\n"
        "class _Large(_Numbers):\n    def __getitem__(self, index): return torch.ones(40000)[:40000].clone()\n"
        "class _Wide(_Model):\n    def forward(self, inputs): return super().forward(inputs[:, :4])\n"
        "data = dict(type=_Large, num_workers=1)\nmodel = dict(type=_Wide)\n"
    )
    code, err = limited(
        f"mount -t tmpfs -o size={size} none /dev/shm && set -- {sys.executable} -m colossus launch large.py",
        tmp_path=tmp_path, namespaces="-m",
    )  # fmt: skip
    assert code == 1
    assert "data.num_workers = 1: workers send batches through /dev/shm, which is too small" in err


# -- the loopback ---------------------------------------------------------------------------------------------


def test_an_address_that_is_not_this_machine_s_is_not_reached() -> None:
    assert machine.is_reachable("127.0.0.1")
    for other in ("192.0.2.1", "no address", "2001:db8::1"):
        assert not machine.is_reachable(other)


@pytest.mark.long
def test_a_loopback_that_is_down_ends_the_launch_at_once(tmp_path: Path) -> None:
    code, err = limited("true", tmp_path=tmp_path, namespaces="-n")
    assert code == 1
    assert err == (
        "colossus: the processes could not be started: this machine does not reach its own address 127.0.0.1: is its "
        "interface down? (`ip link set lo up`, of the loopback)\n"
    )
