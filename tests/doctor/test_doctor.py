"""``colossus doctor``: what it measures and what it advises."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest

from colossus.doctor import examine as doctor
from colossus.doctor import network


def test_doctor_measures_and_prints_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "LARGE_BYTES", 1024 * 1024)
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

    monkeypatch.setattr(network, "measure", broken)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    assert doctor.run(nproc=2) == 1
    out = capsys.readouterr().out
    assert "2 ranks     cannot talk: ranks [1] did not answer" in out
    assert "GLOO_SOCKET_IFNAME=eth7 may be wrong" in out


def test_ranks_that_fail_are_an_error_and_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(nproc: int, cuda: bool, rank: int) -> None:
        raise SystemExit(5 if rank == 1 else 0)

    monkeypatch.setattr(network, "_rank", dies)
    with pytest.raises(RuntimeError, match=r"with exit codes \{0: 0, 1: 5\}|with exit codes \{1: 5, 0: 0\}"):
        network.measure(2)


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
        (advice,) = network.advise_port(port, True)
        assert f"port {port} is taken" in advice
    assert not network.port_is_taken(port)
    assert network.advise_port(29500, False) == []


@pytest.mark.parametrize(
    ("address", "words"),
    [
        (None, "does not resolve"),
        ("198.51.100.7", "not an address of this machine"),
        ("127.0.0.1", "the loopback: fine on one machine"),
    ],
)
def test_advice_on_the_host_name(address: str | None, words: str) -> None:
    (advice,) = network.advise_name("box", address)
    assert words in advice


def test_the_own_name_is_resolved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    assert network.resolve_own_name()[1] in ("127.0.0.1", "::1")
    monkeypatch.setattr(socket, "gethostname", lambda: "no-such-name.invalid")
    assert network.resolve_own_name()[1] is None


def test_advice_on_limits() -> None:
    assert network.advise_limits({"open_files": None, "shared_memory_bytes": None}) == []
    advice = network.advise_limits({"open_files": 256, "shared_memory_bytes": 64 << 20})
    assert "ulimit -n" in advice[0]
    assert "--shm-size" in advice[1]
