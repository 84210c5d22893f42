"""What one server keeps of the tensors of a run, and what it does when workers ask."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from torch import Tensor

from colossus.server.clocks import Clocks
from colossus.server.load import ServerLoad
from colossus.server.messages import Request
from colossus.server.shard import ShardSpec
from colossus.server.stored_tensors import StoredTensors, check_ids
from colossus.server.sync_steps import SyncSteps
from colossus.server.waiting import Answer, Awaited, WaitingRequests


class ShardStore:
    """The handler of one `RpcServer`: shards of tensors by name.

    A server hands over one request after the other, so each is atomic: a pull sees a shard before or after an update,
    never in between. A request that does not fit is refused in words, before it has changed anything.

    In headers ``names`` are the tensors of a request, and other lists go along with them; for ``kinds`` see
    `StoredTensors.parts`.
    """

    def __init__(self) -> None:
        self.load = ServerLoad()
        self._tensors, self._waiting, self._clocks = StoredTensors(), WaitingRequests(), Clocks()
        self._gone: dict[int, str] = {}
        self._deaths: Counter[int] = Counter()
        self._steps = SyncSteps(self._tensors, self._waiting, self._gone)
        self._ops: dict[str, Callable[[Request], object]] = {
            "create": self._create,
            "free": self._free,
            "push": self._push,
            "pull": self._pull,
            "accumulate": self._steps.accumulate,
            "squares": self._steps.squares,
            "apply": self._apply,
            "clock": self._clock,
            "waiting_for": self._waiting_for,
            "dump": self._dump,
            "load": self._load,
            "stats": self._stats,
        }

    @property
    def num_gone(self) -> int:
        """How many workers have ended."""
        return len(self._gone)

    def handle(self, request: Request) -> None:
        """Answer a request, now or when others have done what it waits for."""
        began = time.perf_counter()
        self.load.requests[request.op] += 1
        self.load.bytes_in += sum(array.nbytes for array in request.arrays)
        self._gone.pop(request.worker, None)
        try:
            if request.op not in self._ops:
                raise ValueError(f"there is no {request.op!r}; there are {', '.join(self._ops)}")
            self._ops[request.op](request)
        except ValueError as error:
            request.fail(str(error))
        except Exception as error:  # a header that no worker of ours sends: its worker is told, and others go on
            request.fail(f"{request.op}: {type(error).__name__}: {error}")
        self._waiting.look_again()
        self.load.busy_seconds += time.perf_counter() - began

    def on_gone(self, worker: int, reason: str | None) -> None:
        """A worker has ended; nobody waits for it any more."""
        self._gone[worker] = reason or "it has closed its connection"
        self._deaths[worker] += 1
        self._waiting.drop(worker)
        self._clocks.leave(worker)
        self._steps.restart(self._tensors.leave(worker))
        self._waiting.look_again()

    # -- tensors --------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> None:
        """Header: specs (`ShardSpec`), has_values, source: the worker that gives values; workers, who make them.
        Answered when the tensors are there; the source when all workers are: what it leaves early is there for those
        that come late."""
        specs = [ShardSpec.of_json(spec) for spec in request.header["specs"]]
        values = list(request.arrays) if request.header["has_values"] else None

        worker, source, workers = request.worker, request.header["source"], request.header["workers"]
        has_joined = False

        def absent() -> list[int]:
            return [each for each in workers if each not in self._gone and not self._tensors.has_joined(specs, each)]

        def joined() -> Answer | None:
            nonlocal has_joined
            has_joined = has_joined or self._tensors.join(specs, worker, values)
            if has_joined:
                return None if worker == source and absent() else request.reply
            if source in self._gone and self._deaths[source] > self._deaths[worker]:  # else both were started again
                raise ValueError(f"worker {source} has gone ({self._gone[source]}) and has not made {specs[0].name!r}")
            return None

        def awaited() -> Awaited:
            if users := self._tensors.users_before(specs, worker):
                return users, f"have not freed the {specs[0].name!r} before"
            return absent() if has_joined else [source], f"have not made {specs[0].name!r}"

        self._waiting.add(request, joined, awaited)

    def _free(self, request: Request) -> None:
        names = request.header["names"]
        self._tensors.free(names, request.worker)
        self._steps.restart([name for name in names if name not in self._tensors.names()])
        request.reply()

    def _push(self, request: Request) -> None:
        """Header: names, kinds, rule, options (for each), bases: the version that the worker has pulled, None: none.
        The
        reply: versions, and staleness of each: updates that came between."""
        header, staleness = request.header, []
        found = self._tensors.parts(header["names"], header["kinds"], request.arrays)
        pairs = list(zip(found, header["options"], header["bases"], strict=True))
        for (shard, part), options, _ in pairs:
            shard.check(header["rule"], part, options)
        for (shard, part), options, base in pairs:
            stale = None if base is None else shard.version - base
            if stale is not None:
                self.load.staleness[stale] += 1
            staleness.append(stale)
            shard.push(header["rule"], part, options)
        request.reply({"versions": [shard.version for shard, _ in found], "staleness": staleness})

    def _pull(self, request: Request) -> None:
        """Header: names, kinds: "dense", or "rows": an array of ids. The reply: versions; values."""
        ids, out = iter(request.arrays), []
        shards = self._tensors.shards(request.header["names"])
        for shard, kind in zip(shards, request.header["kinds"], strict=True):
            if kind == "rows":
                wanted = next(ids)
                check_ids(wanted, len(shard.values), shard.spec.name)
                out.append(shard.values.index_select(0, wanted))
            else:
                out.append(shard.values)
        self._reply(request, {"versions": [shard.version for shard in shards]}, out)

    def _apply(self, request: Request) -> None:
        """See `SyncSteps.apply`; pull: whether values are wanted."""
        values = self._steps.apply(request)
        versions = [self._tensors.shard(name).version for name in request.header["names"]]
        self._reply(request, {"versions": versions}, values if request.header["pull"] else [])

    # -- workers --------------------------------------------------------------------------------------------

    def _clock(self, request: Request) -> None:
        """Header: step (how many the worker has finished), max_staleness, workers. Answered when it may go on."""
        step, most = request.header["step"], request.header["max_staleness"]
        self._clocks.expect(worker for worker in request.header["workers"] if worker not in self._gone)
        self._clocks.advance(request.worker, step)

        def answer() -> Answer | None:
            return request.reply if self._clocks.may_begin(step, most) else None

        def awaited() -> Awaited:
            return self._clocks.behind(step, most), f"have finished fewer than {step - most} steps"

        self._waiting.add(request, answer, awaited)

    def _waiting_for(self, request: Request) -> None:
        """The reply: waits, for each request of this worker that is not answered (workers, what they have not done)."""
        request.reply({"waits": self._waiting.of(request.worker)})

    # -- state ----------------------------------------------------------------------------------------------

    def _dump(self, request: Request) -> None:
        """Header: names. The reply: for each of ``tensors`` its start, version, scalars and keys, each of which is an
        array."""
        arrays: list[Tensor] = []
        tensors = []
        for shard in self._tensors.shards(request.header["names"]):
            rows = shard.by_row()
            arrays += rows.values()
            about = {"start": shard.spec.start, "version": shard.version, "scalars": shard.scalars()}
            tensors.append({**about, "keys": list(rows)})
        self._reply(request, {"tensors": tensors}, arrays)

    def _load(self, request: Request) -> None:
        """Header: tensors as `_dump` gives them, with their names."""
        arrays, steps = iter(request.arrays), []
        for given in request.header["tensors"]:
            shard = self._tensors.shard(given["name"])
            rows = {key: next(arrays) for key in given["keys"]}
            shard.load(given["start"] - shard.spec.start, rows, given["scalars"])
            steps.append(given["name"])
        self._steps.restart(steps)
        request.reply()

    def _stats(self, request: Request) -> None:
        shards = {
            shard.spec.name: {"updates": shard.version, "bytes": shard.values.nbytes, "rows": len(shard.values)}
            for shard in self._tensors
        }
        waiting = len(self._waiting)
        request.reply({**self.load.as_json(), "shards": shards, "waiting": waiting})

    def _reply(self, request: Request, header: dict[str, Any], arrays: list[Tensor]) -> None:
        self.load.bytes_out += sum(array.nbytes for array in arrays)
        request.reply(header, arrays)
