"""The buckets in which gradients are all-reduced, and those of tied parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from colossus.comm.shared_memory import SLOT_BYTES
from colossus.planner.collective import Collective
from colossus.planner.parameter_facts import itemsize
from colossus.planner.plan_axes import PlanAxes


@dataclass(frozen=True)
class Gradient:
    """Of a parameter as it is summed.

    Attributes:
        elements: of the parameter, or of the rows that a rank stores of it.
        dtype, reduced: of the gradient, and in which it is summed.
        axes: over which it is summed, of more than one rank.
        block: with whose backward it is complete.
    """

    elements: int
    dtype: str
    reduced: str
    axes: tuple[str, ...]
    block: int


@dataclass(frozen=True)
class BucketTraffic:
    """One bucket.

    Attributes:
        axes, dtype: over which it is summed, and in what.
        nbytes: of gradients and, behind them, a flag for each.
        block: with whose backward the last gradient in it is made.
    """

    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    block: int


def buckets_of(gradients: Sequence[Gradient], bucket_bytes: int, *, on_cpu: bool) -> list[BucketTraffic]:
    """The buckets of a stage in the order in which they start: see `colossus.gradients.buckets.StageBuckets`.

    Args:
        gradients: of its parameters that are trained, in the order of the model.
    """
    groups: dict[tuple[tuple[str, ...], str], list[tuple[int, Gradient]]] = {}
    for number, one in enumerate(reversed(gradients)):
        if one.axes:
            groups.setdefault((one.axes, one.dtype), []).append((number, one))
    found: list[tuple[int, BucketTraffic]] = []
    for (axes, _), group in groups.items():
        dtype = group[0][1].reduced
        width = itemsize(dtype)
        limit = min(bucket_bytes, SLOT_BYTES - 4096 * width) if on_cpu else bucket_bytes
        for chunk in _chunks(group, limit // width):
            elements = sum(one.elements for _, one in chunk) + len(chunk)
            block = min(one.block for _, one in chunk)
            found.append((chunk[-1][0], BucketTraffic(axes, dtype, elements * width, block)))
    return [bucket for _, bucket in sorted(found, key=lambda each: each[0])]


def _chunks(group: Iterable[tuple[int, Gradient]], limit: int) -> Iterator[list[tuple[int, Gradient]]]:
    chunk: list[tuple[int, Gradient]] = []
    size = 0
    for number, one in group:
        if chunk and size + one.elements > limit:
            yield chunk
            chunk, size = [], 0
        chunk.append((number, one))
        size += one.elements
    if chunk:
        yield chunk


def flat_sum(axes: PlanAxes, bucket: BucketTraffic) -> tuple[Collective, ...]:
    """One all-reduce."""
    ranks, name = axes.size(bucket.axes), axes.name(bucket.axes)
    return (Collective("all_reduce", name, ranks, bucket.nbytes, bucket.dtype, bucket.axes),)


def two_level_sum(axes: PlanAxes, bucket: BucketTraffic, per_host: int) -> tuple[Collective, ...]:
    """Inside of hosts, between them, inside of them: see `colossus.gradients.bucket_sum.TwoLevelSum`."""
    data = axes.size(("data",))
    if "data" not in bucket.axes or per_host in (1, data):
        return flat_sum(axes, bucket)
    width, name = itemsize(bucket.dtype), axes.name(bucket.axes)
    inner = axes.size(bucket.axes) // data * per_host
    whole = -(-(bucket.nbytes // width) // inner) * inner * width
    inside, between = f"{name} inside of hosts", "data between hosts"
    return (
        Collective("reduce_scatter", inside, inner, whole, bucket.dtype, ()),
        Collective("all_reduce", between, data // per_host, whole // inner, bucket.dtype, ("data",)),
        Collective("all_gather", inside, inner, whole // inner, bucket.dtype, ()),
    )


def tied_sums(tied: Iterable[tuple[Gradient, tuple[int, ...]]]) -> list[Collective]:
    """Of parameters that several pipeline ranks hold, each with these ranks: one all-reduce for all of the same."""
    groups: dict[tuple[tuple[int, ...], str], list[Gradient]] = {}
    for one, ranks in tied:
        groups.setdefault((ranks, one.dtype), []).append(one)
    found = []
    for (ranks, _), group in groups.items():
        dtype = group[0].reduced
        held = sum(one.elements + 1 for one in group) * itemsize(dtype)
        found.append(Collective("all_reduce", "pipeline", len(ranks), held, dtype, ("pipeline",)))
    return found
