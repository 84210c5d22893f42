"""The file that ``colossus doctor --measure OUT.json`` writes, and the hardware that it describes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from colossus.arithmetic import counted
from colossus.config.user_path import user_path
from colossus.hardware.data_sheets import peak_flops
from colossus.hardware.hardware import OPERATIONS, Hardware, Link, bytes_sent, fit_link, ranks_at_once, steps
from colossus.hardware.interpolation import Curve, ProductGrid

VERSION = 2

Table = TypeVar("Table")


class MeasuredFileError(ValueError):
    """A file is not one of measured times, or has another version."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ProductTable(_Part):
    """Seconds of products in one dtype.

    Attributes:
        sizes: rising sizes.
        seconds: a row for each size a, with the seconds of [a, b] x [b, b] for each size b >= a. Each is the mean of a
            linear layer's three products x w^T, dy w and dy^T x, with operands that are in no cache.
    """

    sizes: list[PositiveInt] = Field(min_length=2)
    seconds: list[list[PositiveFloat]]

    @model_validator(mode="after")
    def _is_a_triangle(self) -> ProductTable:
        _rising(self.sizes, "sizes")
        lengths, wanted = [len(row) for row in self.seconds], list(range(len(self.sizes), 0, -1))
        if lengths != wanted:
            raise ValueError(f"rows of seconds have {lengths} numbers; {len(self.sizes)} sizes need {wanted}")
        return self

    def by_pair(self) -> dict[tuple[int, int], float]:
        """Return the seconds by (a, b)."""
        return {
            (a, b): seconds
            for at, a in enumerate(self.sizes)
            for b, seconds in zip(self.sizes[at:], self.seconds[at], strict=True)
        }


class AttentionTable(_Part):
    """Seconds of causal attention [heads, length, head_dim] by length, in one dtype."""

    heads: PositiveInt
    head_dim: PositiveInt
    lengths: list[PositiveInt] = Field(min_length=2)
    forward_seconds: list[PositiveFloat]
    backward_seconds: list[PositiveFloat]

    @model_validator(mode="after")
    def _fits(self) -> AttentionTable:
        _rising(self.lengths, "lengths")
        for name in ("forward_seconds", "backward_seconds"):
            _as_many(getattr(self, name), self.lengths, name, "lengths")
        return self


class CollectiveTable(_Part):
    """Seconds of a collective over some number of ranks, by the bytes of a rank's input."""

    operation: str
    ranks: int = Field(ge=2)
    bytes: list[PositiveInt] = Field(min_length=2)
    seconds: list[PositiveFloat]

    @model_validator(mode="after")
    def _fits(self) -> CollectiveTable:
        if self.operation not in OPERATIONS:
            raise ValueError(f"operation {self.operation!r} is none of {', '.join(OPERATIONS)}")
        _rising(self.bytes, "bytes")
        _as_many(self.seconds, self.bytes, "seconds", "bytes")
        return self

    def link(self) -> Link:
        """Return the latency of the whole collective, and the bandwidth at which a rank sends."""
        sizes = [bytes_sent(self.operation, self.ranks, size) for size in self.bytes]
        return fit_link(list(zip(sizes, self.seconds, strict=True)))


class MeasuredFile(_Part):
    """The whole file: times of ranks that ran at the same time.

    Attributes:
        version: version of the format.
        colossus, torch: versions that measured.
        device: ``cpu`` or ``cuda``.
        name: name of the device.
        cores: cores that the ranks shared.
        ranks: number of ranks.
        threads: threads of each rank, as `colossus launch` shares out the cores.
        backend: backend of the collectives.
        memory_bytes: memory of a GPU, or on CPU one rank's part of the machine's memory.
        bytes_per_second: bytes read and written in z = x + y of new tensors that are in no cache.
        copy_bytes_per_second: bytes read and written in the copy of such a tensor.
        operator_seconds: mean of the operators of a small transformer block, forward and backward together.
        operator_bytes_per_second: ATen operator -> bytes read and written, for activations that are in no cache.
        matmul, attention: tables by dtype.
        collectives: a table for each collective and number of ranks.
        step_factor: seconds of what a rank computes in a training step over those that its parts add up to; 1 on GPUs.
        traffic_factor: seconds for which bytes travel in a training step over those of the tables; 1 on GPUs.
    """

    version: int
    colossus: str
    torch: str
    device: str
    name: str
    cores: PositiveInt
    ranks: PositiveInt
    threads: PositiveInt
    backend: str
    memory_bytes: PositiveFloat
    bytes_per_second: PositiveFloat
    copy_bytes_per_second: PositiveFloat
    operator_seconds: PositiveFloat
    operator_bytes_per_second: dict[str, PositiveFloat]
    matmul: dict[str, ProductTable] = Field(min_length=1)
    attention: dict[str, AttentionTable] = Field(min_length=1)
    collectives: list[CollectiveTable]
    step_factor: PositiveFloat = 1.0
    traffic_factor: PositiveFloat = 1.0


