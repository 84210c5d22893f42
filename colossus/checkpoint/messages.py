"""What the ranks of a save tell each other: through the store, so from any thread, and never for ever.

A rank that saves says every second that it lives. One that has not been heard of for `patience` seconds fails the save
of all: its process has ended or hangs, or its disk does.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from typing import Any, cast

from torch import distributed as dist

from colossus.checkpoint.errors import CheckpointError
from colossus.context.parallel_context import ParallelContext

#: seconds between two looks into the store: at first; at most; at most while somebody waits for the save
_FIRST_LOOK, _LONGEST_LOOK, _SHORT_LOOK = 0.002, 0.25, 0.02
#: seconds between two signs of life, at most
_SIGN_EVERY = 1.0
#: seconds in which a rank writes nothing (it flushes, say), after which it stops saying that it lives
_LONGEST_SILENCE = 900.0
#: seconds that rank 0 waits for all others to have read how a save ended
_LAST_WORD = 5.0


class RankProblem(CheckpointError):
    """What went wrong; on which rank is said."""


class Messages:
    """Of the saves of one writer. Every rank makes one.

    Args:
        on_sign: called when a rank that is waited for has given a sign of life.
        writer: in the keys, the same on all ranks: what an earlier writer has left is not taken for this one's.

    Attributes:
        patience: seconds without a sign of life, after which a rank is given up.
    """

    def __init__(self, context: ParallelContext, on_sign: Callable[[], None] = lambda: None, writer: str = "") -> None:
        self._on_sign, self._writer = on_sign, writer
        self._rank, self._ranks = context.rank, range(context.world_size)
        # of its own: one in which another thread waits answers nobody until it has what it waits for
        self._store = _connection(context) if context.world_size > 1 else None
        self.patience = context.timeout.total_seconds()
        self._number = 0
        self._moved_at = 0.0
        self._ended = threading.Event()
        self._signs: threading.Thread | None = None

    def begin(self) -> None:
        """A save begins on this rank; `end` or `share_outcome` ends it."""
        self._number += 1
        self.note_progress()
        if self._store is not None:
            self._ended = threading.Event()
            self._signs = threading.Thread(target=self._give_signs, args=(self._ended,), daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: others may then wait less long
                self._signs.start()

    def note_progress(self) -> None:
        self._moved_at = time.monotonic()

    def tell_part(self, part: dict[str, Any]) -> None:
        self._set(self._key("part", self._rank), part)

    def hear_parts(self, is_awaited: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """On rank 0: what the others told of their parts, rank by rank."""
        for rank in self._others:
            yield self._hear(self._key("part", rank), rank, is_awaited)

    def share_outcome(self, outcome: dict[str, Any] | None, is_awaited: Callable[[], bool]) -> dict[str, Any]:
        """How the save ended, as rank 0 tells; the last message of a save.

        Rank 0 waits for the others to have read it: its process may be the one that keeps the store.
        """
        if self.is_first:
            assert outcome is not None
            self._set(self._key("outcome"), outcome)
            self.end()
            self._clean_up()
            return outcome
        heard: dict[str, Any] = self._hear(self._key("outcome"), self._ranks[0], is_awaited)
        self.end()
        self._set(self._key("heard", self._rank), {})
        return heard

    def end(self) -> None:
        """No more signs of life."""
        self._ended.set()
        if self._signs is not None and self._signs.is_alive():
            self._signs.join()
        self._signs = None

    @property
    def _others(self) -> range:
        return self._ranks[1:]

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that completes the save."""
        return self._rank == 0

    # -- the store ----------------------------------------------------------------------------------------

    def _key(self, what: str, rank: int = 0) -> str:
        return f"checkpoint/{self._writer}/{self._number}/{what}/{rank}"

    def _set(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.set(key, base64.b64encode(zlib.compress(json.dumps(value).encode(), 1)).decode())

    def _get(self, key: str) -> Any:
        assert self._store is not None
        return json.loads(zlib.decompress(base64.b64decode(self._store.get(key))))

    def _hear(self, key: str, rank: int, is_awaited: Callable[[], bool]) -> Any:
        """What another rank tells, as soon as it does. Never waits inside of the store.

        A rank that has not begun is waited for as long as this one trains on.

        Raises:
            RankProblem: when nothing is heard of it.
        """
        assert self._store is not None
        look, sign, heard_at, next_look = _FIRST_LOOK, None, time.monotonic(), 0.0
        while not self._store.check([key]):
            now = time.monotonic()
            if now >= next_look:
                next_look = now + min(_SIGN_EVERY, self.patience / 10)
                signs = self._key("sign", rank)
                seen = self._get(signs) if self._store.check([signs]) else None
                if seen not in (sign, None):
                    self._on_sign()
                if seen != sign or (seen is None and not is_awaited()):
                    sign, heard_at = seen, now
                elif now - heard_at > self.patience:
                    raise RankProblem(
                        f"rank {rank} has not been heard of for {now - heard_at:.0f} s: its process has ended or hangs"
                    )
            self.note_progress()
            time.sleep(look)
            look = min(2 * look, _SHORT_LOOK if is_awaited() else _LONGEST_LOOK)
        return self._get(key)

    def _give_signs(self, ended: threading.Event) -> None:
        key, count = self._key("sign", self._rank), 0
        with contextlib.suppress(RuntimeError):  # the store has gone
            while time.monotonic() - self._moved_at < _LONGEST_SILENCE:
                count += 1
                self._set(key, count)
                if ended.wait(min(_SIGN_EVERY, self.patience / 10)):
                    return

    def _clean_up(self) -> None:
        """Delete the keys of a save once all ranks have read them: the store must not grow with every save."""
        if self._store is None:
            return
        others = self._others
        heard = [self._key("heard", rank) for rank in others]
        look, until = _FIRST_LOOK, time.monotonic() + min(_LAST_WORD, self.patience)
        while not self._store.check(heard) and time.monotonic() < until:
            time.sleep(look)
            look = min(2 * look, _SHORT_LOOK)
        ours = [self._key("outcome"), self._key("sign")]
        for key in [*ours, *(self._key(what, rank) for what in ("part", "heard", "sign") for rank in others)]:
            if key != self._key("outcome") or self._store.check(heard):
                self._store.delete_key(key)


def _connection(context: ParallelContext) -> dist.Store:
    store: Any = context.store()  # torch's stubs know no clone
    return cast(dist.Store, store.clone())
