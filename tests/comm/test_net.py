"""Streams of frames: what is sent comes whole, only who knows the key comes in, and both ends hear of the end."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from colossus.comm import net
from colossus.comm.listener import Listener, dial
from colossus.comm.net import Stream, WireError

KEY = secrets.token_bytes(32)
MOST = 1 << 24
CHALLENGE = PROOF = 32


class Inbox:
    """Keeps what comes."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, bytes]] = []
        self.ended: list[str | None] = []
        self._payload = bytearray()

    def allocate(self, head: bytes, size: int) -> Sequence[memoryview]:
        if size > MOST:
            raise WireError(f"{size} bytes")
        self._payload = bytearray(size)
        cut = size // 3
        return [memoryview(self._payload)[:cut], memoryview(self._payload)[cut:]]

    def on_frame(self, head: bytes) -> None:
        if head == b"trouble":
            raise KeyError("no such thing")
        self.frames.append((head, bytes(self._payload)))
        self._payload = bytearray()

    def on_end(self, reason: str | None) -> None:
        self.ended.append(reason)


def until(true: Callable[[], object], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.002)


class Place:
    """A listener, and what has come through the streams that it has let in."""

    def __init__(self, silence: float | None = None) -> None:
        self.streams: list[Stream] = []
        self.inboxes: list[Inbox] = []
        self._silence = silence
        self.listener = Listener("127.0.0.1", KEY, self._take, "the place")

    def _take(self, stream: Stream) -> None:
        self.streams.append(stream)
        self.inboxes.append(Inbox())
        stream.start(self.inboxes[-1], self._silence)

    def enter(self, about: bytes = b"me") -> tuple[Stream, Inbox, Stream, Inbox]:
        """A new stream: both ends of it and what comes to each."""
        number, mine = len(self.streams), Inbox()
        stream = dial(self.listener.address, KEY, about)
        stream.start(mine, self._silence)
        until(lambda: len(self.streams) > number)
        return stream, mine, self.streams[number], self.inboxes[number]


@contextmanager
def place(silence: float | None = None) -> Iterator[Place]:
    found = Place(silence)
    try:
        yield found
    finally:
        found.listener.close()
        for stream in found.streams:
            stream.abort()


def serves(found: Place) -> None:
    """Somebody new is let in and understood."""
    stream, _, theirs, inbox = found.enter(b"somebody")
    assert theirs.about == b"somebody"
    stream.send(b"hello")
    until(lambda: inbox.frames)
    stream.close(5.0)
    until(lambda: inbox.ended)
    assert inbox.ended == [None]


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(st.binary(max_size=40), st.integers(0, 40_000)), max_size=12), st.integers(0, 2))
def test_frames_come_whole_and_in_order_both_ways(frames: list[tuple[bytes, int]], large: int) -> None:
    payloads = [(head, os.urandom(size)) for head, size in frames]
    payloads += [(b"large", os.urandom(3_000_001))] * large
    with place() as found:
        mine, my_inbox, theirs, their_inbox = found.enter()
        written: list[int] = []
        for number, (head, data) in enumerate(payloads):
            half = len(data) // 2
            mine.send(head, [memoryview(data)[:half], memoryview(data)[half:]], lambda n=number: written.append(n))
            theirs.send(data[:5], [memoryview(head)])
        until(lambda: len(their_inbox.frames) == len(my_inbox.frames) == len(payloads))
        assert their_inbox.frames == payloads
        assert my_inbox.frames == [(data[:5], head) for head, data in payloads]
        until(lambda: written == list(range(len(payloads))))


def test_the_last_words_come_before_the_farewell() -> None:
    with place() as found:
        mine, my_inbox, theirs, their_inbox = found.enter()
        data = os.urandom(1 << 22)
        for _ in range(5):
            mine.send(b"", [memoryview(data)])
            theirs.send(b"", [memoryview(data)])
        mine.close(10.0)
        until(lambda: their_inbox.ended)
        assert their_inbox.ended == [None]
        assert [payload for _, payload in their_inbox.frames] == [data] * 5
        done: list[str] = []
        for stream in (mine, theirs):  # nobody takes more, and who sends is told
            stream.send(b"late", [memoryview(data)], lambda: done.append("done"))
        assert done == ["done"] * 2
        assert my_inbox.ended == []


# -- strangers ------------------------------------------------------------------------------------------------


def connected(found: Place) -> socket.socket:
    sock = socket.create_connection(found.listener.address)
    sock.settimeout(20.0)
    return sock


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = sock.recv(size - len(data))
        assert received
        data += received
    return data


def rest(sock: socket.socket) -> bytes:
    """What comes until the other end closes."""
    came = b""
    with contextlib.suppress(ConnectionResetError):
        while received := sock.recv(1 << 16):
            came += received
    return came


@pytest.mark.parametrize(
    "said",
    [b"", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 9, bytes(4096), b"\xff" * 4096],
    ids=["nothing", "http", "zeros", "ones"],
)
def test_garbage_instead_of_a_greeting(found_server: Place, said: bytes) -> None:
    with connected(found_server) as sock:
        with contextlib.suppress(OSError):  # closed already
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
        assert len(rest(sock)) in (0, CHALLENGE)  # closed with bytes unread, what was sent may be lost
    serves(found_server)


