"""What differs between two checkpoints, whatever the plans that saved them; block by block, so of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.manifest import Manifest
from colossus.checkpoint.matching import matches, natural_order
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.layout.layout import Box

#: of a manifest, what is no state
_ABOUT = ("plan", "versions", "config", "tokenizer")
#: elements that are compared at a time
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class TensorDifference:
    """Of a tensor that both have."""

    key: str
    #: its dtypes and shapes in words where these differ, else ""
    spec: str
    #: elements that are not the same; None where shapes differ
    num_different: int | None
    num_elements: int
    #: the largest difference of an element, infinite where one is NaN and the other is not; and relative to the largest
    absolute: float = 0.0
    relative: float = 0.0
    #: of others than floating and complex ones every difference counts, whatever the tolerance
    is_float: bool = True

    @property
    def section(self) -> str:
        return self.key.partition("/")[0]

    def exceeds(self, relative: float, absolute: float) -> bool:
        """Whether it is more than is allowed: of a floating tensor a difference within one of the two is none."""
        return bool(self.spec) or not self.is_float or (self.relative > relative and self.absolute > absolute)


@dataclass(frozen=True)
class Difference:
    """Between checkpoints A and B."""

    only_in_a: list[str]
    only_in_b: list[str]
    #: those that are not the same, of the model first, then of the optimizer; in each the largest difference first
    tensors: list[TensorDifference]
    #: path -> (as A has it, as B has it), of what is no tensor: the step, and all other state
    values: dict[str, tuple[str, str]]
    #: the same of what is no state: plan, versions, config
    about: dict[str, tuple[str, str]]
    #: tensors that both have
    num_compared: int

    def exceeds(self, relative: float = 0.0, absolute: float = 0.0) -> bool:
        """Whether they differ by more than rounding: of config and plan they may."""
        others = self.only_in_a or self.only_in_b or self.values
        return bool(others) or any(each.exceeds(relative, absolute) for each in self.tensors)


def diff(a: CheckpointReader, b: CheckpointReader, *, only: tuple[str, ...] = ()) -> Difference:
    """Compare two checkpoints.

    What belongs to the ranks of a plan (generators; the state that each data rank or stage adds) is compared where both
    were saved under the same plan. A tied tensor is compared under its first name.

    Args:
        only: patterns (`fnmatch`) of keys (``model/blocks.0.*``), to which the comparison is restricted; a path of a
            value is one, too. Empty is all.

    Raises:
        CheckpointError: when a file cannot be read.
    """
    is_same_plan = a.manifest.plan.get("axes") == b.manifest.plan.get("axes")

    def is_wanted(key: str) -> bool:
        return matches(key, only) if only else is_same_plan or not key.startswith("ranks/")

    left, right = (sorted(filter(is_wanted, each.manifest.tensors), key=natural_order) for each in (a, b))
    both = [key for key in left if key in b.manifest.tensors]
    found = [each for key in both if (each := _compare(key, a, b)) is not None]
    order = {"model": 0, "optimizer": 1}
    found.sort(key=lambda each: (order.get(each.section, 2), each.section, -each.relative))
    values = _differing(a, b, lambda each: {"step": each.step, **each.values})
    if not is_same_plan:  # what each data rank, or stage, has is there as often as there are of these
        values = {path: pair for path, pair in values.items() if not ("absent" in pair and path.startswith(_OF_RANKS))}
    return Difference(
        [key for key in left if key not in b.manifest.tensors],
        [key for key in right if key not in a.manifest.tensors],
        found,
        {path: pair for path, pair in values.items() if is_wanted(path)},
        {} if only else _differing(a, b, lambda each: {key: getattr(each, key) for key in _ABOUT}),
        len(both),
    )


#: sections of values with an entry of each data rank, or of each stage
_OF_RANKS = ("loader/", "strategy_values/", "optimizer_groups/")


def _compare(key: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    """None where both are the same."""
    one, other = a.entry(key), b.entry(key)
    count = math.prod(one.shape)
    if one.shape != other.shape:
        return TensorDifference(key, f"{one.dtype} {one.shape}, {other.dtype} {other.shape}", None, count)
    different, absolute, largest = 0, 0.0, 0.0
    for box in _blocks(one.shape):
        gap, size, num = _compared(_read(a, key, box), _read(b, key, box))
        different, absolute, largest = different + num, max(absolute, gap), max(largest, size)
    spec = f"{one.dtype}, {other.dtype}" if one.dtype != other.dtype else ""
    if not different and not spec:
        return None
    relative = absolute / largest if largest > 0 and math.isfinite(absolute) else absolute
    is_float = all(DTYPES[each.dtype].is_floating_point or DTYPES[each.dtype].is_complex for each in (one, other))
    return TensorDifference(key, spec, different, count, absolute, relative, is_float)


def _read(reader: CheckpointReader, key: str, box: Box) -> Tensor:
    out = torch.empty([stop - start for start, stop in box], dtype=DTYPES[reader.entry(key).dtype])
    reader.read_box(key, box, out)
    return out


def _compared(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Of two blocks: the largest difference, the largest finite element, and how many elements are not the same."""
    if not x.numel():
        return 0.0, 0.0, 0
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    p, q = x.to(wide), y.to(wide)
    largest = max(each.abs().nan_to_num_(0.0, 0.0, 0.0).max().item() for each in (p, q))
    # float64 does not hold every int64
    is_same = x == y if x.dtype == y.dtype else p == q
    if bool(is_same.all()):
        return 0.0, largest, 0
    is_same |= p.isnan() & q.isnan()
    gap = torch.where(is_same, 0.0, (p - q).abs()).nan_to_num_(nan=math.inf, posinf=math.inf)
    return gap.max().item(), largest, int((~is_same).sum())


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Boxes of whole rows that cover a shape, each of about `BLOCK_ELEMENTS`."""
    whole = tuple((0, size) for size in shape)
    if math.prod(shape) <= BLOCK_ELEMENTS:
        yield whole
        return
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *whole[1:])


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Plain values by their path in a nest; tags of `values.encode` are no part of it."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from _flat(each, path if key.startswith("$") else f"{path}.{key}".lstrip("."))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _flat(each, f"{path}.{index}")
    else:
        yield path, value


def _differing(
    a: CheckpointReader, b: CheckpointReader, of: Callable[[Manifest], Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Paths at which two nests differ, and what each has there. As text: NaN is NaN."""
    left, right = ({path: repr(value) for path, value in _flat(of(each.manifest))} for each in (a, b))
    pairs = {path: (left.get(path, "absent"), right.get(path, "absent")) for path in {**left, **right}}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
