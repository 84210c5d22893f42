"""The split of tensors over servers, and the pieces in which a worker sends them.

It depends on names, shapes, dtypes and the number of servers alone: workers know it without a message.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient

#: a value to push: a tensor (sparse COO, too), some rows, or none
Value = Tensor | RowGradient | None

#: a tensor with fewer bytes than this fraction of a server's share is whole on one server
_SMALL = 1 / 8


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that is split.

    Attributes:
        name: unique name.
        shape: shape of the whole tensor. Its rows are those of dim 0; a scalar is one row.
        dtype: its dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a tensor, on one server."""

    server: int
    start: int
    stop: int


@dataclass
class Pieces:
    """One server's part of an operation: lists in the order of ``names``."""

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    arrays: list[Tensor] = field(default_factory=list)
    into: list[Tensor] = field(default_factory=list)

    def header(self, **more: Any) -> dict[str, Any]:
        return {"names": self.names, "kinds": self.kinds, **more}


@dataclass(frozen=True)
class TensorState:
    """The state of a tensor at the servers.

    Attributes:
        rows: ``value`` and optimizer state with rows, under torch's names: [rows, ...]; [1] for a scalar.
        scalars: optimizer state without rows (``step``).
    """

    rows: dict[str, Tensor]
    scalars: dict[str, float]

    @classmethod
    def joined(cls, num_rows: int, parts: Iterable[tuple[int, TensorState]]) -> TensorState:
        """Return the state of a tensor from its servers' parts, (first row, state); state that a server lacks is 0."""
        whole = cls({}, {})
        for start, part in parts:
            for key, x in part.rows.items():
                rows = whole.rows.setdefault(key, x.new_zeros((num_rows, *x.shape[1:])))
                rows[start : start + len(x)] = x
            for key, scalar in part.scalars.items():
                whole.scalars[key] = max(scalar, whole.scalars.get(key, scalar))
        return whole


