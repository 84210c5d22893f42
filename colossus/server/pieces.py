"""Tensors of a worker in pieces for servers, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.server.shard import check_ids, check_rows
from colossus.server.sharding import RowRange, Sharding

#: what is pushed: a tensor (sparse COO, too), some rows, or nothing
Value = Tensor | RowGradient | None


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


class Splitter:
    """Splits tensors among servers.

    Attributes:
        shapes, dtypes: of each tensor, by name.
    """

    def __init__(self, sharding: Sharding) -> None:
        self._sharding = sharding
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}

    def ranges_of(self, name: str) -> Sequence[RowRange]:
        if name not in self._sharding.ranges:
            raise ValueError(f"there is no tensor {name!r} at the servers: it was not made, or was freed")
        return self._sharding.ranges[name]

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
            ranges, shape = self.ranges_of(name), self.shapes[name]
            value = _of_sparse(value)
            if isinstance(value, RowGradient):
                value = RowGradient(value.ids.to("cpu"), value.rows.detach().to("cpu"))
                check_rows(value, shape, name)
                cuts = _cuts(value.ids, ranges)
            elif value is not None:
                if value.shape != shape:
                    raise ValueError(f"{name!r} is {list(shape)}, not {list(value.shape)}")
                value = value.detach().to("cpu").reshape(shape or (1,))
            for number, part in enumerate(ranges):
                pieces = found.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append("none" if value is None else "rows" if isinstance(value, RowGradient) else "dense")
                if isinstance(value, RowGradient):
                    here = slice(cuts[number], cuts[number + 1])
                    pieces.arrays += [value.ids[here] - part.start, value.rows[here].contiguous()]
                elif value is not None:
                    pieces.arrays.append(value[part.start : part.stop].contiguous())
        return found

    def targets(self, into: Mapping[str, Tensor]) -> tuple[dict[int, Pieces], Callable[[], None]]:
        """Where the values of servers go, by server; and what is to be called when all are there.

        Raises:
            ValueError: a tensor does not fit.
        """
        found: dict[int, Pieces] = {}
        copies: list[tuple[Tensor, Tensor]] = []
        for name, tensor in into.items():
            ranges, shape, dtype = self.ranges_of(name), self.shapes[name], self.dtypes[name]
            if tensor.shape != shape:
                raise ValueError(f"{name!r} is {list(shape)}, and is to be pulled into {list(tensor.shape)}")
            whole = tensor.detach()
            if whole.device.type != "cpu" or not whole.is_contiguous() or whole.dtype != dtype:
                whole = torch.empty(shape, dtype=dtype)
                copies.append((tensor.detach(), whole))
            whole = whole.view(shape or (1,))
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
        ...]."""
        found: dict[int, Pieces] = {}
        rows: dict[str, Tensor] = {}
        for name, wanted in ids.items():
            ranges, shape = self.ranges_of(name), self.shapes[name]
            wanted = wanted.to("cpu")
            if not shape:
                raise ValueError(f"{name!r} is a scalar, which has no rows")
            check_ids(wanted, shape[0], name)
            rows[name] = torch.empty((len(wanted), *shape[1:]), dtype=self.dtypes[name])
            cuts = _cuts(wanted, ranges)
            for number, part in enumerate(ranges):
                here = slice(cuts[number], cuts[number + 1])
                if cuts[number] == cuts[number + 1]:
                    continue
                pieces = found.setdefault(part.server, Pieces())
                pieces.names.append(name)
                pieces.kinds.append("rows")
                pieces.arrays.append(wanted[here] - part.start)
                pieces.into.append(rows[name][here])
        return found, rows

    def split_states(self, states: Mapping[str, TensorState]) -> dict[int, tuple[dict[str, Any], list[Tensor]]]:
        """By server what is said of its part of each state, and its arrays."""
        found: dict[int, tuple[dict[str, Any], list[Tensor]]] = {}
        for name, state in states.items():
            for part in self.ranges_of(name):
                header, arrays = found.setdefault(part.server, ({"names": [], "tensors": []}, []))
                here = {key: x[part.start : part.stop].contiguous() for key, x in state.rows.items()}
                header["names"].append(name)
                header["tensors"].append(
                    {"name": name, "start": part.start, "keys": list(here), "scalars": state.scalars}
                )
                arrays.extend(here.values())
        return found


def _of_sparse(value: Value) -> Value:
    """A sparse tensor as rows."""
    if isinstance(value, Tensor) and value.layout is torch.sparse_coo:
        if value.sparse_dim() != 1:
            raise ValueError(f"a sparse tensor of {value.sparse_dim()} sparse dims; there has to be one, that of rows")
        value = value.detach().coalesce()
        return RowGradient(value.indices()[0], value.values())
    return value


def _cuts(ids: Tensor, ranges: Sequence[RowRange]) -> list[int]:
    """Where the ascending ids of each range begin, and the end of all."""
    starts: list[int] = torch.searchsorted(ids, torch.tensor([part.start for part in ranges])).tolist()
    return [*starts, len(ids)]
