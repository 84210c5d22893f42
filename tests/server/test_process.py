"""Servers as processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from colossus.server.environment import new_token, read
from colossus.server.local_server import LocalServer
from colossus.server.messages import ServerGone
from colossus.server.process import ServerFailed, ServerSettings, start_server, start_servers
from colossus.server.rpc_client import RpcClient

TOKEN = new_token()
ADDER = "helpers.server_handlers:Adder"


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


def until_ended(process: int, seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while Path(f"/proc/{process}").exists() and "Z" not in Path(f"/proc/{process}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, f"process {process} lives"
        time.sleep(0.01)


def test_one_that_fails_and_one_that_is_killed(tmp_path: Path) -> None:
    settings = {"handler": ADDER, "options": {"folder": str(tmp_path)}, "log": str(tmp_path / "log")}
    first, second = start_servers([0, 1], TOKEN, settings)
    try:
        clients = [RpcClient(server.endpoint, TOKEN, 0) for server in (first, second)]
        found = clients[0].call("environment").result(20).header
        assert found == {"threads": 1, "process": first.process}
        assert first.process != os.getpid()
        assert TOKEN.hex() not in Path(f"/proc/{first.process}/cmdline").read_text()
        assert TOKEN.hex().encode() not in Path(f"/proc/{first.process}/environ").read_bytes()
        os.kill(first.process, signal.SIGINT)
        assert first.alive
        assert first.failure is None
        began = time.monotonic()
        with pytest.raises(ServerGone, match="it has failed: KeyError: 'a shard is lost'"):
            clients[0].call("fail").result(10)
        with pytest.raises(ServerGone, match=r"server 1 at .* is gone: its connection "):
            clients[1].call("die").result(10)
        assert time.monotonic() - began < 5
        while first.alive or second.alive:
            assert time.monotonic() - began < 10
            time.sleep(0.01)
        assert (first.returncode, second.returncode) == (1, -signal.SIGKILL)
        assert (first.failure, second.failure) == ("KeyError: 'a shard is lost'", None)
        assert 'raise KeyError("a shard is lost")' in (tmp_path / "log").read_text()
        assert (tmp_path / "closed").exists()
        for client in clients:
            client.close()
    finally:
        first.close()
        second.close()


@pytest.mark.long
def test_a_handler_that_is_not_there() -> None:
    with pytest.raises(
        ServerFailed, match="server 3 could not be started: ModuleNotFoundError: No module named 'nowhere'"
    ):
        start_server(3, TOKEN, {"handler": "nowhere:Nothing"})


@pytest.mark.long
def test_the_ends_in_order(tmp_path: Path) -> None:
    settings = {"handler": ADDER, "options": {"folder": str(tmp_path)}}
    with start_server(0, TOKEN, settings) as server:
        client = RpcClient(server.endpoint, TOKEN, 0)
    assert server.returncode == 0
    assert (tmp_path / "closed").exists()
    with pytest.raises(ServerGone, match="it was closed"):
        client.call("echo").result(10)
    with start_server(0, TOKEN, settings) as server:
        os.kill(server.process, signal.SIGTERM)
        server._child.wait(10)
        assert server.returncode == 128 + signal.SIGTERM


PARENT = """
import json, os, sys, threading, time
from colossus.server import environment
from colossus.server.process import start_servers
token = environment.new_token()
def start():
    global servers
    servers = start_servers([0, 1], token, {"handler": "helpers.server_handlers:Adder"})
if sys.argv[1] == "thread":
    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    time.sleep(0.7)
else:
    start()
assert all(server.alive for server in servers)
assert "torch" not in sys.modules
variables = {}
environment.write([server.endpoint for server in servers], token, variables)
print(json.dumps(variables), flush=True)
time.sleep(100)
"""


@pytest.mark.long
@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM], ids=["kill", "term"])
def test_servers_end_with_their_parent(where: str, signum: int) -> None:
    parent = subprocess.Popen([sys.executable, "-c", textwrap.dedent(PARENT), where], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    given = read(json.loads(parent.stdout.readline()))
    clients = [RpcClient(endpoint, given.token, 0) for endpoint in given.endpoints]
    for client in clients:
        client.call("echo").result(20)
    parent.send_signal(signum)
    parent.wait()
    for endpoint, client in zip(given.endpoints, clients, strict=True):
        until_ended(endpoint["process"])
        with pytest.raises(ServerGone):
            client.call("echo").result(10)
    parent.stdout.close()


def test_what_cannot_be_started() -> None:
    with pytest.raises(ValueError, match="a server has no setting 'hots'; there are handler, options, host"):
        start_server(0, TOKEN, {"hots": "x"})
    with pytest.raises(ValueError, match="handler = 'nothing' is not 'module:name'"):
        ServerSettings.of({"handler": "nothing"})


def test_a_server_as_a_thread(tmp_path: Path) -> None:
    server = LocalServer(0, TOKEN, {"handler": ADDER, "options": {"length": 2, "folder": str(tmp_path)}})
    client = RpcClient(server.endpoint, TOKEN, 0)
    assert client.call("environment").result(10).header["process"] == os.getpid()
    assert server.alive
    with pytest.raises(ServerGone, match="it has failed: KeyError"):
        client.call("fail").result(10)
    assert server.failure == "KeyError: 'a shard is lost'"
    assert not server.alive
    client.close()
    server.close()
    assert (tmp_path / "closed").exists()
