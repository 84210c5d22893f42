"""Tensors at several servers, from several workers, within one process."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from helpers.servers import local_servers, made, pulled
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from colossus.rows.row_gradient import RowGradient
from colossus.server.calls import Refused, ServerGone
from colossus.server.client import Servers
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer
from colossus.server.store import ShardStore

SHAPES = st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=5)


@settings(deadline=None, max_examples=40)
@given(shapes=SHAPES, num_servers=st.integers(1, 4), dtype=st.sampled_from([torch.float64, torch.int16, torch.bool]))
def test_any_split_of_any_shapes_round_trips(shapes: list[list[int]], num_servers: int, dtype: torch.dtype) -> None:
    tensors = {f"t{index}": torch.randint(0, 2, shape).to(dtype) for index, shape in enumerate(shapes)}
    with local_servers(num_servers) as [worker]:
        made([worker], tensors)
        into = {name: torch.empty_like(x) for name, x in tensors.items()}
        worker.pull(into).wait()
        assert all(torch.equal(into[name], x) for name, x in tensors.items())
        others = {name: ~x if dtype == torch.bool else x + 1 for name, x in tensors.items()}
        worker.push(others, "copy").wait()
        worker.pull(into).wait()
        assert all(torch.equal(into[name], x) for name, x in others.items())
        state = worker.state(list(tensors)).wait()
        assert all(torch.equal(state[name].rows["value"].view(x.shape), x) for name, x in others.items())


@settings(deadline=None, max_examples=30)
@given(data=st.data(), num_servers=st.integers(1, 3))
def test_any_interleaving_of_sums_is_the_sum(data: st.DataObject, num_servers: int) -> None:
    """Whole tensors and rows, pushed by three workers in any order, give the sum of all."""
    rows, num_workers = 7, 3
    pushes = []
    for _ in range(data.draw(st.integers(1, 8))):
        worker, ids = data.draw(st.integers(0, num_workers - 1)), data.draw(st.sets(st.integers(0, rows - 1)))
        is_dense = data.draw(st.booleans())
        wanted = torch.tensor(sorted(ids), dtype=torch.int64)
        value = torch.randint(-9, 9, (rows if is_dense else len(wanted), 3)).double()
        pushes.append((worker, value if is_dense else RowGradient(wanted, value)))
    start = torch.randint(-9, 9, (rows, 3)).double()
    expected = start.clone()
    with local_servers(num_servers, num_workers) as workers:
        made(workers, {"w": start})
        handles = []
        for worker, value in pushes:
            handles.append(workers[worker].push({"w": value}, "add"))
            if isinstance(value, RowGradient):
                expected.index_add_(0, value.ids, value.rows)
            else:
                expected += value
        for handle in handles:
            handle.wait()
        assert torch.equal(pulled(workers[0], "w", start), expected)


def test_making_is_collective() -> None:
    """Nobody has a tensor before all that live have come; one that differs is told, and the others go on."""
    with local_servers(2, 3) as workers:
        first = workers[0].create({"w": torch.zeros(4)})
        with pytest.raises(TimeoutError):
            first.wait(0.02)
        assert (0, [1, 2], "have not made 'w'") in workers[0].waiting_for()
        other = workers[1].create({"w": torch.zeros(4, dtype=torch.float64)})
        workers[2].close()
        first.wait(9.0)
        with pytest.raises(Refused, match=r"'w' is float64 \[4\].*for worker 1, and float32 \[4\].* for worker 0"):
            other.wait(9.0)
        workers[0].push({"w": torch.full((4,), 3.0)}).wait(9.0)
        assert pulled(workers[0], "w", torch.empty(4)).tolist() == [3.0] * 4


def test_every_update_is_applied_once_under_random_delays() -> None:
    """Workers in threads that push at random times: the sum of all is there, and a pull never sees a half."""
    num_workers, pushes, size = 4, 12, 33
    torn = []

    def work(worker: Servers) -> None:
        rng = random.Random(worker.worker)
        for number in range(pushes):
            threading.Event().wait(rng.random() * 0.004)
            worker.push({"w": torch.full((size,), 2.0 ** (worker.worker * 4 + number % 4))}, "add").wait()
            into = torch.empty(size)
            worker.pull({"w": into}).wait()
            for part in worker.sharding.ranges["w"]:
                torn.append(len(set(into[part.start : part.stop].tolist())) > 1)

    with local_servers(2, num_workers) as workers:
        made(workers, {"w": torch.zeros(size)})
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        total = pulled(workers[0], "w", torch.empty(size))
    expected = sum(pushes / 4 * 2.0 ** (worker * 4 + bit) for worker in range(num_workers) for bit in range(4))
    assert total.tolist() == [expected] * size
    assert len(torn) == num_workers * pushes * 2
    assert not any(torn)


OPTIMIZERS = {
    "sgd": (dict(type="sgd", weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=0.3, weight_decay=0.1)),
    "momentum": (dict(type="momentum", momentum=0.8), lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.8)),
    "adagrad": (dict(type="adagrad"), lambda p: torch.optim.Adagrad(p, lr=0.3)),
    "adam": (
        dict(type="adam", weight_decay=0.1, decoupled_weight_decay=True),
        lambda p: torch.optim.AdamW(p, lr=0.3, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("num_servers", [1, 3])
def test_gradients_follow_torch(name: str, num_servers: int) -> None:
    """A worker whose gradients are pushed: as torch's optimizer in one process. State goes to others by rows."""
    ours, theirs = OPTIMIZERS[name]
    shapes = {"w": (7, 3), "b": (5,), "s": ()}
    params = {key: nn.Parameter(torch.randn(shape, dtype=torch.float64)) for key, shape in shapes.items()}
    optimizer = theirs(list(params.values()))
    with local_servers(num_servers) as [worker], local_servers(2) as [other]:
        made([worker], params, optimizer=ours)
        for step in range(5):
            gradients = {key: torch.randn_like(x) for key, x in params.items()}
            for key, x in params.items():
                x.grad = gradients[key] / 2
            optimizer.step()
            view = worker if step < 3 else other
            if step == 3:  # the rest is done by others, who get the state
                made([other], {key: torch.zeros_like(x) for key, x in params.items()}, optimizer=ours)
                other.load_state(worker.state(list(params)).wait()).wait()
            view.push(gradients, "gradient", {"lr": 0.3, "scale": 0.5}).wait()
            for key, x in params.items():
                torch.testing.assert_close(pulled(view, key, x), x.detach(), rtol=1e-13, atol=1e-14)