@pytest.fixture(scope="module")
def found_server() -> Iterator[Place]:
    with place() as found:
        yield found


def test_a_recorded_greeting_is_refused(found_server: Place) -> None:
    """All that a dialer and a listener have said is of no use in another connection, to whomever it is said."""
    recorded: dict[str, bytes] = {}
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:
            theirs, _ = between.accept()
            with theirs, connected(found_server) as sock:
                recorded["challenge"] = exactly(sock, CHALLENGE)
                theirs.sendall(recorded["challenge"])
                recorded["greeting"] = exactly(theirs, CHALLENGE + 2 + PROOF + 2)
                sock.sendall(recorded["greeting"])
                recorded["answer"] = exactly(sock, PROOF)
                theirs.sendall(recorded["answer"])
                rest(theirs)

        thread = threading.Thread(target=relay)
        thread.start()
        dial(between.getsockname()[:2], KEY, b"me").abort()
        thread.join()
        number = len(found_server.streams)
        with connected(found_server) as sock:  # in the place of the dialer
            exactly(sock, CHALLENGE)
            sock.sendall(recorded["greeting"])
            assert rest(sock) == b""

        def answer() -> None:  # in the place of the listener
            theirs, _ = between.accept()
            with theirs:
                theirs.sendall(recorded["challenge"])
                exactly(theirs, CHALLENGE + 2 + PROOF + 2)
                theirs.sendall(recorded["answer"])
                rest(theirs)

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(WireError, match="does not know the key"):
            dial(between.getsockname()[:2], KEY, b"me")
        thread.join()
        assert len(found_server.streams) == number
    serves(found_server)


def test_another_key_and_another_word_of_oneself_are_refused(found_server: Place) -> None:
    number = len(found_server.streams)
    with pytest.raises(WireError, match="does not take the key"):
        dial(found_server.listener.address, secrets.token_bytes(32))
    with socket.create_server(("127.0.0.1", 0)) as between:

        def relay() -> None:  # a word is changed on its way
            theirs, _ = between.accept()
            with theirs, connected(found_server) as sock:
                theirs.sendall(exactly(sock, CHALLENGE))
                greeting = exactly(theirs, CHALLENGE + 2 + PROOF + 2)
                sock.sendall(greeting[:-2] + b"yo")
                rest(sock)

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(WireError):
            dial(between.getsockname()[:2], KEY, b"me")
        thread.join()
    assert len(found_server.streams) == number
    serves(found_server)


def test_what_no_one_of_ours_sends_ends_the_stream_alone() -> None:
    with place() as found:
        good, _, _, good_inbox = found.enter()
        for bad, told in (
            (net._FRAME.pack(1 << 21, 0), "a head of 2097152 bytes"),
            (net._FRAME.pack(3, MOST + 1) + b"abc", "16777217 bytes"),
            (net._FRAME.pack(7, 0) + b"trouble", "could not be taken: KeyError: 'no such thing'"),
        ):
            stream, _, _, inbox = found.enter()
            os.write(stream._sock.fileno(), bad)
            until(lambda inbox=inbox: inbox.ended)
            assert told in str(inbox.ended[0])
        good.send(b"still here")
        until(lambda: good_inbox.frames == [(b"still here", b"")])


# -- ends -----------------------------------------------------------------------------------------------------


def test_a_connection_that_breaks_is_told_at_both_ends() -> None:
    with place() as found:
        stream, inbox, _, their_inbox = found.enter()
        data = os.urandom(1 << 22)
        done: list[int] = []
        for number in range(30):
            stream.send(b"", [memoryview(data)], lambda number=number: done.append(number))
        stream._sock.shutdown(socket.SHUT_RDWR)
        until(lambda: inbox.ended and their_inbox.ended)
        assert [str(each.ended[0]).startswith("its connection ") for each in (inbox, their_inbox)] == [True, True]
        until(lambda: done == list(range(30)))  # memory is free again
        serves(found)


def test_silence_is_told_where_both_give_signs_of_life() -> None:
    with place(silence=1.0) as found:
        _, quiet, _, their_quiet = found.enter()
        silent, _, _, inbox = found.enter()
        net.running_loop().call(lambda: [task.cancel() for task in silent._tasks])
        until(lambda: inbox.ended)
        assert inbox.ended == ["it gave no sign of life for 1 s"]
        time.sleep(0.5)
        assert quiet.ended == their_quiet.ended == []


def test_a_forked_process_holds_no_stream_and_has_a_loop_of_its_own() -> None:
    with place() as found:
        stream, _, _, inbox = found.enter()
        ready, go = os.pipe()
        child = os.fork()
        if not child:
            with contextlib.suppress(BaseException):
                os.read(ready, 1)
                with place() as own:
                    serves(own)
                os._exit(0)
            os._exit(1)
        stream._sock.shutdown(socket.SHUT_RDWR)  # the child would keep the connection open
        until(lambda: inbox.ended)
        serves(found)
        os.write(go, b"g")
        assert os.waitpid(child, 0)[1] == 0
        os.close(ready)
        os.close(go)
