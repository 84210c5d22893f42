"""Launchers on hosts of their own: network namespaces of this machine (`benchmarks.hosts`)."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.forked import ForkedPython
from helpers.launching import FOREIGN, ROOT, TINY, children, environment

sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.hosts import INTERFACE, Host, launch_words, located_error

_REASON = located_error()
needs_hosts = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def start_on(hosts: Sequence[Host], cwd: Path, *arguments: str, config: Path = TINY, **more: str) -> list[ForkedPython]:
    """Launchers of one run of a config, by default the tiny one, one on each host."""
    words = launch_words(hosts, [str(config), *arguments])
    return [launch_on(host, words, cwd, **more) for host in hosts]


def launch_on(host: Host, words: Sequence[str], cwd: Path, **more: str) -> ForkedPython:
    given = {key: value for key, value in environment(**more).items() if key not in (*FOREIGN, "GLOO_SOCKET_IFNAME")}
    return ForkedPython(words, env=given, cwd=cwd, pipes=True, within=host.namespaces)


def lose_power(host: Host, launcher: ForkedPython) -> None:
    """No packet leaves the host any more, and then nothing runs on it."""
    connect(host, "down")
    for pid in (launcher.pid, *children(launcher.pid)):
        os.kill(pid, signal.SIGKILL)
    launcher.communicate()


def connect(host: Host, state: str = "up") -> None:
    host.namespaces.network.run(["ip", "link", "set", INTERFACE, state])
