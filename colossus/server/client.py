"""A worker's view of all servers: tensors by name, pushed and pulled whole or by rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from colossus.comm.peer_gone import PeerGone
from colossus.server.frames import Reply
from colossus.server.rpc_client import Handle, RpcClient
from colossus.server.shard import ShardSpec, check_optimizer
from colossus.server.sharding import Pieces, Sharding, TensorSpec, TensorState, Value

T = TypeVar("T")
Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})


class Servers:
    """All servers of a run, from one worker. Thread-safe.

    A tensor is cut over the servers by rows (`Sharding`): all workers have to make and free the same tensors in the
    same order, and agree without talking. An operation on several tensors is one message for each server. Everything
    returns a handle; what a worker starts at one server is done there in the order in which it was started.

    Args:
        clients: one for each server, in the order of their indices.
        worker: number of this worker.
        workers: of all that take part in synchronous steps and clocks; None: this one alone.

    Attributes:
        sharding: what is where.
    """

    def __init__(self, clients: Sequence[RpcClient], worker: int, workers: Sequence[int] | None = None) -> None:
        self._clients, self.worker = list(clients), worker
        self.workers = tuple(sorted({worker} if workers is None else set(workers)))
        self.sharding = Sharding(len(self._clients))
        self._versions: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def close(self, patience_seconds: float | None = None) -> None:
        """Say goodbye to all servers, which go on.

        Args:
            patience_seconds: for which calls under way are waited for, at each; None: without end.
        """
        for client in self._clients:
            client.close(patience_seconds)

    # -- tensors --------------------------------------------------------------------------------------------

    def create(
        self,
        tensors: Mapping[str, Tensor],
        optimizer: Options | None = None,
        *,
        optimizers: Mapping[str, Options] = _NONE,
        source: int | None = None,
        workers: Sequence[int] | None = None,
    ) -> Handle[None]:
        """Make tensors. All workers call it with tensors of the same names, shapes and dtypes, and wait for the handle.

        Args:
            tensors: of ``source`` the values count, of others shapes and dtypes (they may be on the meta device).
            optimizer: of the rule ``gradient``: dict(type=.., **options) by a name of `colossus.rows.row_rules`: sgd,
                momentum, adagrad, rowwise_adagrad, adam; None: these tensors take no gradients.
            optimizers: by name, where it differs.
            source: the worker whose values count; None: the first.
            workers: all that call it; None: those that take part in synchronous steps.
        """
        source = self.workers[0] if source is None else source
        has_values = source == self.worker
        for name in tensors:
            if chosen := optimizers.get(name, optimizer):
                check_optimizer(name, chosen)
        with self._lock:
            self.sharding.place(TensorSpec(name, tuple(x.shape), x.dtype) for name, x in tensors.items())
        specs: dict[int, list[dict[str, Any]]] = {}
        for name, tensor in tensors.items():
            chosen, dtype = dict(optimizers.get(name, optimizer or {})), str(tensor.dtype).removeprefix("torch.")
            for part in self.sharding.ranges[name]:
                spec = ShardSpec(name, tuple(tensor.shape), dtype, part.start, part.stop, chosen)
                specs.setdefault(part.server, []).append(asdict(spec))
        values = self.sharding.split(tensors) if has_values else {}
        common = {"has_values": has_values, "source": source, "workers": list(workers or self.workers)}
        calls = []
        for server, of_server in specs.items():
            header = {"names": [spec["name"] for spec in of_server], "specs": of_server, **common}
            calls.append(self._clients[server].call("create", header, values[server].arrays if has_values else ()))
        return Handle(calls, _nothing)

    def free(self, names: Sequence[str]) -> Handle[None]:
        """This worker needs tensors no more; they are gone when all that have made them say so."""
        with self._lock:
            servers = self.sharding.by_server(names)
            for name in names:
                self.sharding.remove(name)
            self._versions = {key: version for key, version in self._versions.items() if key[0] not in names}
        return Handle([self._clients[server].call("free", {"names": of}) for server, of in servers.items()], _nothing)

    def push(
        self,
        values: Mapping[str, Value],
        rule: str = "add",
        options: Options = _NONE,
        *,
        options_of: Mapping[str, Options] = _NONE,
    ) -> Handle[dict[str, int | None]]:
        """Change tensors at the servers. Tensors may be changed as soon as this returns.

        Args:
            values: by name a tensor of the whole shape (a sparse one: its rows), rows (`RowGradient`), or None: all of
                it for ``zero``, no change for ``gradient``.
            rule: ``zero``, ``copy``, ``add``, or ``gradient``: an update by the tensor's optimizer.
            options: of this update: ``lr``, ``scale`` (a factor of the gradient), ``clip_value`` (the largest absolute
                value of an element, after that), or what else the optimizer has.
            options_of: the same by name, where they differ.

        Returns:
            By name the staleness: how many updates of it, this worker's included, were applied since this worker pulled
            it, the largest over its shards; None where it never did, and for ``zero`` and ``copy``.

        Raises:
            ValueError: a value does not fit its tensor.
        """
        found, counts = self.sharding.split(values), rule in ("add", "gradient")
        calls = []
        for server, pieces in found.items():
            bases = [self._versions.get((name, server)) if counts else None for name in pieces.names]
            chosen = [dict(options_of.get(name, options)) for name in pieces.names]
            header = pieces.header(rule=rule, options=chosen, bases=bases)
            calls.append(self._clients[server].call("push", header, pieces.arrays))

        def staleness(replies: list[Reply]) -> dict[str, int | None]:
            most: dict[str, int | None] = dict.fromkeys(values)
            for pieces, reply in zip(found.values(), replies, strict=True):
                for name, stale in zip(pieces.names, reply.header["staleness"], strict=True):
                    before = most[name]
                    most[name] = stale if before is None else max(before, stale or 0)
            return most

        return Handle(calls, staleness)

    def pull(self, into: Mapping[str, Tensor]) -> Handle[None]:
        """Values of tensors, of each shard at one time. They are written to until the handle was waited for."""
        found, copy = self.sharding.targets(into)

        def finish(replies: list[Reply]) -> None:
            copy()
            self._pulled(found, replies)

        return Handle(self._of_pieces("pull", found), finish)

    def pull_rows(self, ids: Mapping[str, Tensor]) -> Handle[dict[str, Tensor]]:
        """Some rows of tensors: by name ids int64 [n], ascending and each once -> rows [n, ...]."""
        found, rows = self.sharding.wanted_rows(ids)

        def finish(replies: list[Reply]) -> dict[str, Tensor]:
            self._pulled(found, replies)
            return rows

        return Handle(self._of_pieces("pull", found), finish)

    def _pulled(self, found: Mapping[int, Pieces], replies: Sequence[Reply]) -> None:
        for (server, pieces), reply in zip(found.items(), replies, strict=True):
            for name, version in zip(pieces.names, reply.header["versions"], strict=True):
                if name in self.sharding.specs:  # it may have been freed meanwhile
                    self._versions[name, server] = version

    # -- synchronous steps ----------------------------------------------------------------------------------

    def accumulate(self, step: int, values: Mapping[str, Value]) -> Handle[None]:
        """Give this worker's part of the gradients of a step; None where it has none. All workers give each of them
        once. A sum does not depend on the order of arrival.

        Args:
            step: ascending.
        """
        found = self.sharding.split(values)
        return Handle(self._of_pieces("accumulate", found, step=step, workers=list(self.workers)), _nothing)

    def squares(self, step: int, names: Sequence[str]) -> Handle[dict[str, float]]:
        """By name the squares of the norms of the sums over workers, each element once; done when all parts are at the
        servers.
        """
        servers = self.sharding.by_server(names)
        calls = [
            self._clients[server].call("squares", {"names": of, "step": step, "workers": list(self.workers)})
            for server, of in servers.items()
        ]

        def total(replies: list[Reply]) -> dict[str, float]:
            squares = dict.fromkeys(names, 0.0)
            for of, reply in zip(servers.values(), replies, strict=True):
                for name, square in zip(of, reply.arrays[0].tolist(), strict=True):
                    squares[name] += square
            return squares

        return Handle(calls, total)

    def apply(
        self,
        step: int,
        names: Sequence[str],
        options: Options = _NONE,
        *,
        options_of: Mapping[str, Options] = _NONE,
        found_inf: bool = False,
        into: Mapping[str, Tensor] | None = None,
    ) -> Handle[None]:
        """One update by the sums of a step, whose `squares` are known. All workers may ask for it; it is done once.

        Args:
            options: of the optimizers, as for `push`; ``scale`` is one over the tokens, say, times the clip.
            options_of: the same by name, where they differ.
            found_inf: do not update, and forget the sums.
            into: where the values go afterwards, by name.
        """
        servers = self.sharding.by_server(names)
        targets, copy = self.sharding.targets({} if into is None else {name: into[name] for name in names})
        common = {"step": step, "found_inf": found_inf, "pull": into is not None}
        calls = []
        for server, of in servers.items():
            header = common | {"names": of, "options": [dict(options_of.get(name, options)) for name in of]}
            calls.append(self._clients[server].call("apply", header, (), targets[server].into if into else ()))
        return Handle(calls, lambda replies: copy())

    # -- workers --------------------------------------------------------------------------------------------

    def clock(self, step: int, max_staleness: int) -> Handle[None]:
        """Done when this worker, which has finished ``step`` steps, may begin the next: no other worker that lives has
        finished fewer than ``step - max_staleness`` (SSP; Ho et al., NIPS 2013). Kept by server 0.
        """
        header = {"step": step, "max_staleness": max_staleness, "workers": list(self.workers)}
        return Handle([self._clients[0].call("clock", header)], _nothing)

    def waiting_for(self) -> list[tuple[int, list[int], str]]:
        """What the calls of this worker that are under way wait for at the servers, now: of each the server, the
        workers that it waits for, and what these have not done.
        """
        calls = [client.call("waiting_for") for client in self._clients]
        replies = [call.result() for call in calls]
        return [(server, *each) for server, reply in enumerate(replies) for each in reply.header["waits"]]

    def wait_or_name_missing(self, handle: Handle[T], seconds: float) -> T:
        """The result of what depends on other workers.

        Raises:
            PeerGone: some did not come in time; it names them.
            ServerGone, Refused: as `Handle.wait` has it.
        """
        while True:
            try:
                return handle.wait(seconds)
            except TimeoutError as error:
                if waits := self.waiting_for():  # else the servers are at work
                    ranks = ", ".join(map(str, sorted({worker for _, workers, _ in waits for worker in workers})))
                    server, _, words = waits[0]
                    raise PeerGone(
                        f"timeout: rank {ranks} did not come to the servers within {seconds:g} s "
                        f"(comm.timeout_seconds): server {server} waits for those that {words}"
                    ) from error

    # -- state ----------------------------------------------------------------------------------------------

    def state(self, names: Sequence[str]) -> Handle[dict[str, TensorState]]:
        """Values and what optimizers keep."""
        servers = self.sharding.by_server(names)
        calls = [self._clients[server].call("dump", {"names": of}) for server, of in servers.items()]
        rows_of = {name: self.sharding.specs[name].num_rows for name in names}

        def finish(replies: list[Reply]) -> dict[str, TensorState]:
            found: dict[str, list[tuple[int, TensorState]]] = {name: [] for name in names}
            for of, reply in zip(servers.values(), replies, strict=True):
                arrays = iter(reply.arrays)
                for name, given in zip(of, reply.header["tensors"], strict=True):
                    rows = {key: next(arrays) for key in given["keys"]}
                    found[name].append((given["start"], TensorState(rows, given["scalars"])))
            return {name: TensorState.joined(rows_of[name], parts) for name, parts in found.items()}

        return Handle(calls, finish)

    def load_state(self, states: Mapping[str, TensorState]) -> Handle[None]:
        """Take back what `state` gave, of all rows or of some, for tensors that are there."""
        found: dict[int, tuple[list[dict[str, Any]], list[Tensor]]] = {}
        for name, state in states.items():
            for part in self.sharding.ranges_of(name):
                tensors, arrays = found.setdefault(part.server, ([], []))
                rows = {key: x[part.start : part.stop].contiguous() for key, x in state.rows.items()}
                tensors.append({"name": name, "start": part.start, "keys": list(rows), "scalars": state.scalars})
                arrays += rows.values()
        calls = [
            self._clients[server].call("load", {"tensors": tensors}, arrays)
            for server, (tensors, arrays) in found.items()
        ]
        return Handle(calls, _nothing)

    def _of_pieces(self, op: str, found: Mapping[int, Pieces], **more: Any) -> list[Future[Reply]]:
        return [
            self._clients[server].call(op, pieces.header(**more), pieces.arrays, pieces.into or None)
            for server, pieces in found.items()
        ]


def _nothing(replies: list[Reply]) -> None:
    pass
