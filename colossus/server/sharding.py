"""Which server has which rows of which tensor. No torch.

It follows from names, shapes, dtypes and the number of servers alone, so all workers know it without talking.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: a tensor of fewer bytes than this part of a server's share of all is whole on one server
_SMALL = 1 / 8


@dataclass(frozen=True)
class TensorSpec:
    """What is sharded.

    Attributes:
        name: unique.
        shape: of the whole tensor. Its rows are those of dim 0; a scalar is one row.
        itemsize: bytes of an element.
    """

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @property
    def num_rows(self) -> int:
        return self.shape[0] if self.shape else 1

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape[1:]) * self.itemsize

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.row_bytes


@dataclass(frozen=True)
class RowRange:
    """Rows ``start`` to ``stop`` of a tensor, on one server."""

    server: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


class Sharding:
    """Tensors over servers, balanced by bytes.

    Of what `place` is given at once, large tensors are cut over all servers, and small ones go whole, largest first,
    each to the server that has the fewest bytes. What was placed before stays where it is, and counts. The bytes of two
    servers differ by at most the largest piece that was not cut: a row of a large tensor, or a small tensor.

    Attributes:
        loads: bytes on each server.
        ranges: name -> its ranges in the order of rows, one for each server that has any; none is empty but the one of
            a tensor without elements.
    """

    def __init__(self, num_servers: int) -> None:
        if num_servers < 1:
            raise ValueError(f"{num_servers} servers: at least one has to be there")
        self.loads = [0] * num_servers
        self.ranges: dict[str, tuple[RowRange, ...]] = {}
        self._specs: dict[str, TensorSpec] = {}

    @property
    def num_servers(self) -> int:
        return len(self.loads)

    def place(self, specs: Iterable[TensorSpec]) -> None:
        """Give new tensors their ranges. The order of ``specs`` does not matter.

        Raises:
            ValueError: for a name that is there already, or comes twice.
        """
        new = sorted(specs, key=lambda spec: (-spec.nbytes, spec.name))
        seen = set(self.ranges)
        for spec in new:
            if spec.name in seen:
                raise ValueError(f"there are two tensors {spec.name!r}")
            seen.add(spec.name)
        share = sum(spec.nbytes for spec in new) / self.num_servers
        for spec in new:
            if spec.nbytes > share * _SMALL and spec.num_rows > 1:
                counts = self._counts(spec)
            else:
                counts = [0] * self.num_servers
                counts[self._lightest()[0]] = spec.num_rows
            self._specs[spec.name], self.ranges[spec.name] = spec, self._ranges(spec, counts)

    def remove(self, name: str) -> None:
        spec = self._specs.pop(name)
        for part in self.ranges.pop(name):
            self.loads[part.server] -= len(part) * spec.row_bytes

    def _lightest(self) -> list[int]:
        """Servers, those with the fewest bytes first."""
        return sorted(range(self.num_servers), key=lambda server: (self.loads[server], server))

    def _counts(self, spec: TensorSpec) -> list[int]:
        """Rows for each server: the same for all, and one more for the lightest."""
        each, more = divmod(spec.num_rows, self.num_servers)
        counts = [each] * self.num_servers
        for server in self._lightest()[:more]:
            counts[server] += 1
        return counts

    def _ranges(self, spec: TensorSpec, counts: Sequence[int]) -> tuple[RowRange, ...]:
        found, start = [], 0
        for server, count in enumerate(counts):
            if count:
                found.append(RowRange(server, start, start + count))
                self.loads[server] += count * spec.row_bytes
                start += count
        return tuple(found) or (RowRange(self._lightest()[0], 0, 0),)
