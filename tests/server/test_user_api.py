"""Tensors at servers in a loop of one's own: ranks of a group, a lone process, servers of a launcher."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.examples import example
from helpers.ranks import run_ranks
from torch import Tensor

import colossus.server as ps
from colossus.comm.objects import all_gather_object
from colossus.context.parallel_context import ParallelContext
from colossus.server.calls import Refused
from colossus.server.client import Servers
from colossus.server.process import SERVERS, TOKEN, new_token, write_environment
from colossus.server.rpc_client import RpcClient
from colossus.server.rpc_server import RpcServer
from colossus.server.store import ShardStore


def _all_kinds(context: ParallelContext) -> dict[str, Any]:
    group, rank = context.group(context.grid.names), context.rank
    values: dict[str, Any] = {}

    def meet() -> None:
        all_gather_object(None, group)

    tensors = {
        "matrix": torch.randn(7, 3, dtype=torch.float64),
        "transposed": torch.randn(4, 5).t(),
        "scalar": torch.randn(()),
        "counts": torch.arange(6, dtype=torch.int32).view(1, 6),
        "half": torch.randn(3).bfloat16(),
        "complex": torch.randn(4, dtype=torch.complex64),
        "nothing": torch.empty(0, 3),
    }
    first = all_gather_object(tensors, group)[0]
    handles = {name: ps.init(tensor, name) for name, tensor in tensors.items()}
    for name, handle in handles.items():
        assert torch.equal(ps.receive(handle).wait(), first[name]), name
    meet()
    sent = [ps.send(handle, torch.full_like(tensors[name], rank + 1)) for name, handle in handles.items()]
    for request in sent:
        request.wait()
    meet()
    for name, handle in handles.items():
        into = torch.empty_like(tensors[name])
        assert ps.receive(handle, into).wait() is into
        torch.testing.assert_close(into, first[name] + 6, rtol=1e-2 if name == "half" else 1e-6, atol=0.05)
    meet()
    if rank == 1:
        for handle in handles.values():
            ps.send(handle, None, "zero").wait()
        ids = torch.tensor([6, 0, 6], dtype=torch.int32)
        ps.send(handles["matrix"], torch.ones(3, 3, dtype=torch.float64), ids=ids).wait()
    meet()
    values["rows"] = ps.receive(handles["matrix"], ids=torch.tensor([6, 6, 1, 0])).wait()[:, 0].tolist()
    values["zeros"] = [float(ps.receive(handles[name]).wait().abs().sum()) for name in ("scalar", "half", "counts")]
    meet()
    for handle in handles.values():
        ps.free(handle)
    again = ps.init(torch.full((2,), float(rank + 5)), "scalar")  # waits until all have freed the one before
    values["again"] = ps.receive(again).wait().tolist()
    with pytest.raises(ValueError, match=r"ParameterServer\('half', bfloat16 \[3\]\) was freed"):
        ps.receive(handles["half"])
    meet()
    if rank == 2:
        with pytest.raises(
            Refused, match=r"refused to create: 'own/odd' is float32 \[4\].* worker 2, and float32 \[2\]"
        ):
            ps.init(torch.ones(4), "odd")
    else:
        ps.init(torch.ones(2), "odd")
    ps.close()
    return values


def test_tensors_of_any_kind_from_three_ranks() -> None:
    for values in run_ranks(3, _all_kinds):
        assert values == {"rows": [2.0, 2.0, 0.0, 1.0], "zeros": [0.0, 0.0, 0.0], "again": [5.0, 5.0]}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Any:
    for name in ("WORLD_SIZE", "RANK", SERVERS, TOKEN):
        monkeypatch.delenv(name, raising=False)
    ps.close()
    yield
    ps.close()


@pytest.mark.usefixtures("alone")
def test_a_lone_process() -> None:
    """Asynchronous momentum SGD of one worker is torch's."""
    params = [torch.nn.Parameter(torch.randn(5, 3)), torch.nn.Parameter(torch.randn(3))]
    optimizer = torch.optim.SGD(params, lr=0.1, momentum=0.9)
    handles = [ps.init(param, optimizer=dict(type="momentum", lr=0.1)) for param in params]
    for _ in range(3):
        for param, handle in zip(params, handles, strict=True):
            param.grad = torch.randn_like(param)
            assert ps.send(handle, param.grad, "gradient").wait() in (None, 0)
        optimizer.step()
        for param, handle in zip(params, handles, strict=True):
            ps.prefetch(handle)
            torch.testing.assert_close(ps.receive(handle).wait(), param.detach())


