"""Which server has which rows of which tensor, and the pieces in which tensors of a worker travel.

Where rows are follows from names, shapes, dtypes and the number of servers alone: workers know it without talking.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient

#: what is pushed: a tensor (sparse COO, too), some rows, or nothing
Value = Tensor | RowGradient | None

#: a tensor of fewer bytes than this part of a server's share of all is whole on one server
_SMALL = 1 / 8


@dataclass(frozen=True)
class TensorSpec:
    """What is sharded.

    Attributes:
        name: unique.
        shape: of the whole tensor. Its rows are those of dim 0; a scalar is one row.
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
    """What one server gets of an operation: lists in the order of ``names``."""

    names: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    arrays: list[Tensor] = field(default_factory=list)
    into: list[Tensor] = field(default_factory=list)

    def header(self, **more: Any) -> dict[str, Any]:
        return {"names": self.names, "kinds": self.kinds, **more}


@dataclass(frozen=True)
class TensorState:
    """What servers keep of a tensor.

    Attributes:
        rows: ``value`` and what the optimizer keeps for each row, under torch's names: [rows, ...]; of a scalar [1].
        scalars: what the optimizer keeps once (``step``).
    """

    rows: dict[str, Tensor]
    scalars: dict[str, float]

    @classmethod
    def joined(cls, num_rows: int, parts: Iterable[tuple[int, TensorState]]) -> TensorState:
        """Of one tensor from its servers: (first row, state). State that one server has not made yet is 0."""
        whole = cls({}, {})
        for start, part in parts:
            for key, x in part.rows.items():
                made = whole.rows.setdefault(key, x.new_zeros((num_rows, *x.shape[1:])))
                made[start : start + len(x)] = x
            for key, scalar in part.scalars.items():
                whole.scalars[key] = max(scalar, whole.scalars.get(key, scalar))
        return whole


class Sharding:
    """Tensors over servers, balanced by bytes.

    Of what `place` is given at once, large tensors are cut over all servers, and small ones go whole, largest first,
    each to the server that has the fewest bytes. What was placed before stays where it is, and counts. The bytes of two
    servers differ by at most the largest piece that was not cut: a row of a large tensor, or a small tensor.

    Attributes:
        loads: bytes on each server.
        specs: by name.
        ranges: by name, in the order of rows, one for each server that has any; none is empty but the one of a tensor
            without elements.
    """

    def __init__(self, num_servers: int) -> None:
        self.loads = [0] * num_servers
        self.specs: dict[str, TensorSpec] = {}
        self.ranges: dict[str, tuple[RowRange, ...]] = {}

    def place(self, specs: Iterable[TensorSpec]) -> None:
        """Give new tensors their ranges. The order of ``specs`` does not matter.

        Raises:
            ValueError: for a name that is there already.
        """
        new = sorted(specs, key=lambda spec: (-spec.nbytes, spec.name))
        for spec in new:
            if spec.name in self.specs:
                raise ValueError(f"there are two tensors {spec.name!r}")
        num_servers = len(self.loads)
        share = sum(spec.nbytes for spec in new) / num_servers
        for spec in new:
            lightest = sorted(range(num_servers), key=lambda server: (self.loads[server], server))
            each, more = 0, spec.num_rows
            if spec.nbytes > share * _SMALL and spec.num_rows > 1:
                each, more = divmod(spec.num_rows, num_servers)
                extra = dict.fromkeys(lightest[:more], 1)
            else:
                extra = {lightest[0]: more}
            ranges, start = [], 0
            for server in range(num_servers):
                if count := each + extra.get(server, 0):
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
        """Names of the tensors that each server has a part of."""
        found: dict[int, list[str]] = {}
        for name in names:
            for part in self.ranges_of(name):
                found.setdefault(part.server, []).append(name)
        return found

    def split(self, values: Mapping[str, Value]) -> dict[int, Pieces]:
        """By server. A server that has a part of a tensor is told of it although it gets no rows.

        Raises:
            ValueError: a value does not fit its tensor.
        """
        found: dict[int, Pieces] = {}
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
                pieces = found.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append(kind)
                if isinstance(value, RowGradient):
                    here = slice(cuts[number], cuts[number + 1])
                    pieces.arrays += [value.ids[here] - part.start, value.rows[here].contiguous()]
                elif value is not None:
                    pieces.arrays.append(value[part.start : part.stop].contiguous())
        return found

    def targets(self, into: Mapping[str, Tensor]) -> tuple[dict[int, Pieces], Callable[[], None]]:
        """Where the values of servers go, by server; and what is to be called when all are there."""
        found: dict[int, Pieces] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for name, tensor in into.items():
            ranges, spec = self.ranges_of(name), self.specs[name]
            whole = tensor.detach()
            if whole.device.type != "cpu" or not whole.is_contiguous() or whole.dtype != spec.dtype:
                whole = torch.empty(spec.shape, dtype=spec.dtype)
                copies.append((tensor.detach(), whole))
            whole = whole.view(spec.shape or (1,))
            for part in ranges:
                pieces = found.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append("dense")
                pieces.into.append(whole[part.start : part.stop])

        def finish() -> None:
            for target, source in copies:
                target.copy_(source)

        return found, finish

    def wanted_rows(self, ids: Mapping[str, Tensor]) -> tuple[dict[int, Pieces], dict[str, Tensor]]:
        """Of each tensor some rows, ids int64 [n] ascending and each once: by server, and where they will be, [n,
        ...].
        """
        found: dict[int, Pieces] = {}
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
                    pieces = found.setdefault(part.server, Pieces())
                    pieces.names.append(name)
                    pieces.kinds.append("rows")
                    pieces.arrays.append(wanted[here] - part.start)
                    pieces.into.append(rows[name][here])
        return found, rows


def _cuts(ids: Tensor, ranges: Sequence[RowRange]) -> list[int]:
    """Where the ascending ids of each range begin, and the end of all."""
    starts: list[int] = torch.searchsorted(ids, torch.tensor([part.start for part in ranges])).tolist()
    return [*starts, len(ids)]


def _check_fits(value: Tensor, shape: tuple[int, ...], spec: TensorSpec) -> None:
    if value.shape != shape:
        raise ValueError(f"{spec.name!r} is {list(spec.shape)}: {list(shape)} fits, not {list(value.shape)}")
    if value.dtype != spec.dtype and not (value.is_floating_point() and spec.dtype.is_floating_point):
        raise ValueError(f"{spec.name!r} is {spec.dtype}, and {value.dtype} was given")


def _check_ids(ids: Tensor, spec: TensorSpec) -> None:
    """That ids are int64 [n], ascending, each once, and of rows that there are."""
    if not spec.shape:
        raise ValueError(f"{spec.name!r} is a scalar, which has no rows")
    if ids.dtype != torch.int64 or ids.dim() != 1 or (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"ids of rows of {spec.name!r} are int64 [n], ascending and each once")
    if len(ids) and not 0 <= ids[0] <= ids[-1] < spec.num_rows:
        row = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"row {row} of {spec.name!r} is not one of its {spec.num_rows} rows")
