"""The servers as a worker sees them: tensors by name, pushed and pulled whole or by rows."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from types import MappingProxyType
from typing import Any, TypeVar

from torch import Tensor

from colossus.comm.peer_gone import PeerGone
from colossus.server.calls import Reply
from colossus.server.rpc_client import Handle, RpcClient
from colossus.server.shard import ShardSpec, check_optimizer
from colossus.server.sharding import Pieces, Sharding, TensorSpec, TensorState, Value

T = TypeVar("T")
Options = Mapping[str, Any]
_NONE: Options = MappingProxyType({})


class Servers:
    """All servers of a run, seen from one worker. Thread-safe.

    Tensors are split over the servers by rows (`Sharding`). All workers must create and free the same tensors in the
    same order; they then agree on the split without a message. An operation on several tensors is one message for each
    server, and returns a handle. A server executes a worker's operations in the order in which they were started.

    Args:
        clients: a client for each server, in the order of their indices.
        worker: number of this worker.
        workers: all workers in synchronous steps and clocks; None: this one alone.
    """

    def __init__(self, clients: Sequence[RpcClient], worker: int, workers: Sequence[int] | None = None) -> None:
        self._clients, self.worker = list(clients), worker
        self.workers = tuple(sorted({worker} if workers is None else set(workers)))
        self.sharding = Sharding(len(self._clients))
        self._versions: dict[tuple[str, int], int] = {}
        self._lock = threading.RLock()

    def close(self, patience_seconds: float | None = None) -> None:
        """Leave all servers, which continue; see `RpcClient.close`."""
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
        """Create tensors; all workers call it with the same names, shapes and dtypes, and wait for the handle.

        Args:
            tensors: tensors by name. The values of ``source`` are stored; other workers' may be on the meta device.
            optimizer: optimizer of the rule ``gradient``, dict(type=.., **options) by a name of
                `colossus.rows.row_rules`; None: these tensors take no gradients.
            optimizers: optimizers by name of the tensor, where they differ.
            source: the worker whose values are stored; None: the first.
            workers: all workers that call it; None: those in synchronous steps.
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
        for server, specs_of_server in specs.items():
            header = {"names": [spec["name"] for spec in specs_of_server], "specs": specs_of_server, **common}
            calls.append(self._clients[server].call("create", header, values[server].arrays if has_values else ()))
        return Handle(calls, _nothing)

    def free(self, names: Sequence[str]) -> Handle[None]:
        """Free tensors of this worker. They are deleted when all workers that have created them have freed them."""
        with self._lock:
            servers = self.sharding.by_server(names)
            for name in names:
                self.sharding.remove(name)
            self._versions = {key: version for key, version in self._versions.items() if key[0] not in names}
        return Handle(
            [
                self._clients[server].call("free", {"names": names_of_server})
                for server, names_of_server in servers.items()
            ],
            _nothing,
        )

    def push(
        self,
        values: Mapping[str, Value],
        rule: str = "add",
        options: Options = _NONE,
        *,
        options_of: Mapping[str, Options] = _NONE,
    ) -> Handle[dict[str, int | None]]:
        """Change tensors at the servers. The values may be changed as soon as this returns.

        Args:
            values: by name a tensor of the whole shape (rows, if it is sparse), rows (`RowGradient`), or None, which
                means all rows for ``zero`` and no change for ``gradient``. ValueError if one does not fit its tensor.
            rule: ``zero``, ``copy``, ``add``, or ``gradient``: an update by the tensor's optimizer.
            options: options of the optimizer for this update, and ``scale`` and ``clip_value``: see `Shard.push`.
            options_of: options by name, where they differ.

        Returns:
            Staleness by name: the number of updates, this one included, since this worker pulled the tensor, the
            largest over its shards. None if it never pulled it, and for ``zero`` and ``copy``.
        """
        pieces_by_server, counts = self.sharding.split(values), rule in ("add", "gradient")
        calls = []
        for server, pieces in pieces_by_server.items():
            bases = [self._versions.get((name, server)) if counts else None for name in pieces.names]
            chosen = [dict(options_of.get(name, options)) for name in pieces.names]
            header = pieces.header(rule=rule, options=chosen, bases=bases)
            calls.append(self._clients[server].call("push", header, pieces.arrays))

        def staleness(replies: list[Reply]) -> dict[str, int | None]:
            most: dict[str, int | None] = dict.fromkeys(values)
            for pieces, reply in zip(pieces_by_server.values(), replies, strict=True):
                for name, count in zip(pieces.names, reply.header["staleness"], strict=True):
                    before = most[name]
                    most[name] = count if before is None else max(before, count or 0)
            return most

        return Handle(calls, staleness)

    def pull(self, into: Mapping[str, Tensor]) -> Handle[None]:
        """Pull tensors, each shard at one time. ``into`` is written to until the handle is waited for."""
        pieces, copy = self.sharding.targets(into)

        def finish(replies: list[Reply]) -> None:
            copy()
            self._record_versions(pieces, replies)

        return Handle(self._calls("pull", pieces), finish)

    def pull_rows(self, ids: Mapping[str, Tensor]) -> Handle[dict[str, Tensor]]:
        """Pull some rows of tensors: by name, ids int64 [n], ascending and unique -> rows [n, ...]."""
        pieces, rows = self.sharding.wanted_rows(ids)

        def finish(replies: list[Reply]) -> dict[str, Tensor]:
            self._record_versions(pieces, replies)
            return rows

        return Handle(self._calls("pull", pieces), finish)

    def _record_versions(self, pieces_by_server: Mapping[int, Pieces], replies: Sequence[Reply]) -> None:
        for (server, pieces), reply in zip(pieces_by_server.items(), replies, strict=True):
            for name, version in zip(pieces.names, reply.header["versions"], strict=True):
                if name in self.sharding.specs:  # it may have been freed meanwhile
                    self._versions[name, server] = version

    # -- synchronous steps ----------------------------------------------------------------------------------

    def accumulate(self, step: int, values: Mapping[str, Value]) -> Handle[None]:
        """Send this worker's gradients of a step, None where it has none. Each worker sends each tensor once.

        Steps ascend. The sum does not depend on the order of arrival.
        """
        pieces = self.sharding.split(values)
        return Handle(self._calls("accumulate", pieces, step=step, workers=list(self.workers)), _nothing)

    def squares(self, step: int, names: Sequence[str]) -> Handle[dict[str, float]]:
        """Return the square of the norm of each tensor's sum over workers, when all parts are at the servers."""
        servers = self.sharding.by_server(names)
        calls = [
            self._clients[server].call(
                "squares", {"names": names_of_server, "step": step, "workers": list(self.workers)}
            )
            for server, names_of_server in servers.items()
        ]

        def total(replies: list[Reply]) -> dict[str, float]:
            squares = dict.fromkeys(names, 0.0)
            for names_of_server, reply in zip(servers.values(), replies, strict=True):
                for name, square in zip(names_of_server, reply.arrays[0].tolist(), strict=True):
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
        """Update by the sums of a step, after `squares`. All workers may ask for it; it is done once.

        Args:
            step: number of the step.
            names: the tensors.
            options: options as for `push`; ``scale`` is, for example, 1 / tokens times the clip factor.
            options_of: options by name, where they differ.
            found_inf: whether to drop the sums and not update.
            into: tensors by name that receive the new values.
        """
        servers = self.sharding.by_server(names)
        targets, copy = self.sharding.targets({} if into is None else {name: into[name] for name in names})
        common = {"step": step, "found_inf": found_inf, "pull": into is not None}
        calls = []
        for server, names_of_server in servers.items():
            header = common | {
                "names": names_of_server,
                "options": [dict(options_of.get(name, options)) for name in names_of_server],
            }
            calls.append(self._clients[server].call("apply", header, (), targets[server].into if into else ()))
        return Handle(calls, lambda replies: copy())

    # -- workers --------------------------------------------------------------------------------------------

    def clock(self, step: int, max_staleness: int) -> Handle[None]:
        """Wait until this worker, which has finished ``step`` steps, may begin the next.

        It may if no other living worker has finished fewer than ``step - max_staleness`` (SSP; Ho et al., NIPS 2013).
        """
        header = {"step": step, "max_staleness": max_staleness, "workers": list(self.workers)}
        return Handle([self._clients[0].call("clock", header)], _nothing)

    def waiting_for(self) -> list[tuple[int, list[int], str]]:
        """Return what this worker's calls wait for at the servers: (server, workers, what these have not done)."""
        calls = [client.call("waiting_for") for client in self._clients]
        replies = [call.result() for call in calls]
        return [(server, *wait) for server, reply in enumerate(replies) for wait in reply.header["waits"]]

    def wait_or_name_missing(self, handle: Handle[T], seconds: float) -> T:
        """Return the result of a handle; raise PeerGone naming the workers that do not come in time.

        Other errors are those of `Handle.wait`.
        """
        while True:
            try:
                return handle.wait(seconds)
            except TimeoutError as error:
                if waits := self.waiting_for():  # else the servers are busy
                    ranks = ", ".join(map(str, sorted({worker for _, workers, _ in waits for worker in workers})))
                    server, _, words = waits[0]
                    raise PeerGone(
                        f"timeout: rank {ranks} did not reach the servers within {seconds:g} s "
                        f"(comm.timeout_seconds): server {server} waits for workers that {words}"
                    ) from error

    # -- state ----------------------------------------------------------------------------------------------

    def state(self, names: Sequence[str]) -> Handle[dict[str, TensorState]]:
        """Return the values of tensors and the state of their optimizers."""
        servers = self.sharding.by_server(names)
        calls = [
            self._clients[server].call("dump", {"names": names_of_server})
            for server, names_of_server in servers.items()
        ]
        num_rows = {name: self.sharding.specs[name].num_rows for name in names}

        def finish(replies: list[Reply]) -> dict[str, TensorState]:
            parts: dict[str, list[tuple[int, TensorState]]] = {name: [] for name in names}
            for names_of_server, reply in zip(servers.values(), replies, strict=True):
                arrays = iter(reply.arrays)
                for name, entry in zip(names_of_server, reply.header["tensors"], strict=True):
                    rows = {key: next(arrays) for key in entry["keys"]}
                    parts[name].append((entry["start"], TensorState(rows, entry["scalars"])))
            return {
                name: TensorState.joined(num_rows[name], parts_of_tensor) for name, parts_of_tensor in parts.items()
            }

        return Handle(calls, finish)

    def load_state(self, states: Mapping[str, TensorState]) -> Handle[None]:
        """Load what `state` returned, for all rows or for some, into existing tensors."""
        by_server: dict[int, tuple[list[dict[str, Any]], list[Tensor]]] = {}
        for name, state in states.items():
            for part in self.sharding.ranges_of(name):
                tensors, arrays = by_server.setdefault(part.server, ([], []))
                rows = {key: x[part.start : part.stop].contiguous() for key, x in state.rows.items()}
                tensors.append({"name": name, "start": part.start, "keys": list(rows), "scalars": state.scalars})
                arrays += rows.values()
        calls = [
            self._clients[server].call("load", {"tensors": tensors}, arrays)
            for server, (tensors, arrays) in by_server.items()
        ]
        return Handle(calls, _nothing)

    def _calls(self, op: str, pieces_by_server: Mapping[int, Pieces], **more: Any) -> list[Future[Reply]]:
        return [
            self._clients[server].call(op, pieces.header(**more), pieces.arrays, pieces.into or None)
            for server, pieces in pieces_by_server.items()
        ]


def _nothing(replies: list[Reply]) -> None:
    pass