class Sharding:
    """Tensors split over servers, balanced by bytes.

    Of the tensors of one `place`, large ones are split over all servers. Small ones stay whole: the largest first, each
    goes to the server with the fewest bytes. Tensors of earlier calls stay where they are, and count. The bytes of two
    servers differ by at most the largest piece that is not split: a row of a large tensor, or a small tensor.

    Args:
        num_servers: number of servers.

    Attributes:
        loads: bytes on each server.
        specs: tensors by name.
        ranges: ranges by name, in the order of rows, one for each server that has rows. Only a tensor without elements
            has an empty range.
    """

    def __init__(self, num_servers: int) -> None:
        self.loads = [0] * num_servers
        self.specs: dict[str, TensorSpec] = {}
        self.ranges: dict[str, tuple[RowRange, ...]] = {}

    def place(self, specs: Iterable[TensorSpec]) -> None:
        """Assign ranges to new tensors. The order of ``specs`` does not matter.

        Raises:
            ValueError: if a name exists already.
        """
        new = sorted(specs, key=lambda spec: (-spec.nbytes, spec.name))
        for spec in new:
            if spec.name in self.specs:
                raise ValueError(f"there are two tensors {spec.name!r}")
        num_servers = len(self.loads)
        share = sum(spec.nbytes for spec in new) / num_servers
        for spec in new:
            lightest = sorted(range(num_servers), key=lambda server: (self.loads[server], server))
            rows_each, more = 0, spec.num_rows
            if spec.nbytes > share * _SMALL and spec.num_rows > 1:
                rows_each, more = divmod(spec.num_rows, num_servers)
                extra = dict.fromkeys(lightest[:more], 1)
            else:
                extra = {lightest[0]: more}
            ranges, start = [], 0
            for server in range(num_servers):
                if count := rows_each + extra.get(server, 0):
                    ranges.append(RowRange(server, start, start + count))
                    self.loads[server] += count * spec.row_bytes
                    start += count
            self.specs[spec.name] = spec
            self.ranges[spec.name] = tuple(ranges) or (RowRange(lightest[0], 0, 0),)

    def remove(self, name: str) -> None:
        spec = self.specs.pop(name)
        for part in self.ranges.pop(name):
            self.loads[part.server] -= (part.stop - part.start) * spec.row_bytes

    # -- pieces ---------------------------------------------------------------------------------------------

    def ranges_of(self, name: str) -> Sequence[RowRange]:
        if name not in self.ranges:
            raise ValueError(f"there is no tensor {name!r} at the servers: it was not made, or was freed")
        return self.ranges[name]

    def by_server(self, names: Iterable[str]) -> dict[int, list[str]]:
        """Return, by server, the names of the tensors that it has a part of."""
        names_of: dict[int, list[str]] = {}
        for name in names:
            for part in self.ranges_of(name):
                names_of.setdefault(part.server, []).append(name)
        return names_of

    def split(self, values: Mapping[str, Value]) -> dict[int, Pieces]:
        """Return the pieces of values by server. A server with a part of a tensor gets an entry even without rows.

        Raises:
            ValueError: if a value does not fit its tensor.
        """
        by_server: dict[int, Pieces] = {}
        for name, value in values.items():
            ranges, spec = self.ranges_of(name), self.specs[name]
            kind, cuts = "none", [0]
            if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
                value = value.detach().coalesce()
                value = RowGradient(value.indices()[0], value.values())
            if isinstance(value, RowGradient):
                kind, value = "rows", RowGradient(value.ids.to("cpu"), value.rows.detach().to("cpu"))
                _check_ids(value.ids, spec)
                _check_fits(value.rows, (len(value.ids), *spec.shape[1:]), spec)
                cuts = _cuts(value.ids, ranges)
            elif value is not None:
                _check_fits(value, spec.shape, spec)
                kind, value = "dense", value.detach().to("cpu").reshape(spec.shape or (1,))
            for number, part in enumerate(ranges):
                pieces = by_server.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append(kind)
                if isinstance(value, RowGradient):
                    here = slice(cuts[number], cuts[number + 1])
                    pieces.arrays += [value.ids[here] - part.start, value.rows[here].contiguous()]
                elif value is not None:
                    pieces.arrays.append(value[part.start : part.stop].contiguous())
        return by_server

    def targets(self, into: Mapping[str, Tensor]) -> tuple[dict[int, Pieces], Callable[[], None]]:
        """Return, by server, the tensors that receive its values, and a function to call when all have arrived."""
        by_server: dict[int, Pieces] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for name, tensor in into.items():
            ranges, spec = self.ranges_of(name), self.specs[name]
            whole = tensor.detach()
            if whole.device.type != "cpu" or not whole.is_contiguous() or whole.dtype != spec.dtype:
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                copies.append((tensor.detach(), whole))
            whole = whole.view(spec.shape or (1,))
            for part in ranges:
                pieces = by_server.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append("dense")
                pieces.into.append(whole[part.start : part.stop])

        def finish() -> None:
            for target, source in copies:
                target.copy_(source)

        return by_server, finish

    def wanted_rows(self, ids: Mapping[str, Tensor]) -> tuple[dict[int, Pieces], dict[str, Tensor]]:
        """Return the pieces of requests for rows by server, and by name the tensors that receive them, [n, ...].

        Args:
            ids: ids of rows by name, int64 [n], ascending and unique.
        """
        by_server: dict[int, Pieces] = {}
        rows: dict[str, Tensor] = {}
        for name, wanted in ids.items():
            ranges, spec = self.ranges_of(name), self.specs[name]
            wanted = wanted.to("cpu")
            _check_ids(wanted, spec)
            rows[name] = torch.empty((len(wanted), *spec.shape[1:]), dtype=spec.dtype)
            cuts = _cuts(wanted, ranges)
            for number, part in enumerate(ranges):
                here = slice(cuts[number], cuts[number + 1])
                if here.start < here.stop:
                    pieces = by_server.setdefault(part.server, Pieces())
                    pieces.names.append(name)
                    pieces.kinds.append("rows")
                    pieces.arrays.append(wanted[here] - part.start)
                    pieces.into.append(rows[name][here])
        return by_server, rows


def _cuts(ids: Tensor, ranges: Sequence[RowRange]) -> list[int]:
    """Return the position of the first id of each range, and the number of ids."""
    starts: list[int] = torch.searchsorted(ids, torch.tensor([part.start for part in ranges])).tolist()
    return [*starts, len(ids)]


def _check_fits(value: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if value.shape != shape:
        raise ValueError(f"{spec.name!r} is {list(spec.shape)}: {list(shape)} fits, not {list(value.shape)}")
    if value.dtype != spec.dtype and not (value.is_floating_point() and spec.dtype.is_floating_point):
        raise ValueError(f"{spec.name!r} is {spec.dtype}, the value is {value.dtype}")


def _check_ids(ids: Tensor, spec: TensorSpec) -> None:
    """Raise ValueError unless ids are int64 [n], ascending, unique, and of existing rows."""
    if not spec.shape:
        raise ValueError(f"{spec.name!r} is a scalar, which has no rows")
    if ids.dtype != torch.int64 or ids.dim() != 1 or (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"ids of rows of {spec.name!r} are int64 [n], ascending and each once")
    if len(ids) and not 0 <= ids[0] <= ids[-1] < spec.num_rows:
        row = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"row {row} of {spec.name!r} is not one of its {spec.num_rows} rows")
