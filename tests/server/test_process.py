"""Servers as processes, and the variables that tell a worker where they are."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from colossus.server.calls import ServerGone
from colossus.server.client import Servers
from colossus.server.process import (
    ServerFailed,
    ServerProcess,
    has_servers,
    new_token,
    read_environment,
    start_servers,
    write_environment,
)
from colossus.server.rpc_client import RpcClient

KEY = new_token()


def until_ended(process: int, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists() and "Z" not in Path(f"/proc/{process}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, f"process {process} lives"
        time.sleep(0.01)


@pytest.mark.long
def test_one_that_is_killed_and_one_that_is_ended_in_order() -> None:
    first, second = start_servers(2, KEY)
    try:
        clients = [RpcClient(server.endpoint, KEY, 0) for server in (first, second)]
        worker = Servers(clients, 0)
        worker.create({"w": torch.arange(8.0)}).wait(20)
        assert first.endpoint["process"] == first.process != os.getpid()
        assert KEY.hex() not in Path(f"/proc/{first.process}/cmdline").read_text()
        assert KEY.hex().encode() not in Path(f"/proc/{first.process}/environ").read_bytes()
        for signum in (signal.SIGINT, signal.SIGTERM):  # its parent's to answer
            os.kill(first.process, signum)
        os.kill(second.process, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ServerGone, match=r"server 1 at .* is gone: its connection "):
            worker.pull({"w": torch.empty(8)}).wait()
        assert time.monotonic() - began < 5
        assert second._child.wait(10) == -signal.SIGKILL  # the connection breaks before the system tells of the end
        assert first.alive
        first.close()
        assert first.returncode == 0
        with pytest.raises(ServerGone, match="it was closed"):
            clients[0].call("waiting_for").result(10)
        worker.close()
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_one_that_cannot_listen() -> None:
    server = ServerProcess(3, KEY, host="192.0.2.1")
    with pytest.raises(ServerFailed, match=r"server 3 could not be started: OSError: .*Cannot assign"):
        server.wait_until_ready()


PARENT = """
import json, sys, time
from colossus.server.process import new_token, start_servers, write_environment
token = new_token()
servers = start_servers(2, token)
assert all(server.alive for server in servers)
assert "torch" not in sys.modules
variables = {}
write_environment([server.endpoint for server in servers], token, variables)
print(json.dumps(variables), flush=True)
time.sleep(100)
"""


@pytest.mark.long
def test_servers_end_with_their_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    endpoints, token = read_environment(json.loads(parent.stdout.readline()))
    clients = [RpcClient(endpoint, token, 0) for endpoint in endpoints]
    parent.kill()
    parent.wait()
    for endpoint, client in zip(endpoints, clients, strict=True):
        until_ended(endpoint["process"])
        with pytest.raises(ServerGone):
            client.call("waiting_for").result(10)
    parent.stdout.close()


def test_the_variables() -> None:
    endpoints = [dict(index=index, host="127.0.0.1", port=4711, process=12) for index in range(2)]
    variables: dict[str, str] = {}
    assert not has_servers(variables)
    with pytest.raises(ValueError, match="COLOSSUS_SERVERS is not set: `colossus launch` sets it"):
        read_environment(variables)
    write_environment(endpoints, KEY, variables)
    assert has_servers(variables)
    assert read_environment(variables) == (endpoints, KEY)