def test_rows_follow_torch() -> None:
    """Rows of a table cut over servers: as torch's SparseAdam, whose bias correction counts steps without rows, too."""
    table = nn.Embedding(9, 2, sparse=True, dtype=torch.float64)
    optimizer = torch.optim.SparseAdam(table.parameters(), lr=0.1)
    with local_servers(3) as [worker]:
        made([worker], {"table": table.weight}, optimizer=dict(type="adam", lr=0.1))
        for ids in ([8, 8, 1], [0], [4, 2, 4, 8]):
            table.weight.grad = None
            table(torch.tensor(ids)).square().sum().backward()
            assert table.weight.grad is not None
            worker.push({"table": table.weight.grad}, "gradient").wait()
            optimizer.step()
            torch.testing.assert_close(
                pulled(worker, "table", table.weight), table.weight.detach(), rtol=1e-13, atol=1e-14
            )
        wanted = torch.tensor([1, 4, 5, 8])
        rows = worker.pull_rows({"table": wanted}).wait()["table"]
        torch.testing.assert_close(rows, table.weight.detach()[wanted], rtol=1e-13, atol=1e-14)


def test_a_tensor_is_there_until_all_have_freed_it() -> None:
    with local_servers(2, 2) as [worker, other]:
        made([worker, other], {"w": torch.ones(4)})
        worker.free(["w"]).wait()
        again = worker.create({"w": torch.full((4,), 2.0)})
        assert torch.equal(pulled(other, "w", torch.empty(4)), torch.ones(4))
        assert not again.is_done()
        other.free(["w"]).wait()
        other.create({"w": torch.ones(4)}).wait(9.0)
        again.wait(9.0)
        assert torch.equal(pulled(worker, "w", torch.empty(4)), torch.full((4,), 2.0))
        other.free(["w"]).wait()
        with pytest.raises(ValueError, match="no tensor 'w' at the servers: it was not made, or was freed"):
            other.push({"w": torch.ones(4)})


REFUSED = {
    r"'w' is \[4, 2\]: \[4, 2\] fits, not \[3\]": lambda s: s.push({"w": torch.ones(3)}),
    r"'w' is \[4, 2\]: \[1, 2\] fits, not \[2, 2\]": lambda s: s.push(
        {"w": RowGradient(torch.tensor([1]), torch.ones(2, 2))}
    ),
    "row 4 of 'w' is not one of its 4 rows": lambda s: s.push(
        {"w": RowGradient(torch.tensor([1, 4]), torch.ones(2, 2))}
    ),
    "ascending and each once": lambda s: s.pull_rows({"w": torch.tensor([1, 1])}),
    "'n' is torch.int64, the value is torch.float32": lambda s: s.push({"w": torch.ones(4, 2), "n": torch.ones(3)}),
    "two tensors 'w'": lambda s: s.create({"w": torch.ones(4, 2)}),
    "optimizer 'sgd' of 'z' has no option 'beta'; it has lr": lambda s: s.create(
        {"z": torch.ones(3)}, dict(type="sgd", beta=1)
    ),
    "no rule 'lion'": lambda s: s.create({"z": torch.ones(3)}, dict(type="lion")),
}


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    with local_servers(2) as [worker]:
        tensors = {"w": torch.randn(4, 2), "n": torch.arange(3)}
        made([worker], tensors)
        for words, ask in REFUSED.items():
            with pytest.raises(ValueError, match=words):
                ask(worker)
        for key, value in tensors.items():
            assert torch.equal(pulled(worker, key, value), value)


def test_a_dead_source_is_not_waited_for() -> None:
    with local_servers(1, 2) as [worker, other]:
        theirs = other.create({"w": torch.ones(3)})
        worker.close()
        with pytest.raises(Refused, match=r"worker 0 has gone \(it has closed its connection\) and has not made 'w'"):
            theirs.wait()


def test_an_ended_server_is_named_with_what_was_asked() -> None:
    token = b"t" * 32
    store = ShardStore()
    server = RpcServer(store.handle, token, on_gone=store.on_gone)
    worker = Servers([RpcClient(server.endpoint, token, 0)], 0, [0, 1])
    waiting = worker.create({"w": torch.ones(3)}, source=1)
    server.close()
    with pytest.raises(ServerGone, match=r"server 0 at .* is gone: it was closed"):
        waiting.wait()
    with pytest.raises(ServerGone, match="server 0 at"):
        worker.push({"w": torch.ones(3)})
    worker.close()
