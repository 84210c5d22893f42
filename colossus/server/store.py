"""The store of one server: shards of the tensors of a run, and the operations that workers request."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.calls import Request
from colossus.server.shard import Part, Shard, ShardSpec
from colossus.server.sync_steps import Awaited, SyncSteps, WaitingRequests


class _Shards(dict[str, Shard]):
    def __missing__(self, name: str) -> Shard:
        raise ValueError(f"there is no tensor {name!r}: it was not made, or was freed")


@dataclass
class _Making:
    """Tensors that are being created, until all workers have asked for them.

    Attributes:
        specs: specifications by worker.
        values: values of the source worker.
        is_made: whether the shards exist.
    """

    specs: dict[int, list[ShardSpec]] = field(default_factory=dict)
    values: Sequence[Tensor] = ()
    is_made: bool = False


class ShardStore:
    """The handler of one `RpcServer`: shards of tensors by name.

    A server handles one request after the other, so each is atomic: a pull sees a shard before or after an update.
    Clients check that values fit.

    In headers, ``names`` are the tensors of a request, and other lists are in their order. ``kinds`` defines the arrays
    of each tensor: "dense": one array of the shard's shape; "rows": two, ids int64 [n] within the shard, ascending and
    unique, and rows [n, ...]; "none": no array.
    """

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = _Shards()
        #: by tensor, the workers that have not freed it; a tensor without users is deleted
        self._users: dict[str, set[int]] = {}
        #: tensors that are being created, by the first name of each call
        self._making: dict[str, _Making] = {}
        #: workers that have ended, and why
        self._gone: dict[int, str] = {}
        #: steps that each worker has finished
        self._clocks: dict[int, int] = {}
        self._waiting = WaitingRequests()
        self._steps = SyncSteps(self._shards, self._waiting, self._gone)
        self._ops: dict[str, Callable[[Request], object]] = {
            "create": self._create,
            "free": self._free,
            "push": self._push,
            "pull": self._pull,
            "accumulate": lambda request: self._steps.accumulate(request, self._parts(request)),
            "squares": self._steps.squares,
            "apply": self._apply,
            "clock": self._clock,
            "waiting_for": self._waiting_for,
            "dump": self._dump,
            "load": self._load,
        }

    def handle(self, request: Request) -> None:
        """Answer a request, now or when other workers have done what it waits for."""
        self._gone.pop(request.worker, None)
        try:
            self._ops[request.op](request)
        except Exception as error:  # only this worker's call fails
            request.fail(error)
        self._waiting.retry()

    def on_gone(self, worker: int, reason: str | None) -> None:
        """Forget a worker that has ended: no request waits for it any more, and its tensors are freed."""
        self._gone[worker] = reason or "it has closed its connection"
        self._waiting.drop(worker)
        self._clocks.pop(worker, None)
        for making in self._making.values():
            making.specs.pop(worker, None)
        self._drop([name for name, users in self._users.items() if worker in users], worker)
        self._waiting.retry()

    # -- tensors --------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> None:
        """Create tensors when all workers have asked for them, and answer them.

        Header: specs (`ShardSpec`); has_values; source, the worker that sends values; workers, all that create them.
        """
        header, worker = request.header, request.worker
        specs = [ShardSpec.of_json(spec) for spec in header["specs"]]
        source, workers, name = header["source"], header["workers"], specs[0].name
        if worker in self._users.get(name, ()):
            raise ValueError(f"worker {worker} has {name!r} already; free it before it is made again")
        making = self._making.setdefault(name, _Making())
        making.specs[worker] = specs
        if header["has_values"]:
            making.values = request.arrays

        def try_to_answer() -> Awaited | None:
            absent = [other for other in workers if other not in making.specs and other not in self._gone]
            if absent and not making.is_made:
                return absent, f"have not made {name!r}"
            if source not in making.specs:
                raise ValueError(f"worker {source} has gone ({self._gone.get(source)}) and has not made {name!r}")
            if not making.is_made:
                self._make(making, source)
                making.is_made = self._making.pop(name, None) is not None
            if specs != making.specs[source]:
                raise ValueError(
                    f"{name!r} is {specs[0]} for worker {worker}, and {making.specs[source][0]} for worker {source}"
                )
            request.reply()
            return None

        self._waiting.add(request, try_to_answer)

    def _make(self, making: _Making, source: int) -> None:
        specs = making.specs[source]
        shards = [Shard(spec, value.clone()) for spec, value in zip(specs, making.values, strict=True)]
        users = {worker for worker, other_specs in making.specs.items() if other_specs == specs}
        for shard in shards:
            self._shards[shard.spec.name], self._users[shard.spec.name] = shard, set(users)

    def _free(self, request: Request) -> None:
        names = request.header["names"]
        for name in names:
            self._shards[name]
        self._drop(names, request.worker)
        request.reply()

    def _drop(self, names: Sequence[str], worker: int) -> None:
        """Remove a worker from the users of tensors, and delete tensors without users."""
        for name in names:
            self._users[name].discard(worker)
            if not self._users[name]:
                del self._shards[name], self._users[name]
                self._steps.restart([name])

    def _parts(self, request: Request) -> list[tuple[Shard, Part]]:
        arrays = iter(request.arrays)
        part_of: dict[str, Callable[[], Part]] = {
            "dense": lambda: next(arrays),
            "rows": lambda: RowGradient(next(arrays), next(arrays)),
            "none": lambda: None,
        }
        names, kinds = request.header["names"], request.header["kinds"]
        return [(self._shards[name], part_of[kind]()) for name, kind in zip(names, kinds, strict=True)]

    def _push(self, request: Request) -> None:
        """Update shards, and reply with the staleness of each: the number of updates since the worker pulled it.

        Header: names; kinds; rule; options of each; bases, the version that the worker has pulled, or None.
        """
        header, staleness = request.header, []
        for (shard, part), options, base in zip(self._parts(request), header["options"], header["bases"], strict=True):
            staleness.append(None if base is None else shard.version - base)
            shard.push(header["rule"], part, options)
        request.reply({"staleness": staleness})

    def _pull(self, request: Request) -> None:
        """Reply with versions and values.

        Header: names; kinds, "dense", or "rows" with an array of ids.
        """
        ids = iter(request.arrays)
        shards = [self._shards[name] for name in request.header["names"]]
        values = [
            shard.values.index_select(0, next(ids)) if kind == "rows" else shard.values
            for shard, kind in zip(shards, request.header["kinds"], strict=True)
        ]
        request.reply({"versions": [shard.version for shard in shards]}, values)

    def _apply(self, request: Request) -> None:
        """Apply the sums of a step (`SyncSteps.apply`), and reply with the values if ``pull`` is set."""
        shards = self._steps.apply(request)
        request.reply({}, [shard.values for shard in shards] if request.header["pull"] else [])

    # -- workers --------------------------------------------------------------------------------------------

    def _clock(self, request: Request) -> None:
        """Answer when the worker may begin its next step: no other living worker is further behind than allowed.

        Stale synchronous parallelism (SSP; Ho et al., NIPS 2013). Header: step, the number of finished steps;
        max_staleness; workers.
        """
        least = request.header["step"] - request.header["max_staleness"]
        for worker in request.header["workers"]:
            if worker not in self._gone:
                self._clocks.setdefault(worker, 0)
        self._clocks[request.worker] = request.header["step"]

        def try_to_answer() -> Awaited | None:
            behind = sorted(worker for worker, clock in self._clocks.items() if clock < least)
            if behind:
                return behind, f"have finished fewer than {least} steps"
            request.reply()
            return None

        self._waiting.add(request, try_to_answer)

    def _waiting_for(self, request: Request) -> None:
        """Reply with what each unanswered request of this worker waits for: (workers, what they have not done)."""
        request.reply({"waits": self._waiting.of(request.worker)})

    # -- state ----------------------------------------------------------------------------------------------

    def _dump(self, request: Request) -> None:
        """Reply with ``tensors``, of each its start, scalars and keys, with an array for each key. Header: names."""
        arrays: list[Tensor] = []
        tensors: list[Mapping[str, Any]] = []
        for name in request.header["names"]:
            shard = self._shards[name]
            rows = shard.by_row()
            arrays += rows.values()
            tensors.append({"start": shard.spec.start, "scalars": shard.scalars(), "keys": list(rows)})
        request.reply({"tensors": tensors}, arrays)

    def _load(self, request: Request) -> None:
        """Load tensors. Header: tensors, as in the reply of `_dump`, with their names."""
        arrays = iter(request.arrays)
        for entry in request.header["tensors"]:
            shard = self._shards[entry["name"]]
            rows = {key: next(arrays) for key in entry["keys"]}
            shard.load(entry["start"] - shard.spec.start, rows, entry["scalars"])
            self._steps.restart([entry["name"]])
        request.reply()
