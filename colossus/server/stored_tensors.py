"""The shards of one server by name: who made them, who uses them, and the parts of them that requests bring."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.shard import Part, Shard, ShardSpec


class StoredTensors:
    """Shards by name. A tensor is there until all workers that have joined it have freed it or have gone."""

    def __init__(self) -> None:
        self._shards: dict[str, Shard] = {}
        self._users: dict[str, set[int]] = {}
        self._freed_by: dict[str, set[int]] = {}

    def __iter__(self) -> Iterator[Shard]:
        return iter(self._shards.values())

    def names(self) -> list[str]:
        return list(self._shards)

    def shard(self, name: str) -> Shard:
        if name not in self._shards:
            raise ValueError(f"there is no tensor {name!r}: it was not made, or was freed")
        return self._shards[name]

    def shards(self, names: Sequence[str]) -> list[Shard]:
        return [self.shard(name) for name in names]

    # -- making and freeing ---------------------------------------------------------------------------------

    def join(self, specs: Sequence[ShardSpec], worker: int, values: Sequence[Tensor] | None) -> bool:
        """Make tensors (with values), or join those that another worker makes (without). False: not yet.

        A worker that has freed a tensor and makes it again waits until all have freed it.

        Raises:
            ValueError: the worker has it already, or others have made it in another way.
        """
        for spec in specs:
            if worker in self._users.get(spec.name, ()):
                raise ValueError(f"worker {worker} has {spec.name!r} already; free it before it is made again")
        if any(worker in self._freed_by.get(spec.name, ()) for spec in specs):
            return False
        for spec in specs:
            if spec.name in self._shards and self._shards[spec.name].spec != spec:
                made = self._shards[spec.name].spec
                raise ValueError(f"{spec.name!r} is {spec} for worker {worker}, and {made} for those that have made it")
        if values is None and any(spec.name not in self._shards for spec in specs):
            return False
        for spec, value in zip(specs, values or (), strict=values is not None):
            if spec.name not in self._shards:
                self._shards[spec.name] = Shard(spec, value.clone())
        for spec in specs:
            self._users.setdefault(spec.name, set()).add(worker)
        return True

    def awaited(self, specs: Sequence[ShardSpec], worker: int, source: int) -> list[int]:
        """Whom a worker that makes tensors waits for: those that have not freed them, or the one that gives values."""
        users = {
            user for spec in specs if worker in self._freed_by.get(spec.name, ()) for user in self._users[spec.name]
        }
        return sorted(users) or [source]

    def free(self, names: Sequence[str], worker: int) -> None:
        """A worker needs tensors no more."""
        for name in names:
            self.shard(name)
        for name in names:
            self._freed_by.setdefault(name, set()).add(worker)
            self._drop(name, worker)

    def leave(self, worker: int) -> list[str]:
        """A worker has gone. Names of tensors that nobody is left for: they are dropped."""
        for freed_by in self._freed_by.values():
            freed_by.discard(worker)
        return [name for name in self.names() if worker in self._users[name] and self._drop(name, worker)]

    def _drop(self, name: str, worker: int) -> bool:
        """Whether a worker was the last that had a tensor."""
        self._users[name].discard(worker)
        if self._users[name]:
            return False
        del self._shards[name], self._users[name]
        self._freed_by.pop(name, None)
        return True

    # -- parts ----------------------------------------------------------------------------------------------

    def parts(self, names: Sequence[str], kinds: Sequence[str], arrays: Sequence[Tensor]) -> list[tuple[Shard, Part]]:
        """What a request brings for each of its tensors.

        Args:
            kinds: "dense": one array, as the shard; "rows": two, ids int64 [n] within the shard, ascending and each
                once, and rows [n, ...]; "none".

        Raises:
            ValueError: something does not fit.
        """
        left = iter(arrays)
        found: list[tuple[Shard, Part]] = []
        for name, kind in zip(names, kinds, strict=True):
            shard = self.shard(name)
            part: Part = None
            if kind == "dense":
                part = next(left)
                if part.shape != shard.values.shape:
                    raise ValueError(f"{name!r} is {list(shard.values.shape)} here, and {list(part.shape)} was sent")
            elif kind == "rows":
                part = sent = RowGradient(next(left), next(left))
                check_ids(sent.ids, len(shard.values), name)
                if sent.rows.shape != (len(sent.ids), *shard.values.shape[1:]):
                    raise ValueError(
                        f"{len(sent.ids)} rows of {name!r} are {[len(sent.ids), *shard.values.shape[1:]]}, and "
                        f"{list(sent.rows.shape)} was sent"
                    )
            elif kind != "none":
                raise ValueError(f"{name!r} comes as {kind!r}; there are dense, rows and none")
            found.append((shard, part))
        return found


def check_ids(ids: Tensor, num_rows: int, name: str) -> None:
    """Raises ValueError unless ids are int64 [n], ascending, each once, and of this many rows."""
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids of rows of {name!r} are int64 [n], not {ids.dtype} {list(ids.shape)}")
    if not len(ids):
        return
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"ids of rows of {name!r} ascend, each once")
    if ids[0] < 0 or ids[-1] >= num_rows:
        raise ValueError(
            f"row {int(ids[0] if ids[0] < 0 else ids[-1])} of {name!r} is not one of its {num_rows} rows here"
        )
