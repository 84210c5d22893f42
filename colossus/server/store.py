"""What one server keeps of the tensors of a run, and what it does when workers ask."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.frames import Request
from colossus.server.shard import Part, Shard, ShardSpec
from colossus.server.sync_steps import Awaited, SyncSteps, WaitingRequests


class _Shards(dict[str, Shard]):
    def __missing__(self, name: str) -> Shard:
        raise ValueError(f"there is no tensor {name!r}: it was not made, or was freed")


@dataclass
class _Making:
    """Tensors that are being made: all workers have to come.

    Attributes:
        specs: as each worker that has come has them.
        values: of the worker whose values count.
    """

    specs: dict[int, list[ShardSpec]] = field(default_factory=dict)
    values: Sequence[Tensor] = ()
    is_made: bool = False


class ShardStore:
    """The handler of one `RpcServer`: shards of tensors by name.

    A server hands over one request after the other, so each is atomic: a pull sees a shard before or after an update,
    never in between. What is sent fits: clients check it.

    In headers ``names`` are the tensors of a request, and other lists go along with them. ``kinds`` says what comes of
    each: "dense": one array, as the shard; "rows": two, ids int64 [n] within the shard, ascending and each once, and
    rows [n, ...]; "none".
    """

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = _Shards()
        #: by tensor the workers that have not freed it; it is there as long as there is one
        self._users: dict[str, set[int]] = {}
        #: by the first of the tensors that are made at once
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
        """Answer a request, now or when others have done what it waits for."""
        self._gone.pop(request.worker, None)
        try:
            self._ops[request.op](request)
        except Exception as error:  # the worker is told, and others go on
            request.fail(error)
        self._waiting.look_again()

    def on_gone(self, worker: int, reason: str | None) -> None:
        """A worker has ended; nobody waits for it any more, and its tensors are freed."""
        self._gone[worker] = reason or "it has closed its connection"
        self._waiting.drop(worker)
        self._clocks.pop(worker, None)
        for making in self._making.values():
            making.specs.pop(worker, None)
        self._drop([name for name, users in self._users.items() if worker in users], worker)
        self._waiting.look_again()

    # -- tensors --------------------------------------------------------------------------------------------

    def _create(self, request: Request) -> None:
        """Header: specs (`ShardSpec`), has_values, source: the worker that gives values; workers, who make them.
        Answered when all of these have asked.
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

        def look() -> Awaited | None:
            absent = [each for each in workers if each not in making.specs and each not in self._gone]
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

        self._waiting.add(request, look)

    def _make(self, making: _Making, source: int) -> None:
        specs = making.specs[source]
        made = [Shard(spec, value.clone()) for spec, value in zip(specs, making.values, strict=True)]
        users = {worker for worker, theirs in making.specs.items() if theirs == specs}
        for shard in made:
            self._shards[shard.spec.name], self._users[shard.spec.name] = shard, set(users)

    def _free(self, request: Request) -> None:
        names = request.header["names"]
        for name in names:
            self._shards[name]
        self._drop(names, request.worker)
        request.reply()

    def _drop(self, names: Sequence[str], worker: int) -> None:
        """A worker needs tensors no more."""
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
        """Header: names, kinds, rule, options (for each), bases: the version that the worker has pulled, None: none.
        The reply: staleness of each: updates that came between.
        """
        header, staleness = request.header, []
        for (shard, part), options, base in zip(self._parts(request), header["options"], header["bases"], strict=True):
            staleness.append(None if base is None else shard.version - base)
            shard.push(header["rule"], part, options)
        request.reply({"staleness": staleness})

    def _pull(self, request: Request) -> None:
        """Header: names, kinds: "dense", or "rows": an array of ids. The reply: versions; values."""
        ids = iter(request.arrays)
        shards = [self._shards[name] for name in request.header["names"]]
        out = [
            shard.values.index_select(0, next(ids)) if kind == "rows" else shard.values
            for shard, kind in zip(shards, request.header["kinds"], strict=True)
        ]
        request.reply({"versions": [shard.version for shard in shards]}, out)

    def _apply(self, request: Request) -> None:
        """See `SyncSteps.apply`; pull: whether values are wanted."""
        shards = self._steps.apply(request)
        request.reply({}, [shard.values for shard in shards] if request.header["pull"] else [])

    # -- workers --------------------------------------------------------------------------------------------

    def _clock(self, request: Request) -> None:
        """Stale synchronous parallelism (SSP; Ho et al., NIPS 2013). Header: step (how many the worker has finished),
        max_staleness, workers. Answered when it may go on: no other that lives is further behind.
        """
        least = request.header["step"] - request.header["max_staleness"]
        for worker in request.header["workers"]:
            if worker not in self._gone:
                self._clocks.setdefault(worker, 0)
        self._clocks[request.worker] = request.header["step"]

        def look() -> Awaited | None:
            behind = sorted(worker for worker, clock in self._clocks.items() if clock < least)
            if behind:
                return behind, f"have finished fewer than {least} steps"
            request.reply()
            return None

        self._waiting.add(request, look)

    def _waiting_for(self, request: Request) -> None:
        """The reply: waits, for each request of this worker that is not answered (workers, what they have not done)."""
        request.reply({"waits": self._waiting.of(request.worker)})

    # -- state ----------------------------------------------------------------------------------------------

    def _dump(self, request: Request) -> None:
        """Header: names. The reply: for each of ``tensors`` its start, scalars and keys, each of which is an array."""
        arrays: list[Tensor] = []
        tensors: list[Mapping[str, Any]] = []
        for name in request.header["names"]:
            shard = self._shards[name]
            rows = shard.by_row()
            arrays += rows.values()
            tensors.append({"start": shard.spec.start, "scalars": shard.scalars(), "keys": list(rows)})
        request.reply({"tensors": tensors}, arrays)

    def _load(self, request: Request) -> None:
        """Header: tensors as `_dump` gives them, with their names."""
        arrays = iter(request.arrays)
        for given in request.header["tensors"]:
            shard = self._shards[given["name"]]
            rows = {key: next(arrays) for key in given["keys"]}
            shard.load(given["start"] - shard.spec.start, rows, given["scalars"])
            self._steps.restart([given["name"]])
        request.reply()
