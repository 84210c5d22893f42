"""What this machine offers: which address others reach it at, and the memory that a container leaves."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from colossus import machine


def test_the_loopback_is_an_interface_with_an_address() -> None:
    name = machine.loopback_interface()
    if name is None or machine.interface_address(name) is None:
        pytest.skip("no loopback, or its address cannot be asked for")
    assert machine.interface_address(name) == "127.0.0.1"
    assert machine.interface_of("127.0.0.1") == name
    assert machine.address_towards("127.0.0.1") == "127.0.0.1"
    assert machine.interface_address("no-such-interface-with-a-long-name") is None
    assert machine.interface_of("192.0.2.1") is None
    assert machine.address_towards("no such host.invalid") is None


def test_an_address_that_others_cannot_reach_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def towards(host: str) -> str | None:
        asked.append(host)
        return {"10.0.0.3": "10.0.0.1"}.get(host)

    monkeypatch.setattr(machine, "address_towards", towards)
    assert machine.address_among("10.0.0.1", ["127.0.0.1", "10.0.0.2"]) == "10.0.0.1"
    assert machine.address_among("127.0.1.1", ["127.0.0.1", "::1"]) == "127.0.1.1"  # all on one machine
    assert asked == []
    assert machine.address_among("127.0.1.1", ["127.0.1.1", "10.0.0.2", "10.0.0.3", "10.0.0.4"]) == "10.0.0.1"
    assert asked == ["10.0.0.2", "10.0.0.3"]  # the first of them has no way
    assert machine.address_among("::1", ["10.0.0.2"]) == "::1"


def test_memory_of_a_container_is_what_its_limit_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, free = machine.memory_bytes()
    assert free is not None
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    for name, text in {
        "memory.max": "max\n",
        "memory.current": "700000\n",
        "memory.stat": "anon 300000\nfile 400000\ninactive_file 150000\nactive_file 50000\n",
    }.items():
        (tmp_path / name).write_text(text)
    assert machine.memory_bytes()[0] == whole
    (tmp_path / "memory.max").write_text("1000000\n")
    assert machine.memory_bytes() == (1_000_000, 450_000)
    (tmp_path / "memory.max").write_text("500000\n")  # lowered below what is in use
    assert machine.memory_bytes() == (500_000, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="the C library is glibc")
@pytest.mark.parametrize(("variables", "is_kept"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_freed_memory_is_kept_unless_the_environment_decides(variables: dict[str, str], is_kept: bool) -> None:
    program = """
import resource
from colossus.machine import keep_freed_memory

keep_freed_memory()
for _ in range(3):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [bytearray(4 << 20) for _ in range(16)]
    del blocks
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
    environment = {name: value for name, value in os.environ.items() if "MALLOC" not in name} | variables
    run = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    pages = (16 * 4 << 20) // resource.getpagesize()
    assert (int(run.stdout) < 0.1 * pages) is is_kept
