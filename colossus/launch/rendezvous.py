"""The rendezvous of a run's launchers before each of its attempts, by torch's elastic."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import threading
import time
from typing import Any
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossus.launch.auto_plan import NodeRange

#: the time after which the user is told that the launcher waits for other nodes
SAY_SECONDS = 15.0

#: the longest wait of a node for the others; and for a place in a running job, where their number may vary
_JOIN_SECONDS, _WAIT_SECONDS = 600, 7 * 24 * 3600

#: the interval of heartbeats in the rendezvous, and the number of missed ones after which a node counts as gone
_ALIVE_SECONDS, _MISSED = 2, 5

#: the longest wait of the launcher with the store for the goodbyes of the others
_FAREWELL_SECONDS = 10.0

#: without it, torch shares the first round's store, and later rounds would wait for an address that no node sets
_NO_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


class Rendezvous:
    """The rendezvous of one launcher, which connects at the first `join`.

    Args:
        endpoint: ``host:port``; the first launcher there that can listen holds the store of the whole run.
        nodes: the smallest and the largest number of nodes.
        rejoin_seconds: the time for which a round with the smallest number of nodes waits for more.

    Attributes:
        holds_store: whether the store of the run is in this process.
        peers: the number of this node in the last round, and those of the nodes that lived at its end; None where the
            store had gone by then.
    """

    def __init__(self, endpoint: str, nodes: NodeRange, rejoin_seconds: float) -> None:
        self.endpoint, self.nodes = endpoint, nodes
        self._rejoin_seconds = max(1, round(rejoin_seconds))
        self._handler: RendezvousHandler | None = None
        self.holds_store = self._has_joined = False
        self.peers: tuple[int, tuple[int, ...]] | None = None
        self._store: Any = None

    def join(self) -> tuple[Any, int, int]:
        """Leave the previous round, and wait until the next is complete.

        A round is complete when the largest number of nodes is there, or the smallest number and no other node has come
        for ``rejoin_seconds``.

        Returns:
            A store of the round's own, this node's number in it, from 0, and the number of nodes.

        Raises:
            RuntimeError: the nodes do not come together in time, or the run is over.
        """
        text = f"colossus: waiting at {self.endpoint} until all {self.nodes.max_nodes} nodes are there"
        if self.nodes.min_nodes < self.nodes.max_nodes:
            text += f", or for {self._rejoin_seconds} s when {self.nodes.min_nodes} are"
        timer = threading.Timer(SAY_SECONDS, print, [text], {"file": sys.stderr, "flush": True})
        timer.daemon = True
        timer.start()
        before = os.environ.get(_NO_SHARED_STORE)
        os.environ[_NO_SHARED_STORE] = "1"
        try:
            if self._handler is None:
                self._handler, self.holds_store = self._make_handler()
            info: Any = self._handler.next_rendezvous()
        except RendezvousClosedError:
            raise RuntimeError("the run there is over: one of its nodes has ended it") from None
        except RendezvousConnectionError as error:
            if not self._has_joined:
                raise RuntimeError(f"no launcher can be reached there: {_first_line(error)}") from error
            raise RuntimeError("the launcher that held the rendezvous has gone, and with it the run") from error
        except RendezvousError as error:
            raise RuntimeError(_first_line(error) or "not all nodes have come in time") from error
        finally:
            timer.cancel()
            del os.environ[_NO_SHARED_STORE]
            if before is not None:
                os.environ[_NO_SHARED_STORE] = before
        self._has_joined, self._store, self.peers = True, info.store, None
        return info.store, info.rank, info.world_size

    def num_newcomers(self) -> int:
        """Return the number of nodes that have come after this round was complete."""
        assert self._handler is not None
        with contextlib.suppress(RendezvousError, RuntimeError):
            return self._handler.num_nodes_waiting()
        return 0

    @property
    def can_leave(self) -> bool:
        """Return whether the other nodes can continue without this launcher."""
        return self.nodes.min_nodes < self.nodes.max_nodes and not self.holds_store

    def close(self) -> None:
        """End the rendezvous, and with it the run for all nodes. The launcher with the store is the last to leave."""
        if self._handler is None:
            return
        with contextlib.suppress(RendezvousError, RuntimeError):
            self._handler.shutdown()
        if self.peers is None:
            return
        (node, others), deadline = self.peers, time.monotonic() + _FAREWELL_SECONDS
        goodbyes = [f"colossus/goodbye/{other}" for other in others]
        with contextlib.suppress(RuntimeError):
            self._store.set(f"colossus/goodbye/{node}", "")
            while self.holds_store and not self._store.check(goodbyes) and time.monotonic() < deadline:
                time.sleep(0.02)

    def _make_handler(self) -> tuple[RendezvousHandler, bool]:
        """Make the rendezvous handler of torch's elastic, and return it, and whether its store is in this process."""
        # torch's loggers set their own levels, so they are silenced here: `colossus.launch.report` says it once
        logger = logging.getLogger("torch.distributed.elastic")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        options: dict[str, Any] = {
            "join_timeout": _JOIN_SECONDS if self.nodes.min_nodes == self.nodes.max_nodes else _WAIT_SECONDS,
            "last_call_timeout": self._rejoin_seconds,
            "keep_alive_interval": _ALIVE_SECONDS,
            "keep_alive_max_attempt": _MISSED,
        }
        for is_host in (True, False) if _is_this_host(self.endpoint) else (False,):
            try:
                parameters = RendezvousParameters(
                    "c10d", self.endpoint, "colossus", *self.nodes, is_host=is_host, **options
                )
                return get_rendezvous_handler(parameters), is_host
            except RendezvousConnectionError:
                if not is_host:
                    raise
        raise AssertionError("a rendezvous is made or it raises")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _is_this_host(endpoint: str) -> bool:
    """Return whether the endpoint's host is this machine, which can then listen at its address."""
    try:
        host = urlsplit(f"//{endpoint}").hostname
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except (OSError, ValueError):
        return False
    return True
