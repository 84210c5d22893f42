"""Hosts on one machine: network namespaces joined by a bridge, each link as slow as is wanted.

    python -m benchmarks.hosts --hosts 4 --rate 100mbit -- launch configs/gpt_stdlib.py parallel.data=4
    python -m benchmarks.hosts --hosts 2 -- ip address

`launch` is the real `colossus launch --nnodes`, one on each host; any other command is run on each as it is. Each host
has a network, mounts, IPC, processes, a host name and a /dev/shm of its own, so that nothing of one can be found by
another but through the network. All other files are those of this machine.

Needs root on Linux, and iproute2 (`ip`, `tc`). Nothing is left when it ends, whatever ends it: bridge and links are in
namespaces that live as long as their processes, which die with this one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and not __package__:  # as a file, in place of a module
    sys.path[0] = str(ROOT)

from benchmarks import namespaces  # noqa: E402
from benchmarks.namespaces import Namespaces  # noqa: E402

INTERFACE = "eth0"
PORT = 29500
USAGE = 2
#: a bucket of tbf must hold a packet as segmentation offload makes them, or each is cut up in software
LEAST_BURST = 64 << 10

_MOST_HOSTS = 250
_CAP_NET_ADMIN, _CAP_SYS_ADMIN = 12, 21
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
#: what a link may send at once after it was idle, at rates where that is more
_BURST_SECONDS = 1e-3
#: how long a packet may wait for a link; then it is dropped, as by a switch whose buffer is full
_QUEUE_SECONDS = 0.1
#: from the first host whose program fails to the end of the others'
_PATIENCE_SECONDS = 60.0


def located_error() -> str | None:
    """Return why hosts cannot be made here; None if they can."""
    if sys.platform != "linux":
        return "hosts are Linux's namespaces"
    if os.geteuid() != 0:
        return "hosts need root (network, mount and process namespaces): run it with sudo"
    if not all(_has_capability(number) for number in (_CAP_NET_ADMIN, _CAP_SYS_ADMIN)):
        return "hosts need the capabilities net_admin and sys_admin, which root does not have here (a container?)"
    missing = [name for name in ("ip", "tc", "mount") if shutil.which(name) is None]
    if missing:
        return f"hosts need {' and '.join(missing)}: install iproute2 and util-linux"
    return None


def _has_capability(number: int) -> bool:
    match = re.search(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return match is None or bool(int(match[1], 16) >> number & 1)


@dataclass(frozen=True)
class Host:
    """One of the hosts.

    Attributes:
        name: which the others can resolve.
        address: of its interface, IPv4.
    """

    name: str
    address: str
    namespaces: Namespaces

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a program on it; ``options`` are those of `subprocess.Popen`."""
        return self.namespaces.start(words, **options)

    def run(self, words: Sequence[str]) -> str:
        """Return what a program on it prints; RuntimeError when it fails."""
        return self.namespaces.run(words)

    def bytes_moved(self) -> tuple[int, int]:
        """Return the bytes received and sent through its link so far, all headers included."""
        return self.namespaces.bytes_moved(INTERFACE)


@contextlib.contextmanager
def make_hosts(count: int, rate: str | None = None, own_name_is: str | None = None) -> Iterator[list[Host]]:
    """Make hosts that reach each other, until the end of the block; their processes die with it.

    Args:
        rate: of each link, in each direction, as ``100mbit``; None: as fast as the machine is.
        own_name_is: what a host's own name resolves to on it; by default its address. Debian writes 127.0.1.1.

    Raises:
        ValueError: for a rate that is none.
        RuntimeError: where hosts cannot be made, with the reason.
    """
    shape = None if rate is None else tbf(rate)
    reason = located_error()
    if reason is not None:
        raise RuntimeError(reason)
    if not 1 <= count <= _MOST_HOSTS:
        raise ValueError(f"{count} hosts: 1 to {_MOST_HOSTS} can be made")
    names, addresses = [f"host{index}" for index in range(count)], [f"10.77.0.{index + 1}" for index in range(count)]
    address_of = dict(zip(names, addresses, strict=True))
    with contextlib.ExitStack() as stack:
        switch = stack.enter_context(namespaces.new(namespaces.NETWORK | namespaces.PROCESSES, "true")).network
        hosts = [
            Host(
                name,
                address_of[name],
                stack.enter_context(_new_host(name, address_of, own_name_is or address_of[name])),
            )
            for name in names
        ]
        switch.run(["ip", "-batch", "-"], "link add name bridge type bridge mcast_snooping 0\nlink set bridge up\n")
        for index, host in enumerate(hosts):
            _connect(host, switch, f"port{index}", shape)
        yield hosts


