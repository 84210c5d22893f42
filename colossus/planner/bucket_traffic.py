"""The buckets in which gradients are all-reduced, and the all-reduces of tied parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from colossus.comm import shared_memory
from colossus.comm.flat_buffer import chunks
from colossus.planner.collective import Collective
from colossus.planner.parameter_facts import itemsize
from colossus.planner.plan_axes import PlanAxes


class Gradient(NamedTuple):
    """A gradient that ranks sum.

    Attributes:
        elements: elements of the parameter, or of the rows of it that a rank stores.
        dtype: dtype of the gradient.
        reduced: dtype in which it is summed.
        axes: the axes with more than one rank over which it is summed.
        block: the block whose backward completes it.
    """

    elements: int
    dtype: str
    reduced: str
    axes: tuple[str, ...]
    block: int


@dataclass(frozen=True)
class BucketTraffic:
    """A bucket of gradients.

    Attributes:
        axes: the axes over which it is summed.
        dtype: dtype in which it is summed.
        nbytes: bytes of its gradients and of a flag for each.
        block: the block whose backward completes its last gradient.
    """

    axes: tuple[str, ...]
    dtype: str
    nbytes: int
    block: int


def buckets_of(gradients: Sequence[Gradient], bucket_bytes: int, *, on_cpu: bool) -> list[BucketTraffic]:
    """Return the buckets of a stage in the order in which they start (see `colossus.gradients.buckets.StageBuckets`).

    Args:
        gradients: gradients of its trained parameters, in the order of the model.
        bucket_bytes: bytes of a bucket at most.
        on_cpu: whether a bucket must also fit a slot of shared memory.
    """
    groups: dict[tuple[tuple[str, ...], str], list[tuple[int, Gradient]]] = {}
    for number, gradient in enumerate(reversed(gradients)):
        if gradient.axes:
            groups.setdefault((gradient.axes, gradient.dtype), []).append((number, gradient))
    buckets: list[tuple[int, BucketTraffic]] = []
    for (axes, _), group in groups.items():
        dtype = group[0][1].reduced
        width = itemsize(dtype)
        limit = min(bucket_bytes, shared_memory.piece_bytes() - 4096 * width) if on_cpu else bucket_bytes
        for chunk in chunks(group, lambda numbered: numbered[1].elements, limit // width):
            elements = sum(gradient.elements for _, gradient in chunk) + len(chunk)
            block = min(gradient.block for _, gradient in chunk)
            buckets.append((chunk[-1][0], BucketTraffic(axes, dtype, elements * width, block)))
    return [bucket for _, bucket in sorted(buckets, key=lambda numbered: numbered[0])]


def flat_sum(axes: PlanAxes, bucket: BucketTraffic) -> tuple[Collective, ...]:
    """Return the all-reduce of a bucket."""
    ranks, name = axes.size(bucket.axes), axes.name(bucket.axes)
    return (Collective("all_reduce", name, ranks, bucket.nbytes, bucket.dtype, bucket.axes),)


def two_level_sum(axes: PlanAxes, bucket: BucketTraffic, per_host: int) -> tuple[Collective, ...]:
    """Return the collectives of a bucket's two-level sum, inside and between hosts.

    See `colossus.gradients.bucket_sum.TwoLevelSum`.
    """
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
    """Return the all-reduces of parameters that several pipeline ranks store.

    Gradients with the same ranks and dtype share one all-reduce.

    Args:
        tied: each gradient with the pipeline ranks that store its parameter.
    """
    groups: dict[tuple[tuple[int, ...], str], list[Gradient]] = {}
    for gradient, ranks in tied:
        groups.setdefault((ranks, gradient.dtype), []).append(gradient)
    sums = []
    for (ranks, _), group in groups.items():
        dtype = group[0].reduced
        nbytes = sum(gradient.elements + 1 for gradient in group) * itemsize(dtype)
        sums.append(Collective("all_reduce", "pipeline", len(ranks), nbytes, dtype, ("pipeline",)))
    return sums
