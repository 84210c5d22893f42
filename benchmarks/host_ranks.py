"""Ranks forked into hosts, one on each: joined by gloo over the hosts' network, with torch imported once.

What a launched run is as a program (`benchmarks.hosts`) takes seconds of two cores to start; this takes a tenth.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import torch

from benchmarks import common
from benchmarks.hosts import INTERFACE, PORT, Host
from colossus.context.local_ranks import RanksFailed

# before the first operation: a parent that has run threads leaves forked children without them, and they hang
torch.set_num_threads(1)


def run_on_hosts(hosts: Sequence[Host], body: Callable[[int], Any]) -> list[Any]:
    """``body(rank)`` on each host, as rank 0, 1, .. of a torch world that the environment describes.

    Returns:
        What each has returned.

    Raises:
        RanksFailed: with the traceback of the first rank that failed; all others are ended.
    """
    pids: list[int] = []
    pipes: dict[Connection, int] = {}
    results: dict[int, Any] = {}
    try:
        for rank, host in enumerate(hosts):
            here, there = Pipe(duplex=False)
            pid = host.namespaces.fork()
            if pid == 0:
                _be_rank(rank, hosts, body, there)
            there.close()
            pids.append(pid)
            pipes[here] = rank
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                rank = pipes.pop(pipe)
                try:
                    is_done, value = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    is_done, value = False, "it ended without an answer"
                if not is_done:
                    raise RanksFailed({rank: value}, {}, [])
                results[rank] = value
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for pipe in pipes:
            pipe.close()
    return [results[rank] for rank in range(len(hosts))]


def measure_each(program: str, names: Iterable[str], measure: Callable[[str], Any]) -> tuple[list[Any], bool]:
    """Return what ``measure(name)`` returned for each name, and whether ranks of some name failed; they are told."""
    began, rows, failed = time.monotonic(), [], False
    for name in names:
        common.progress(f"{time.monotonic() - began:4.0f} s  {name}")
        try:
            rows.append(measure(name))
        except RanksFailed as error:  # the others are measured
            failed = True
            print(f"{program}: {name}: {error}", file=sys.stderr)
    common.progress("")
    return rows, failed


def machine_words(began: float) -> str:
    """Return how long a run took and how busy the machine is."""
    return f"{time.monotonic() - began:.0f} s, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"


def _be_rank(rank: int, hosts: Sequence[Host], body: Callable[[int], Any], pipe: Connection) -> None:
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's end is theirs
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(len(hosts)), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1",
            MASTER_ADDR=hosts[0].name, MASTER_PORT=str(PORT), GLOO_SOCKET_IFNAME=INTERFACE,
        )  # fmt: skip
        answer = True, body(rank)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send_bytes(pickle.dumps(answer))
    # rank 0 holds the store: it lives until the parent has all answers
    signal.pause()
    os._exit(0)