class Measured(Hardware):
    """A machine with measured times.

    Args:
        file: the measured times.
        network: link of each device to devices of other hosts, which a measurement on one host cannot see.
    """

    is_measured = True

    def __init__(self, file: MeasuredFile, network: Link | None = None) -> None:
        self.file, self.network = file, network
        self.name = f"{file.name} (measured, {counted(file.ranks, 'rank')} at once)"
        self.memory_bytes, self.operator_seconds = file.memory_bytes, file.step_factor * file.operator_seconds
        self.at_once = ranks_at_once(file.cores, file.threads) if file.device == "cpu" else None
        self.overlaps = file.device != "cpu"
        self._grids = {dtype: ProductGrid(table.sizes, table.by_pair()) for dtype, table in file.matmul.items()}
        self._tables: dict[str, dict[int, tuple[Curve, Link, float]]] = {}
        for table in file.collectives:
            curve = Curve(table.bytes, table.seconds)
            self._tables.setdefault(table.operation, {})[table.ranks] = curve, table.link(), table.bytes[-1]

    def peak_flops(self, dtype: str) -> float | None:
        return peak_flops(self.file.name, dtype)

    def matmul_seconds(self, m: int, n: int, k: int, dtype: str) -> float:
        return self.file.step_factor * _of_dtype(self._grids, dtype, self.name).at(m, n, k)

    def attention_seconds(self, heads: int, length: int, head_dim: int, dtype: str, *, backward: bool = False) -> float:
        table = _of_dtype(self.file.attention, dtype, self.name)
        seconds = Curve(table.lengths, table.backward_seconds if backward else table.forward_seconds).at(length)
        beyond = max(1.0, length / table.lengths[-1]) ** 2
        return self.file.step_factor * seconds * beyond * (heads * head_dim) / (table.heads * table.head_dim)

    def memory_seconds(self, num_bytes: float, operator: str = "") -> float:
        rate = self.file.operator_bytes_per_second.get(operator, self.file.bytes_per_second)
        return self.file.step_factor * num_bytes / rate

    def on_one_host(self, operation: str, ranks: int, input_bytes: float) -> float:
        """Return the seconds of a collective in a training step, each rank with cores of its own.

        Ranks that shared cores while they were measured were slower by `slowdown`, which is divided out. What it takes
        beyond the latency is multiplied by ``traffic_factor``.
        """
        busy = self.file.ranks // 2 if operation == "send" else self.file.ranks  # of two, one waits for the other
        latency, seconds = (self._as_measured(operation, ranks, size) for size in (1.0, input_bytes))
        return (latency + self.file.traffic_factor * (seconds - latency)) / self.slowdown(busy)

    def _as_measured(self, operation: str, ranks: int, input_bytes: float) -> float:
        """Return the seconds between the measured numbers of ranks by logarithms, beyond them by the fitted link."""
        tables = self._tables.get(operation)
        if tables is None:
            raise ValueError(
                f"{self.name} has no times of {operation} between ranks: measure again, with --nproc 2 or more"
            )
        measured = sorted(tables)
        fewer = max((size for size in measured if size <= ranks), default=measured[0])
        more = min((size for size in measured if size >= ranks), default=None)
        low = self._at(operation, fewer, input_bytes)
        if more is None:
            return low + self._added(operation, fewer, ranks, input_bytes)
        if more == fewer:
            return low
        part = math.log(ranks / fewer) / math.log(more / fewer)
        return float(low ** (1 - part) * self._at(operation, more, input_bytes) ** part)

    def _at(self, operation: str, ranks: int, input_bytes: float) -> float:
        """Return the seconds over a measured number of ranks; bytes beyond the largest go at the link's bandwidth."""
        curve, link, largest = self._tables[operation][ranks]
        return curve.at(input_bytes) + bytes_sent(operation, ranks, max(0.0, input_bytes - largest)) / link.bandwidth

    def _added(self, operation: str, measured: int, ranks: int, input_bytes: float) -> float:
        """Return the seconds that ``ranks`` need beyond those of ``measured`` ranks: latency of steps, and bytes."""
        link = self._tables[operation][measured][1]
        more_steps = steps(operation, ranks) / steps(operation, measured) - 1
        more_bytes = bytes_sent(operation, ranks, input_bytes) - bytes_sent(operation, measured, input_bytes)
        return more_steps * link.latency + more_bytes / link.bandwidth


def load_measured(path: str | Path, network: Link | None = None) -> Measured:
    """Load the file that ``colossus doctor --measure`` wrote.

    Args:
        path: the file.
        network: link of each device to devices of other hosts, for collectives over several hosts.

    Raises:
        MeasuredFileError: the file cannot be read, has another version, or a field is missing or wrong.
    """
    again = "`colossus doctor --measure OUT.json` writes one"
    try:
        content: Any = json.loads(user_path(path).read_text())
    except (OSError, ValueError) as error:
        raise MeasuredFileError(f"{path}: cannot be read as a file of measured times ({error}); {again}") from None
    if not isinstance(content, dict) or "version" not in content:
        raise MeasuredFileError(f"{path} is not a file of measured times: it has no 'version'; {again}")
    if content["version"] != VERSION:
        raise MeasuredFileError(f"{path} has version {content['version']!r}, this colossus reads {VERSION}; {again}")
    try:
        return Measured(MeasuredFile.model_validate(content), network)
    except ValidationError as error:
        raise MeasuredFileError(f"{path}: {'; '.join(map(_in_words, error.errors()))}; {again}") from None


def _in_words(problem: Any) -> str:
    where = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{where!r} is missing"
    if problem["type"] == "extra_forbidden":
        return f"{where!r} is no key of such a file"
    return f"{where}: {problem['msg'].removeprefix('Value error, ')}"


def _of_dtype(tables: Mapping[str, Table], dtype: str, name: str) -> Table:
    if dtype not in tables:
        raise ValueError(f"{name} has no times in {dtype}; it has {', '.join(tables)}")
    return tables[dtype]


def _rising(values: list[int], name: str) -> None:
    if values != sorted(set(values)):
        raise ValueError(f"{name} must rise, got {values}")


def _as_many(values: list[float], sizes: list[int], name: str, sizes_name: str) -> None:
    if len(values) != len(sizes):
        raise ValueError(f"{name} has {len(values)} numbers for {len(sizes)} {sizes_name}")
