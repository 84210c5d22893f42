"""Differences between two checkpoints, saved under any plans, compared block by block."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.manifest import Manifest
from colossus.checkpoint.matching import matches, natural_order
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.config import by_path
from colossus.layout.layout import Box

#: fields of a manifest that are no state
_ABOUT = ("plan", "versions", "config", "tokenizer")
#: elements that are compared at a time
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors of the same key."""

    key: str
    #: its dtypes and shapes in words where these differ, else ""
    spec: str
    #: elements that are not the same; None where shapes differ
    num_different: int | None
    num_elements: int
    #: the largest difference of an element, infinite where only one of the two is NaN
    absolute: float = 0.0
    #: that difference over the largest element
    relative: float = 0.0
    #: floating or complex; in any other dtype every difference counts, whatever the tolerance
    is_float: bool = True

    @property
    def section(self) -> str:
        return self.key.partition("/")[0]

    def exceeds(self, relative: float, absolute: float) -> bool:
        """Return whether it is above tolerance; a floating tensor within one of the two tolerances is not."""
        return bool(self.spec) or not self.is_float or (self.relative > relative and self.absolute > absolute)


@dataclass(frozen=True)
class Difference:
    """The difference between checkpoints A and B."""

    only_in_a: list[str]
    only_in_b: list[str]
    #: tensors that differ: the model's first, then the optimizer's, each with the largest difference first
    tensors: list[TensorDifference]
    #: path -> (value in A, value in B), of state that is no tensor: the step, and all other values
    values: dict[str, tuple[str, str]]
    #: the same for plan, versions, config and tokenizer, which are no state
    about: dict[str, tuple[str, str]]
    #: tensors that both have
    num_compared: int

    def exceeds(self, relative: float = 0.0, absolute: float = 0.0) -> bool:
        """Return whether the states differ by more than rounding; config and plan may differ."""
        others = self.only_in_a or self.only_in_b or self.values
        return bool(others) or any(tensor.exceeds(relative, absolute) for tensor in self.tensors)


def diff(a: CheckpointReader, b: CheckpointReader, *, only: tuple[str, ...] = ()) -> Difference:
    """Compare two checkpoints.

    Values that belong to the ranks of a plan (generators; the state of each data rank or stage) are compared if both
    were saved under the same plan. A tied tensor is compared under its first name.

    Args:
        a, b: the checkpoints.
        only: patterns (`fnmatch`) of keys (``model/blocks.0.*``) or of paths of values, to which the comparison is
            restricted. Empty compares all.

    Raises:
        CheckpointError: if a file cannot be read.
    """
    is_same_plan = a.manifest.plan.get("axes") == b.manifest.plan.get("axes")

    def is_wanted(key: str) -> bool:
        return matches(key, only) if only else is_same_plan or not key.startswith("ranks/")

    keys_a, keys_b = (sorted(filter(is_wanted, reader.manifest.tensors), key=natural_order) for reader in (a, b))
    both = [key for key in keys_a if key in b.manifest.tensors]
    tensors = [tensor for key in both if (tensor := _compare(key, a, b)) is not None]
    order = {"model": 0, "optimizer": 1}
    tensors.sort(key=lambda tensor: (order.get(tensor.section, 2), tensor.section, -tensor.relative))
    values = _differing(a, b, lambda manifest: {"step": manifest.step, **manifest.values})
    if not is_same_plan:  # the number of data ranks, or of stages, may differ
        values = {path: pair for path, pair in values.items() if not ("absent" in pair and path.startswith(_OF_RANKS))}
    return Difference(
        [key for key in keys_a if key not in b.manifest.tensors],
        [key for key in keys_b if key not in a.manifest.tensors],
        tensors,
        {path: pair for path, pair in values.items() if is_wanted(path)},
        {} if only else _differing(a, b, lambda manifest: {key: getattr(manifest, key) for key in _ABOUT}),
        len(both),
    )


#: sections of values with an entry for each data rank, or for each stage
_OF_RANKS = ("loader/", "strategy_values/", "optimizer_groups/")


def _compare(key: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    """Return the difference between the two tensors of a key; None where both are the same."""
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
    is_float = all(DTYPES[entry.dtype].is_floating_point or DTYPES[entry.dtype].is_complex for entry in (one, other))
    return TensorDifference(key, spec, different, count, absolute, relative, is_float)


def _read(reader: CheckpointReader, key: str, box: Box) -> Tensor:
    out = torch.empty([stop - start for start, stop in box], dtype=DTYPES[reader.entry(key).dtype])
    reader.read_box(key, box, out)
    return out


def _compared(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Return the largest difference of two blocks, their largest finite element, and how many elements differ."""
    if not x.numel():
        return 0.0, 0.0, 0
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    p, q = x.to(wide), y.to(wide)
    largest = max(block.abs().nan_to_num_(0.0, 0.0, 0.0).max().item() for block in (p, q))
    # float64 does not represent every int64
    is_same = x == y if x.dtype == y.dtype else p == q
    if bool(is_same.all()):
        return 0.0, largest, 0
    is_same |= p.isnan() & q.isnan()
    gap = torch.where(is_same, 0.0, (p - q).abs()).nan_to_num_(nan=math.inf, posinf=math.inf)
    return gap.max().item(), largest, int((~is_same).sum())


def _blocks(shape: tuple[int, ...]) -> Iterator[Box]:
    """Yield boxes of whole rows that cover a shape, each of about `BLOCK_ELEMENTS`."""
    whole = tuple((0, size) for size in shape)
    if math.prod(shape) <= BLOCK_ELEMENTS:
        yield whole
        return
    rows = max(1, BLOCK_ELEMENTS // math.prod(shape[1:]))
    for start in range(0, shape[0], rows):
        yield ((start, min(start + rows, shape[0])), *whole[1:])


def _differing(
    a: CheckpointReader, b: CheckpointReader, nest_of: Callable[[Manifest], Mapping[str, Any]]
) -> dict[str, tuple[str, str]]:
    """Return the paths at which two nests differ, with both values as text, in which NaN is equal to NaN."""
    nests = (by_path(nest_of(reader.manifest), lists=True) for reader in (a, b))
    # tags of `values.encode` are no part of a path
    texts_a, texts_b = ({re.sub(r"\.\$\w+", "", path): repr(value) for path, value in nest} for nest in nests)
    pairs = {path: (texts_a.get(path, "absent"), texts_b.get(path, "absent")) for path in {**texts_a, **texts_b}}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
