"""Bytes that no worker sends: a server drops who sends them, and goes on for the others."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.server_handlers import Adder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossus.comm import door
from colossus.comm.channel import read_exactly
from colossus.comm.peer_wire import WireError
from colossus.server import wire
from colossus.server.arrays import pack, unpack
from colossus.server.connect import TurnedAway, greet
from colossus.server.entrance import unix_address
from colossus.server.environment import new_token
from colossus.server.frame_parser import Frame, FrameParser
from colossus.server.rpc import Refused, RpcClient, RpcServer, ServerGone

TOKEN = new_token()
MOST_BYTES = 1 << 20
STRANGE = 99


@pytest.fixture(scope="module")
def server() -> Iterator[RpcServer]:
    handler = Adder()
    server = RpcServer(handler.handle, TOKEN, on_gone=handler.on_gone, most_bytes=MOST_BYTES)
    yield server
    server.close()


def serves(server: RpcServer) -> None:
    client = RpcClient(server.endpoint, TOKEN, 0)
    large = torch.arange(10_000.0)
    assert torch.equal(client.call("echo", {}, [large]).wait(10).arrays[0], large)
    client.close()


def hello(**changes: Any) -> wire.Hello:
    values = dict(worker=STRANGE, incarnation=secrets.token_bytes(16), is_new=True, takes_segments=True) | changes
    return wire.Hello.make(values.pop("worker"), values.pop("incarnation"), **values)


def raw_stream(server: RpcServer, local: bool = True) -> socket.socket:
    if local:
        stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        stream.settimeout(10)
        stream.connect(unix_address(server.endpoint["unix"]))
        return stream
    return socket.create_connection((server.endpoint["host"], server.endpoint["port"]), 10)


def until_closed(stream: socket.socket, seconds: float = 10.0) -> bytes:
    stream.settimeout(seconds)
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while received := stream.recv(1 << 16):
            came += received
    return came


def welcomed(server: RpcServer, local: bool = True) -> socket.socket:
    """A worker of the run, up to here."""
    endpoint = server.endpoint if local else server.endpoint | {"unix": None}
    for _ in range(1000):
        try:
            stream, _ = greet(endpoint, TOKEN, hello(), 10.0)
        except TurnedAway:  # the one before is not forgotten yet
            time.sleep(0.005)
            continue
        stream.settimeout(10)
        return stream
    raise AssertionError("the server does not forget")


# -- strangers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local", [True, False], ids=["unix", "tcp"])
@pytest.mark.parametrize(
    "first",
    [b"GET / HTTP/1.1\r\n" + b"x" * 200, bytes(wire.HELLO_BYTES), b"\xff" * 4096],
    ids=["http", "zeros", "ones"],
)
def test_garbage_instead_of_a_greeting(server: RpcServer, first: bytes, local: bool) -> None:
    stream = raw_stream(server, local)
    stream.sendall(first)
    came = until_closed(stream)[wire.CHALLENGE_BYTES :]
    assert came[:1] in (bytes([wire.STRANGER]), b"")  # closed with bytes unread, what was sent may be lost
    serves(server)


def test_a_replayed_greeting_is_no_greeting(server: RpcServer) -> None:
    stream = raw_stream(server)
    challenge = wire.read_challenge(read_exactly(stream, wire.CHALLENGE_BYTES))
    said = hello().pack(TOKEN, challenge)
    stream.sendall(said)
    assert read_exactly(stream, wire.WELCOME_BYTES)[0] == wire.WELCOME
    again = raw_stream(server)
    again.sendall(said)
    assert until_closed(again)[wire.CHALLENGE_BYTES] == wire.STRANGER
    changed = raw_stream(server)
    challenge = wire.read_challenge(read_exactly(changed, wire.CHALLENGE_BYTES))
    said = bytearray(hello().pack(TOKEN, challenge))
    said[6] ^= 1  # another worker's number
    changed.sendall(said)
    assert until_closed(changed)[0] == wire.STRANGER
    stream.close()
    serves(server)


def test_a_server_without_the_token_gets_nothing() -> None:
    """Somebody listens in the place of the server."""
    listener = socket.create_server(("127.0.0.1", 0))
    endpoint = dict(
        index=2, host="127.0.0.1", port=listener.getsockname()[1], unix=None, host_id="", process=os.getpid()
    )

    def answer() -> None:
        stream, _ = listener.accept()
        stream.sendall(wire.make_challenge()[1])
        theirs = wire.Hello(1, True, True, bytes(16), bytes(32))
        stream.sendall(wire.Welcome.pack(wire.WELCOME, False, "", new_token(), theirs))
        until_closed(stream)

    with listener:
        import threading

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(Refused, match="what answers there does not know the token of this run"):
            RpcClient(endpoint, TOKEN, 1)
        thread.join()


def test_silent_strangers_keep_nobody_out(server: RpcServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "GREETING_SECONDS", 1.0)
    streams = [raw_stream(server) for _ in range(300)]  # more than may wait
    half = [raw_stream(server, local=False) for _ in range(3)]
    for stream in half:
        stream.sendall(wire.MAGIC)
    serves(server)
    began = time.monotonic()
    for stream in streams + half:
        assert len(until_closed(stream)) == wire.CHALLENGE_BYTES
    assert time.monotonic() - began < 8.0


# -- workers that send what none sends ----------------------------------------------------------------------------


def request(arrays: Any, data: bytes = b"", sequence: int = 1, **changes: Any) -> bytes:
    text = wire.encode({"o": "echo", "h": {}, "a": arrays} | changes)
    return wire.frame(wire.REQUEST, text, sequence=sequence, data_bytes=len(data)) + data


HEAD = struct.Struct("<B3xIIQQ")
WRONG: dict[str, tuple[bytes, str]] = {
    "a kind": (HEAD.pack(200, 0, 0, 0, 0), "a frame of kind 200"),
    "a kind of servers": (wire.frame(wire.FAILED, b"1"), "which is a server's"),
    "a long header": (HEAD.pack(0, 1 << 31, 0, 0, 0), "bytes, where at most"),
    "much data": (HEAD.pack(0, 2, 0, 0, 1 << 62) + b"{}", "bytes, where at most"),
    "no json": (wire.frame(wire.REQUEST, b"{{{{"), "no JSON"),
    "deep json": (wire.frame(wire.REQUEST, b"[" * 1_000_000), "no JSON"),
    "a long number": (wire.frame(wire.REQUEST, b"1" * 100_000), "no JSON"),
    "no object": (wire.frame(wire.REQUEST, b"[]"), "without an operation"),
    "no operation": (wire.frame(wire.REQUEST, b'{"o": 1, "h": {}}'), "without an operation"),
    "a dtype": (request([["float8", [2]]], b"12"), "dtype 'float8'"),
    "an object's dtype": (request([["object", [1]]], bytes(64)), "dtype 'object'"),
    "negative": (request([["float64", [-1]]], bytes(64)), "negative or huge"),
    "negative twice": (request([["float64", [-1, -1]]], bytes(64)), "negative or huge"),
    "huge": (request([["float64", [1 << 70]]], bytes(64)), "negative or huge"),
    "a huge product": (request([["float64", [1 << 31, 1 << 31]]], bytes(64)), "huge shape"),
    "huge and empty": (request([["float64", [1 << 62, 1 << 62, 0]]]), "huge shape"),
    "true": (request([["uint8", [True]]], bytes(64)), "no number"),
    "more than fits": (request([["uint8", [MOST_BYTES + 1]]], bytes(64)), "arrays of more than"),
    "longer than said": (request([["float64", [1]]], bytes(128)), "another length"),
    "shorter than said": (request([["float64", [100]]], bytes(64)), "another length"),
    "said and not sent": (request([["float64", [100]]]), "a segment of shared memory that is not there"),
    "no arrays": (request({"a": 1}, bytes(64)), "arrays that are no list"),
    "a string": (request(["float64"], bytes(64)), "dtype and shape"),
    "a gap": (request([], sequence=7), "request 7 after request 0"),
    "a huge sequence": (request([], sequence=(1 << 64) - 1), "sequence"),
    "a segment": (HEAD.pack(wire.PING, 0, 0, 0, 0) + wire.frame(wire.SEGMENT, b'["a", 1]'), "descriptor"),
    "acknowledged": (wire.frame(wire.ACKNOWLEDGE, b'[1, "2"]'), "list of sequences"),
    "resumed": (wire.frame(wire.RESUME, b"7"), "list of sequences"),
    "forgotten": (wire.frame(wire.FORGET, b"[[]]"), "list of numbers"),
    "data of a ping": (wire.frame(wire.PING, b"{}", data_bytes=3) + b"abc", "belong to no request"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_worker_that_sends_what_none_sends_is_given_up(server: RpcServer, case: str) -> None:
    sent, message = WRONG[case]
    me = hello()
    for _ in range(1000):
        try:
            stream, _ = greet(server.endpoint, TOKEN, me, 10.0)
            break
        except TurnedAway:
            time.sleep(0.005)
    stream.settimeout(10)
    with contextlib.suppress(BrokenPipeError):
        stream.sendall(sent)
    until_closed(stream)
    again = wire.Hello.make(STRANGE, me.incarnation, is_new=False, takes_segments=True)
    if message == "descriptor":  # a system without files would do that: it may come again
        greet(server.endpoint, TOKEN, again, 10.0)[0].close()
    else:
        with pytest.raises(TurnedAway, match=message):
            greet(server.endpoint, TOKEN, again, 10.0)
    serves(server)


def files(make: Callable[[], int], size: int, number: int = 1) -> Callable[[socket.socket], None]:
    def send(stream: socket.socket) -> None:
        descriptors = [make() for _ in range(number)]
        socket.send_fds(stream, [wire.frame(wire.SEGMENT, wire.encode([1, size]))], descriptors)
        for descriptor in descriptors:
            os.close(descriptor)

    return send


def unsealed() -> int:
    descriptor = os.memfd_create("test")
    os.truncate(descriptor, 1 << 16)
    return descriptor


def a_pipe() -> int:
    read, write = os.pipe()
    os.close(write)
    return read


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory without a name is Linux's")
@pytest.mark.parametrize(
    "send",
    [files(unsealed, 1 << 16), files(unsealed, 1 << 40), files(a_pipe, 4096), files(unsealed, 1, number=100)],
    ids=["not sealed", "too small", "a pipe", "many"],
)
def test_segments_that_are_none(server: RpcServer, send: Callable[[socket.socket], None]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    stream = welcomed(server)
    send(stream)
    until_closed(stream)
    stream.close()
    serves(server)
    deadline = time.monotonic() + 5
    while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before


@given(st.binary(min_size=1, max_size=400), st.integers(0, 10), st.booleans())
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_any_bytes_after_a_greeting(server: RpcServer, garbage: bytes, kind: int, framed: bool) -> None:
    stream = welcomed(server, local=kind % 2 == 0)
    stream.sendall(wire.frame(kind, garbage, sequence=1) if framed else garbage)
    stream.shutdown(socket.SHUT_WR)
    until_closed(stream)
    stream.close()
    assert server._end is None


def test_a_server_serves_after_all_this(server: RpcServer) -> None:
    serves(server)


# -- the parsers ------------------------------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just("float32"),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON | st.lists(st.tuples(st.sampled_from(["float32", "int8"]), st.lists(st.integers(-1, 1 << 65))).map(list)))
@settings(max_examples=40, deadline=None)
def test_a_description_is_understood_or_refused(described: Any) -> None:
    try:
        packing = unpack(described, 1 << 16)
    except WireError:
        return
    assert packing.describe() == described
    assert sum(packing.sizes) <= 1 << 16
    views = packing.views(torch.zeros(packing.num_bytes, dtype=torch.uint8))
    assert [list(view.shape) for view in views] == [shape for _, shape in described]


DTYPES = [torch.float64, torch.bfloat16, torch.int16, torch.bool, torch.complex64, torch.uint8]


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=3)), max_size=4),
    st.integers(1, 999),
    st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_frames_come_whole_however_they_are_cut(kinds: list[Any], step: int, scatter: bool) -> None:
    tensors = [(torch.rand(shape) * 9).to(dtype) for dtype, shape in kinds]
    large = torch.rand(9000)
    sent = b""
    for group in (tensors, [large], tensors):
        packing = pack(group)
        buffer = torch.empty(packing.num_bytes, dtype=torch.uint8)
        packing.fill(buffer, group)
        text = wire.encode({"a": packing.describe()})
        sent += wire.frame(wire.REQUEST, text, sequence=3, data_bytes=packing.num_bytes) + bytes(buffer.numpy())
        sent += wire.frame(wire.PING)

    def allocate(head: wire.Head, header: Any) -> tuple[list[memoryview], Any]:
        packing = unpack(header["a"], 1 << 20)
        into = [torch.empty(shape, dtype=dtype) for dtype, shape in zip(packing.dtypes, packing.shapes, strict=True)]
        if scatter:
            pieces = packing.targets(into)
            assert pieces is not None
            return pieces, into
        memory = torch.empty(packing.num_bytes, dtype=torch.uint8)
        return [memoryview(memory.numpy())], packing.views(memory)  # type: ignore[arg-type]

    parser, frames, at = FrameParser(1 << 20, allocate), list[Frame](), 0
    while at < len(sent):
        room = parser.room()
        size = min(step, len(room), len(sent) - at)
        room[:size] = sent[at : at + size]
        frames += parser.advance(size)
        at += size
    assert [frame.head.kind for frame in frames] == [wire.REQUEST, wire.PING] * 3
    for frame, group in zip(frames[::2], (tensors, [large], tensors), strict=True):
        came = frame.context or []
        assert [(x.dtype, x.shape) for x in came] == [(x.dtype, x.shape) for x in (group if frame.context else [])]
        assert all(torch.equal(a, b) for a, b in zip(came, group, strict=False))


def test_what_a_client_cannot_send_is_said_where_it_is_called(server: RpcServer) -> None:
    client = RpcClient(server.endpoint, TOKEN, 5)
    with pytest.raises(ValueError, match="data of JSON"):
        client.call("echo", {"x": object()})
    with pytest.raises(ValueError, match=r"dtype torch\.float8_e5m2"):
        client.call("echo", {}, [torch.zeros(2).to(torch.float8_e5m2)])
    with pytest.raises(ValueError, match=r"layout torch\.sparse_coo"):
        client.call("echo", {}, [torch.eye(2).to_sparse()])
    with pytest.raises(ValueError, match="what is large goes into the arrays"):
        client.call("echo", {"x": "y" * (1 << 20)})
    with pytest.raises(ValueError, match=r"the reply has arrays .*'float32', \[2, 3\].*, where into has .*\[3, 2\]"):
        client.call("echo", {}, [torch.zeros(2, 3)], [torch.zeros(3, 2)]).wait(10)
    assert client.call("echo", {"still": True}).wait(10).header == {"still": True}
    client.close()
    with pytest.raises(RuntimeError, match="by a client that was closed"):
        client.call("echo")
    with pytest.raises(ServerGone, match="nothing listens there"):
        RpcClient(server.endpoint | {"unix": "@nowhere", "port": 1}, TOKEN, 5)
