"""Ports of this host for what a test starts."""

import random
import socket


def free_port() -> int:
    """A port that nobody holds and that the kernel gives to no connection by itself: those begin at 32768, and one
    that is free now may be taken by the end of another test's connection before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError("none of 100 ports is free")
