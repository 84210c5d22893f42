"""How fast tensors go to a parameter server and back, beside gloo's send and receive.

    python -m benchmarks.server_transport [--megabytes 0.0625 1 16 64] [--seconds 0.5]

All in one run, one after the other, between two processes of this machine. A push has one tensor and an empty reply, a
pull none and one tensor: GB/s of its bytes, over the time of the whole call (with the copies into the transport
and out of it). Gloo: the same bytes there, and one number back. Round trips: calls without arrays, one at a time, and
64 under way.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__" and not __package__:  # as a file, in place of a module
    sys.path[0] = str(ROOT)

import torch  # noqa: E402
from torch import distributed as dist  # noqa: E402

from colossus.context.local_ranks import run_local_ranks  # noqa: E402
from colossus.server.client import Servers  # noqa: E402
from colossus.server.process import new_token, start_servers  # noqa: E402
from colossus.server.rpc_client import RpcClient  # noqa: E402

_UNDER_WAY = 64


def repeated(seconds: float, action: Callable[[], object]) -> float:
    """Seconds of one, the best of three rounds."""
    action()
    best = float("inf")
    for _ in range(3):
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds / 3:
            action()
            count += 1
        best = min(best, (time.perf_counter() - began) / count)
    return best


def measure(client: RpcClient, megabytes: list[float], seconds: float) -> dict[str, Any]:
    worker = Servers([client], 0)
    rates: dict[str, Any] = {"push": {}, "pull": {}}
    for size in megabytes:
        vector = torch.rand(int(size * (1 << 20)) // 4)
        into, name = torch.empty_like(vector), f"of {size} MiB"
        worker.create({name: vector}).wait()
        push = repeated(seconds, lambda vector=vector, name=name: worker.push({name: vector}, "copy").wait())
        pull = repeated(seconds, lambda into=into, name=name: worker.pull({name: into}).wait())
        assert torch.equal(into, vector)
        rates["push"][size], rates["pull"][size] = vector.nbytes / push / 1e9, vector.nbytes / pull / 1e9
    rates["round trips/s"] = 1 / repeated(seconds, lambda: worker.waiting_for().wait())

    calls = deque(worker.waiting_for() for _ in range(_UNDER_WAY))

    def next_call() -> None:
        calls.popleft().wait()
        calls.append(worker.waiting_for())

    rates["calls/s"] = 1 / repeated(seconds, next_call)
    worker.close()
    return rates


def send_and_wait(vector: torch.Tensor, more: float) -> None:
    dist.send(torch.tensor([more]), 1)
    if more:
        dist.send(vector, 1)
        dist.recv(torch.empty(1), 1)


def receive_and_answer(vector: torch.Tensor) -> None:
    more = torch.empty(1)
    while dist.recv(more, 0) == 0 and more.item():
        dist.recv(vector, 0)
        dist.send(torch.zeros(1), 0)


def gloo(megabytes: list[float], seconds: float) -> dict[str, Any]:
    def body(rank: int) -> dict[str, Any]:
        rates: dict[str, Any] = {"push": {}}
        for size in [0.0, *megabytes]:
            vector = torch.rand(max(1, int(size * (1 << 20)) // 4))
            if rank == 1:
                receive_and_answer(vector)
                continue
            took = repeated(seconds, lambda vector=vector: send_and_wait(vector, 1.0))
            send_and_wait(vector, 0.0)
            if size:
                rates["push"][size] = vector.nbytes / took / 1e9
            else:
                rates["round trips/s"] = 1 / took
        return rates

    return run_local_ranks(2, body)[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 1.0, 16.0, 64.0])
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    results = {"gloo": gloo(given.megabytes, given.seconds)}
    token = new_token()
    with start_servers(1, token)[0] as server:
        results["server"] = measure(RpcClient(server.endpoint, token, 0), given.megabytes, given.seconds)
    if given.json:
        print(json.dumps(results))
        return 0
    sizes = [f"{size:g} MiB" for size in given.megabytes]
    print("GB/s             " + "".join(f"{size:>11}" for size in sizes) + "   round trips/s   calls/s")
    for name, rates in results.items():
        for way in ("push", "pull"):
            if way in rates:
                row = "".join(f"{rate:11.2f}" for rate in rates[way].values())
                trips = f"{rates['round trips/s']:16.0f}" if way == "push" else ""
                calls = f"{rates['calls/s']:10.0f}" if way == "push" and "calls/s" in rates else ""
                print(f"{name + ', ' + way:<20}{row[3:]}{trips}{calls}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
