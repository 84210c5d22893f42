"""``colossus doctor``: what it measures and what it advises."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from colossus.doctor import examine as doctor
from colossus.doctor import network, probe
from colossus.doctor.network import HostName


def test_doctor_measures_and_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "LARGE_BYTES", 1024 * 1024)
    assert doctor.run(nproc=2, json=True) == 0
    found = json.loads(capsys.readouterr().out)
    between = found["between_ranks"]
    assert all(value > 0 for value in between.values())
    moved = between["all_reduce_bytes_per_second"] * between["all_reduce_large_seconds"]
    assert moved == pytest.approx(1024 * 1024)  # 2 (n-1)/n of the size, n = 2
    assert found["cores"] >= 1
    assert found["versions"]["torch"]
    text = doctor.render(found)
    assert "all-reduce 4 KB" in text
    assert "send 64 MB" in text


def test_ranks_that_cannot_talk_are_reported(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(nproc: int, *, cuda: bool) -> dict[str, float]:
        raise RuntimeError("ranks [1] did not answer within 60 s")

    monkeypatch.setattr(doctor, "measure", broken)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert doctor.run(nproc=2) == 1
    out = capsys.readouterr().out
    assert "2 ranks     cannot talk: ranks [1] did not answer" in out
    assert "GLOO_SOCKET_IFNAME=eth7 may be wrong" in out


def test_ranks_that_fail_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(nproc: int, cuda: bool, rank: int) -> None:
        raise SystemExit(5 if rank == 1 else 0)

    monkeypatch.setattr(probe, "_rank", dies)
    with pytest.raises(RuntimeError, match=r"exit codes \{1: 5\}"):
        probe.measure(2)


def test_ranks_that_spin_are_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA a rank that waits for another uses its core, so that only NCCL's own limit ends it."""
    limits = {}

    def run(nproc: int, body: Callable[[int], Any], **options: Any) -> list[dict[str, float]]:
        limits[options["backend"]] = options.get("collective_timeout")
        return [{}] * nproc

    monkeypatch.setattr(probe, "run_local_ranks", run)
    probe.measure(2, cuda=False, timeout=7.0)
    probe.measure(2, cuda=True, timeout=7.0)
    assert limits == {"gloo": None, "nccl": 7.0}


def test_a_taken_port_is_seen() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert network.port_is_taken(port)
        (advice,) = network.advise_port(port, True, str(port))
        assert f"port {port} (MASTER_PORT) is taken" in advice
    assert not network.port_is_taken(port)
    assert network.advise_port(29500, False, "") == []
    assert "is not a number" in network.advise_port(29500, False, "http")[0]


@pytest.mark.parametrize(
    ("host", "words"),
    [
        (HostName("box", None, False, False, 0.0), "does not resolve"),
        (HostName("box", "10.1.2.3", False, False, 0.0), "not an address of this machine"),
        (HostName("box", "127.0.1.1", True, True, 0.0), "the loopback: fine on one machine"),
        (HostName("box", "10.1.2.3", True, False, 2.5), "took 2.5 s"),
        (HostName("box", "10.1.2.3", True, False, 0.0), None),
    ],
)
def test_advice_on_the_host_name(host: HostName, words: str | None) -> None:
    advice = network.advise_name(host)
    assert len(advice) == (words is not None)
    assert words is None or words in advice[0]


def test_the_own_name_is_resolved_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    host = network.resolve_own_name()
    assert (host.is_local, host.is_loopback) == (True, True)
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    assert network.resolve_own_name().address is None


def test_advice_on_limits() -> None:
    assert network.advise_limits({"open_files": None, "shared_memory_bytes": None}) == []
    advice = network.advise_limits({"open_files": 256, "shared_memory_bytes": 64 << 20})
    assert "ulimit -n" in advice[0]
    assert "--shm-size" in advice[1]
