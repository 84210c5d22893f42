"""Where the launchers of a run meet: a store that one of them holds."""

from __future__ import annotations

import os
import socket
import sys
from threading import Timer
from urllib.parse import urlsplit

from torch.distributed.elastic.rendezvous import RendezvousConnectionError, RendezvousHandler, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from colossus import machine

MEET_SECONDS = 15.0
"""How long the others may take to come before the user hears that they are waited for."""


def awaiting(endpoint: str, nodes: int) -> Timer:
    """Says that nodes are waited for, unless it is cancelled in time."""

    def say() -> None:
        print(f"colossus: waiting at {endpoint} until all {nodes} nodes are there", file=sys.stderr, flush=True)

    timer = Timer(MEET_SECONDS, say)
    timer.daemon = True
    timer.start()
    return timer


def meet(endpoint: str, nodes: int) -> tuple[RendezvousHandler, bool]:
    """The rendezvous, and whether this process holds its store: the first that can listen there does."""
    for holds_store in (True, False) if _is_here(endpoint) else (False,):
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=endpoint,
            run_id="colossus",
            min_nodes=nodes,
            max_nodes=nodes,
            local_addr="127.0.0.1" if nodes == 1 else None,
            is_host=holds_store,
        )
        try:
            return get_rendezvous_handler(parameters), holds_store
        except RendezvousConnectionError:
            if not holds_store:
                raise
    raise AssertionError("a rendezvous is made or it raises")


def own_address(endpoint: str) -> str:
    """The address of this machine from which it reaches the endpoint: the loopback's, where the endpoint is here and
    its name means that."""
    return machine.address_towards(urlsplit(f"//{endpoint}").hostname or "") or "127.0.0.1"


def use_interface_of(address: str) -> None:
    """Have gloo, on the ranks to be started, use the interface with this address, unless the user has chosen one.

    By itself it takes the address that the machine's own name has, which may be one that the others cannot reach.
    """
    interface = machine.interface_of(address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _is_here(endpoint: str) -> bool:
    """Whether the endpoint's host is this machine: then one can listen at its address."""
    try:
        host = urlsplit(f"//{endpoint}").hostname
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except (OSError, ValueError):
        return False
    return True
