"""One server's store: what it refuses, and what it keeps for whom."""

from __future__ import annotations

from typing import Any

import torch
from helpers.servers import local_servers, made, pulled
from torch import Tensor

from colossus.server.calls import Request
from colossus.server.store import ShardStore


class Asked:
    """Requests to a store, and what it has answered."""

    def __init__(self) -> None:
        self.store = ShardStore()
        self.answers: list[tuple[dict[str, Any] | None, str | None]] = []

    def ask(self, op: str, header: dict[str, Any], arrays: list[Tensor] | None = None, worker: int = 0) -> None:
        request = Request(
            worker, op, header, arrays or [], lambda reply, _: self.answers.append((reply.get("h"), reply.get("e")))
        )
        self.store.handle(request)


def test_a_request_that_cannot_be_answered_is_refused_and_the_server_goes_on() -> None:
    asking = Asked()
    asking.ask("steal", {})
    asking.ask("pull", {"names": ["w"], "kinds": ["dense"]})
    asking.ask("pull", {})
    asking.ask("squares", {"names": [], "step": 0, "workers": []})
    assert [error for _, error in asking.answers] == [
        "KeyError: 'steal'",
        "there is no tensor 'w': it was not made, or was freed",
        "KeyError: 'names'",
        None,
    ]


def test_the_options_of_an_update() -> None:
    with local_servers(2) as [worker]:
        made([worker], {"w": torch.zeros(4)}, optimizer=dict(type="sgd"))
        options = {"lr": 1, "weight_decay": 0.0, "scale": 0.5, "clip_value": 2.0}
        worker.push({"w": torch.full((4,), 6.0)}, "gradient", options).wait()
        assert pulled(worker, "w", torch.ones(4)).tolist() == [-2.0] * 4


def test_tensors_go_with_the_last_worker() -> None:
    asking = Asked()
    spec = dict(name="w", shape=[1], dtype="float32", start=0, stop=1, optimizer={})
    for worker in (0, 1):
        header = {"specs": [spec], "has_values": worker == 0, "source": 0, "workers": [0, 1]}
        asking.ask("create", header, [torch.zeros(1)] if worker == 0 else [], worker)
    pull = {"names": ["w"], "kinds": ["dense"]}
    asking.store.on_gone(0, "killed")
    asking.ask("pull", pull, worker=1)
    assert asking.answers[-1] == ({"versions": [0]}, None)
    asking.store.on_gone(1, "killed")
    asking.ask("pull", pull, worker=1)
    assert asking.answers[-1] == (None, "there is no tensor 'w': it was not made, or was freed")
