"""The hosts of `benchmarks.hosts`: what of one another finds, how fast links are, and that nothing is left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from helpers.hosts import needs_hosts
from helpers.launching import ROOT, children, environment, is_running, wait_for
from helpers.long import long
from helpers.ranks import grid

from benchmarks.host_ranks import run_on_hosts
from benchmarks.hosts import make_hosts
from benchmarks.replica_runs import bytes_on_wire
from colossus.comm import collectives
from colossus.context.parallel_context import ParallelContext


def traces() -> tuple[str, str]:
    """What hosts could leave behind on this machine, beside processes: links, mounts."""
    links = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    return links, Path("/proc/self/mountinfo").read_text()


def in_use(networks: Collection[str]) -> set[str]:
    """Those of these network namespaces that any process of this machine is in."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/ns/net"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(entry))
    return found & set(networks)


@pytest.mark.long
@needs_hosts
def test_hosts_share_files_and_the_network_and_nothing_else(tmp_path: Path) -> None:
    before = traces()
    with make_hosts(3, "50mbit") as made:
        assert [host.run(["hostname"]).strip() for host in made] == ["host0", "host1", "host2"]
        for host in made:
            names = host.run(["getent", "ahostsv4", *(other.name for other in made)]).split()
            assert {other.address for other in made} <= set(names)
        (tmp_path / "file").write_text("of all")
        assert made[1].run(["cat", str(tmp_path / "file")]) == "of all"
        made[0].run(["sh", "-c", "echo of one > /dev/shm/found && ipcmk -Q"])
        assert made[0].run(["ls", "/dev/shm"]) == "found\n"
        assert made[1].run(["ls", "/dev/shm"]) == ""
        assert not Path("/dev/shm/found").exists()
        assert "0x" in made[0].run(["ipcs", "-q"])
        assert "0x" not in made[1].run(["ipcs", "-q"])
        assert len(made[0].run(["sh", "-c", "ls -d /proc/[0-9]*"]).split()) <= 4
        made[0].run(["sh", "-c", "(setsid sleep 0.01 &)"])  # whose end nobody waits for
        time.sleep(0.1)
        assert "Z" not in made[0].run(["sh", "-c", "cut -d' ' -f3 /proc/[0-9]*/stat"])
    assert traces() == before


@pytest.mark.long
@needs_hosts
def test_ranks_share_memory_inside_of_a_host_alone() -> None:
    size, rounds = 1 << 20, 3

    def body(rank: int) -> list[int]:
        context = ParallelContext(grid(data=2, tensor=2), rank, device=torch.device("cpu"))
        everyone = context.group(("data", "tensor"))
        sent = []
        for axis in ("tensor", "data"):
            group = context.group(axis)
            for made in (group, everyone):
                collectives.all_reduce(torch.ones(4), made, owned=True).wait()
            begin = bytes_on_wire()
            for _ in range(rounds):
                x = torch.full((size // 4,), float(rank))
                total = collectives.all_reduce(x, group, owned=True).wait()
                assert total[-1] == sum(group.ranks)
            collectives.all_reduce(
                torch.ones(4), everyone, owned=True
            ).wait()  # what was sent has left the host: peers have it
            sent.append(bytes_on_wire() - begin)
            collectives.all_reduce(
                torch.ones(4), everyone, owned=True
            ).wait()  # nobody sends on before all have counted
        context.close()
        return sent

    with make_hosts(2) as (first, second):
        for inside, between in run_on_hosts([first, first, second, second], body):
            assert inside < size / 10
            assert between > rounds * size  # two ranks of the host send half of the tensor twice, each


@needs_hosts
@pytest.mark.parametrize("signum", [signal.SIGKILL, *long(signal.SIGINT, signal.SIGTERM, signal.SIGHUP)])
def test_nothing_is_left_whatever_ends_it(tmp_path: Path, signum: signal.Signals) -> None:
    before = traces()
    # moved: a file that is there is complete
    program = "setsid sleep 600 & readlink /proc/self/ns/net > .$(hostname); mv .$(hostname) $(hostname); wait"
    command = f"cd {tmp_path}; {program}"
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.hosts", "--hosts", "2", "--rate", "1gbit", "--", "sh", "-c", command],
        env=environment(),
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: len(list(tmp_path.glob("host*"))) == 2, process.pid)
    networks = [path.read_text().strip() for path in tmp_path.iterdir()]
    first_processes = children(process.pid)
    assert len(in_use(networks)) == 2
    assert len(first_processes) == 5  # of the bridge and of two hosts, and a program on each
    process.send_signal(signum)
    _, err = process.communicate(timeout=60)
    assert process.returncode == (-signum if signum == signal.SIGKILL else 128 + signum)
    assert (err == "") == (signum == signal.SIGKILL)
    wait_for(lambda: not in_use(networks) and not any(map(is_running, first_processes)), os.getpid())
    assert traces() == before
