"""Launchers on hosts of their own: network namespaces of this machine (`benchmarks.hosts`)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers.forked import ForkedPython
from helpers.launching import FOREIGN, ROOT, TINY, environment

sys.path.insert(0, str(ROOT))  # the benchmarks are no part of the installed package

from benchmarks.hosts import Host, launch_words, located_error

_REASON = located_error()
needs_hosts = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


def start_on(hosts: Sequence[Host], cwd: Path, *arguments: str, config: Path = TINY, **more: str) -> list[ForkedPython]:
    """Launchers of one run of a config, by default the tiny one, one on each host."""
    words = launch_words(hosts, [str(config), *arguments])
    given = {key: value for key, value in environment(**more).items() if key not in (*FOREIGN, "GLOO_SOCKET_IFNAME")}
    return [ForkedPython(words, env=given, cwd=cwd, pipes=True, within=host.namespaces) for host in hosts]
