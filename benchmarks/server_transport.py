"""Speed of tensors that go to a parameter server and back, beside gloo's send and receive.

    python -m benchmarks.server_transport [--megabytes 0.0625 1 16 64] [--seconds 0.5]

All in one run, one after the other, between two processes of this machine. A push has one tensor and an empty reply, a
pull none and one tensor: GB/s of its bytes, over the time of the whole call (with the copies into the transport
and out of it). Gloo: the same bytes there, and one number back. Round trips: calls without arrays, one at a time, and
64 under way.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import distributed as dist

from benchmarks import common
from colossus.context.local_ranks import run_local_ranks
from colossus.server.client import Servers
from colossus.server.process import new_token, start_servers
from colossus.server.rpc_client import RpcClient

_UNDER_WAY = 64


def repeated(seconds: float, action: Callable[[], object]) -> float:
    """Return the seconds of one, the best of three rounds."""
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
    rates["round trips/s"] = 1 / repeated(seconds, lambda: client.call("waiting_for").result())

    calls = deque(client.call("waiting_for") for _ in range(_UNDER_WAY))

    def next_call() -> None:
        calls.popleft().result()
        calls.append(client.call("waiting_for"))

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


def main(argv: Sequence[str] | None = None) -> int:
    parser = common.make_parser(__doc__)
    parser.add_argument("--megabytes", type=float, nargs="+", default=[0.0625, 1.0, 16.0, 64.0])
    parser.add_argument("--seconds", type=float, default=0.6, help="of each measurement")
    arguments = parser.parse_args(argv)
    sizes, seconds = ([0.0625], 0.01) if arguments.smoke else (arguments.megabytes, arguments.seconds)
    torch.set_num_threads(1)
    results = {"gloo": gloo(sizes, seconds)}
    token = new_token()
    with closing(start_servers(1, token)[0]) as server:
        results["server"] = measure(RpcClient(server.endpoint, token, 0), sizes, seconds)
    rows = [
        (f"{name}, {way}", *(f"{rate:.2f}" for rate in rates[way].values()),
         *(f"{rates[key]:.0f}" if way == "push" and key in rates else "" for key in ("round trips/s", "calls/s")))
        for name, rates in results.items() for way in ("push", "pull") if way in rates
    ]  # fmt: skip
    header = ("GB/s", *(f"{size:g} MiB" for size in sizes), "round trips/s", "calls/s")
    common.print_table("a parameter server beside gloo", header, rows)
    common.write_json(arguments.json, results)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