def tbf(rate: str) -> list[str]:
    """Return the token bucket of `tc` that shapes a link.

    Raises:
        ValueError: for what is no rate.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if match is None or float(match[1]) == 0:
        raise ValueError(f"the rate {rate!r} is not a number with kbit, mbit or gbit behind it, such as 100mbit")
    burst = max(LEAST_BURST, int(float(match[1]) * _UNITS[match[2]] / 8 * _BURST_SECONDS))
    return ["tbf", "rate", rate, "burst", str(burst), "latency", f"{_QUEUE_SECONDS * 1e3:g}ms"]


def _new_host(name: str, address_of: Mapping[str, str], own: str) -> contextlib.AbstractContextManager[Namespaces]:
    lines = [
        "127.0.0.1 localhost",
        *(f"{own if other == name else address_of[other]} {other}" for other in address_of),
    ]
    # torch's store listens on IPv6 and asks for the names of those who connect; there is no DNS
    mapped = {**address_of, "localhost": "127.0.0.1", f"{name}-own": own}
    lines += [f"::ffff:{address} {other}-mapped" for other, address in mapped.items()]
    flags = namespaces.NETWORK | namespaces.MOUNTS | namespaces.IPC | namespaces.NAMES | namespaces.PROCESSES
    setup = f"""
mount --make-rprivate /
mount -t proc proc /proc
mount -t tmpfs tmpfs /dev/shm
printf '{"".join(f"{line}{chr(92)}n" for line in lines)}' > /dev/shm/names
mount --bind /dev/shm/names /etc/hosts
rm /dev/shm/names
echo {name} > /proc/sys/kernel/hostname
ip link set lo up"""
    return namespaces.new(flags, setup)


def _connect(host: Host, switch: Namespaces, port: str, shape: list[str] | None) -> None:
    pid = host.namespaces.pid
    switch.run(
        ["ip", "-batch", "-"],
        f"link add name {port} type veth peer name {INTERFACE} netns {pid}\nlink set {port} master bridge up\n",
    )
    host.namespaces.run(
        ["ip", "-batch", "-"], f"address add {host.address}/24 dev {INTERFACE}\nlink set {INTERFACE} up\n"
    )
    if shape is not None:
        switch.run(["tc", "qdisc", "add", "dev", port, "root", *shape])
        host.run(["tc", "qdisc", "add", "dev", INTERFACE, "root", *shape])


# -- runs ---------------------------------------------------------------------------------------------------


def launch_words(hosts: Sequence[Host], arguments: Sequence[str]) -> list[str]:
    """``colossus launch`` of a run on these hosts, the same on each."""
    where = ["--nnodes", str(len(hosts)), "--rdzv-endpoint", f"{hosts[0].name}:{PORT}"]
    return [sys.executable, "-m", "colossus", "launch", *where, *arguments]


def environment(hosts: Sequence[Host]) -> dict[str, str]:
    """Ours, and threads for each rank as if the machine's cores were shared out over the hosts."""
    threads = max(1, len(os.sched_getaffinity(0)) // len(hosts))
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {"OMP_NUM_THREADS": str(threads), **os.environ, "PYTHONPATH": path}


def run_on_all(hosts: Sequence[Host], words: Sequence[str], **options: Any) -> list[int]:
    """Run a program on each host until all have ended; stop signals go to all of them, a third ends them at once.

    Returns:
        The exit codes.
    """
    stops = 0

    def stop(signum: int, frame: object) -> None:
        nonlocal stops
        stops += 1
        for process in processes:
            process.send_signal(signum if stops < 3 else signal.SIGKILL)

    processes: list[subprocess.Popen[Any]] = []
    before = {signum: signal.signal(signum, stop) for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        processes += [host.start(words, start_new_session=True, **options) for host in hosts]
        deadline = None
        while any(process.poll() is None for process in processes):
            if deadline is None and any(process.returncode for process in processes):
                deadline = time.monotonic() + _PATIENCE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                for process in processes:
                    process.kill()
            time.sleep(0.05)
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    return [process.returncode for process in processes]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2, metavar="N", help="how many (default %(default)s)")
    parser.add_argument("--rate", help="of each link and direction: 100mbit, 1gbit (default: not shaped)")
    parser.add_argument("command", nargs="+", help="after --: launch FILE [overrides], or any program")
    arguments = parser.parse_args(argv)
    first, *rest = arguments.command
    try:
        with make_hosts(arguments.hosts, arguments.rate) as hosts:
            words = launch_words(hosts, rest) if first == "launch" else arguments.command
            codes = run_on_all(hosts, words, env=environment(hosts))
            for host, code in zip(hosts, codes, strict=True):
                if code:
                    print(f"hosts: {first} ended with exit code {code} on {host.name}", file=sys.stderr)
            return next((code if code > 0 else 128 - code for code in codes if code), 0)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"hosts: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    raise SystemExit(main())