@pytest.mark.usefixtures("alone")
def test_servers_of_a_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is started, and no process group is needed."""
    token = new_token()
    stores = [ShardStore() for _ in range(2)]
    servers = [RpcServer(store.handle, token, index=index, on_gone=store.on_gone) for index, store in enumerate(stores)]
    write_environment([server.endpoint for server in servers], token, variables := {})
    for name, value in {**variables, "WORLD_SIZE": "4", "RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    workers = [(1 << 20) + rank for rank in range(4)]
    others = [
        Servers([RpcClient(server.endpoint, token, worker) for server in servers], worker, workers)
        for worker in workers[1:]
    ]
    creations = [other.create({"own/table": torch.zeros(6, 2)}) for other in others]
    table = ps.init(torch.zeros(6, 2), "table")
    for handle in creations:
        handle.wait(9.0)
    assert len(table.servers.sharding.loads) == 2
    ps.send(table, torch.ones(1, 2), ids=torch.tensor([4])).wait()
    assert ps.receive(table).wait().sum() == 2
    for other in others:
        other.close()
    ps.close()
    for server in servers:
        assert server.ended is None
        server.close()


@pytest.mark.usefixtures("alone")
def test_what_is_no_such_tensor_is_said() -> None:
    refused: dict[str, Any] = {
        "takes a tensor, not list": lambda: ps.init([1.0]),  # type: ignore[arg-type]
        "a dense tensor with values, not torch.strided on meta": lambda: ps.init(torch.empty(3, device="meta")),
        "no rule 'lamb'": lambda: ps.init(torch.ones(3), optimizer=dict(type="lamb")),
        "option 'betas'; it has lr": lambda: ps.init(torch.ones(3), optimizer=dict(type="sgd", betas=(0, 1))),
    }
    for words, ask in refused.items():
        with pytest.raises(ValueError, match=words):
            ask()
    table, scalar = ps.init(torch.ones(4, 2), "table"), ps.init(torch.ones(()), "scalar")
    tuned, ids = ps.init(torch.ones(3), optimizer=dict(type="sgd", lr=0.1)), torch.tensor([1, 1])
    sends: dict[str, tuple[ps.ParameterServer, Tensor | None, dict[str, Any]]] = {
        "there is no rule 'sum'; there are zero, copy, add, gradient": (table, torch.ones(4, 2), dict(rule="sum")),
        r"add of ParameterServer\('table', float32 \[4, 2\]\) needs a tensor": (table, None, {}),
        r"\[4, 2\] fits, not \[3, 2\]": (table, torch.ones(3, 2), {}),
        "a row is there twice": (table, torch.ones(2, 2), dict(rule="copy", ids=ids)),
        "a scalar, which has no rows": (scalar, torch.ones(2), dict(ids=ids)),
        "row 9 of 'own/table' is not one of its 4 rows": (table, torch.ones(1, 2), dict(ids=torch.tensor([9]))),
        "row -1 of 'own/table' is not": (table, torch.ones(1, 2), dict(ids=torch.tensor([-1]))),
        r"1 rows of .* are \[1, 2\], the values are \[2\]": (table, torch.ones(2), dict(ids=torch.tensor([3]))),
        "the value is torch.bool": (table, torch.ones(4, 2).bool(), {}),
        "add of .* takes no options, but got lr": (table, torch.ones(4, 2), dict(lr=0.1)),
        "has no option 'lrr'": (tuned, torch.ones(3), dict(rule="gradient", lrr=3.0)),
        "ids of rows of .* are integers": (table, torch.ones(1, 2), dict(ids=torch.tensor([3.0]))),
    }
    for words, (handle, tensor, options) in sends.items():
        with pytest.raises(ValueError, match=words):
            ps.send(handle, tensor, **options)
    with pytest.raises(ValueError, match="two tensors 'own/table'"):
        ps.init(torch.ones(2), "table")
    assert torch.equal(ps.receive(table).wait(), torch.ones(4, 2))


@pytest.mark.usefixtures("alone")
def test_the_example_learns(capsys: pytest.CaptureFixture[str]) -> None:
    example("own_servers").main()
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines()]
    assert len(losses) == 4
    assert losses[-1] < 0.2
