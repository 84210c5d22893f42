"""What differs between two checkpoints, whatever the plans that saved them; block by block, so of any size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.checkpoint.matching import matches
from colossus.checkpoint.natural_order import natural_order
from colossus.checkpoint.reader import CheckpointReader
from colossus.checkpoint.tensor_file import DTYPES
from colossus.checkpoint.values import TAGS
from colossus.layout.layout import Box

#: elements that are compared at a time
BLOCK_ELEMENTS = 1 << 18


@dataclass(frozen=True)
class Tolerance:
    """What is allowed of a floating tensor: a difference within one of the two is none."""

    relative: float = 0.0
    absolute: float = 0.0


@dataclass(frozen=True)
class TensorDifference:
    """Of a tensor that both have.

    Attributes:
        key: of the tensor.
        spec: its dtypes and shapes in words where these differ, else "".
        num_different: elements that are not the same; None where shapes differ.
        num_elements: of the tensor.
        absolute: the largest difference of an element; infinite where one is NaN and the other is not.
        relative: that, of the largest element of the two.
        is_float: floating or complex; of others every difference counts, whatever the tolerance.
    """

    key: str
    spec: str
    num_different: int | None
    num_elements: int
    absolute: float = 0.0
    relative: float = 0.0
    is_float: bool = True

    @property
    def section(self) -> str:
        return self.key.partition("/")[0]

    def exceeds(self, tolerance: Tolerance) -> bool:
        if self.spec or self.num_different is None:
            return True
        if not self.is_float:
            return self.num_different > 0
        return self.relative > tolerance.relative and self.absolute > tolerance.absolute


@dataclass(frozen=True)
class Difference:
    """Between checkpoints A and B.

    Attributes:
        only_in_a, only_in_b: keys of tensors.
        tensors: that both have and that are not the same, those of the model first, then those of the optimizer; in
            each the largest relative difference first.
        values: path -> (as A has it, as B has it), of what is no tensor: the step, and all other state.
        told: the same of what is no state: plan, config.
        num_compared: tensors that both have.
    """

    only_in_a: list[str]
    only_in_b: list[str]
    tensors: list[TensorDifference]
    values: dict[str, tuple[str, str]]
    told: dict[str, tuple[str, str]]
    num_compared: int

    def exceeds(self, tolerance: Tolerance) -> bool:
        """Whether they differ by more than rounding: of config and plan they may."""
        return bool(
            self.only_in_a or self.only_in_b or self.values or any(each.exceeds(tolerance) for each in self.tensors)
        )


def diff(
    a: CheckpointReader,
    b: CheckpointReader,
    *,
    only: tuple[str, ...] = (),
    on_tensor: Callable[[str], None] = lambda key: None,
) -> Difference:
    """Compare two checkpoints.

    What belongs to the ranks of a plan (generators; the state that each data rank or stage adds) is compared where both
    have it under the same plan.

    Args:
        only: patterns (`fnmatch`) of keys (``model/blocks.0.*``), to which the comparison is restricted; a path of a
            value is one, too. Empty is all.
        on_tensor: called with each key before it is compared.

    Raises:
        CheckpointError: when a file cannot be read.
    """

    is_same_plan = a.manifest.plan.get("axes") == b.manifest.plan.get("axes")

    def is_wanted(key: str) -> bool:
        return matches(key, only) if only else is_same_plan or not key.startswith("ranks/")

    left, right = ({key for key in each.manifest.tensors if is_wanted(key)} for each in (a, b))
    left, right = left | _aliased(a, is_wanted), right | _aliased(b, is_wanted)
    found = []
    both = sorted(left & right, key=natural_order)
    order = {"model": 0, "optimizer": 1}
    for key in both:
        on_tensor(key)
        difference = _of_tensor(key, a, b)
        if difference is not None:
            found.append(difference)
    found.sort(key=lambda each: (order.get(each.section, 2), each.section, -each.relative))
    return Difference(
        sorted(left - right, key=natural_order),
        sorted(right - left, key=natural_order),
        found,
        {path: pair for path, pair in _values(a, b, is_same_plan=is_same_plan).items() if is_wanted(path)},
        {} if only else _differing(_about(a), _about(b)),
        len(both),
    )


def _aliased(reader: CheckpointReader, is_wanted: Callable[[str], bool]) -> set[str]:
    """Keys under which what is tied would be if it were not: one checkpoint may have a tie that the other has not."""
    return {key for name in reader.manifest.aliases if is_wanted(key := f"model/{name}")}


def _key(key: str, reader: CheckpointReader) -> str:
    name = key.removeprefix("model/")
    return key if key in reader.manifest.tensors else f"model/{reader.manifest.aliases[name]}"


def _of_tensor(key: str, a: CheckpointReader, b: CheckpointReader) -> TensorDifference | None:
    """None where both are the same."""
    key_a, key_b = _key(key, a), _key(key, b)
    one, other = a.manifest.tensors[key_a], b.manifest.tensors[key_b]
    count = math.prod(one.shape)
    if one.shape != other.shape:
        return TensorDifference(key, f"{one.dtype} {one.shape}, {other.dtype} {other.shape}", None, count)
    spec = f"{one.dtype}, {other.dtype}" if one.dtype != other.dtype else ""
    different, absolute, largest = 0, 0.0, 0.0
    is_float = all(DTYPES[each.dtype].is_floating_point or DTYPES[each.dtype].is_complex for each in (one, other))
    boxes = list(blocks(one.shape, BLOCK_ELEMENTS))
    if not spec and all(torch.equal(_read(a, key_a, box), _read(b, key_b, box)) for box in boxes):
        return None
    for box in boxes:
        x, y = _read(a, key_a, box), _read(b, key_b, box)
        gap, size, num = _compared(x, y)
        different, absolute, largest = different + num, max(absolute, gap), max(largest, size)
    if not different and not spec:
        return None
    relative = absolute / largest if largest > 0 and math.isfinite(absolute) else absolute
    return TensorDifference(key, spec, different, count, absolute, relative, is_float)


def _read(reader: CheckpointReader, key: str, box: Box) -> Tensor:
    out = torch.empty([stop - start for start, stop in box], dtype=DTYPES[reader.manifest.tensors[key].dtype])
    reader.read_box(key, box, out)
    return out


def _compared(x: Tensor, y: Tensor) -> tuple[float, float, int]:
    """Of two blocks: the largest difference, the largest finite element, and how many elements are not the same."""
    wide = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
    p, q = x.to(wide), y.to(wide)
    gap = (p - q).abs()
    absolute, largest = _largest(gap), max(_largest(p), _largest(q))
    if math.isfinite(absolute) and math.isfinite(largest) and (x.is_floating_point() or x.dtype != y.dtype):
        return absolute, largest, int(gap.count_nonzero())
    is_same = (p == q) | (p.isnan() & q.isnan())
    if x.dtype == y.dtype and not x.is_floating_point() and not x.is_complex():
        is_same = x == y  # float64 does not hold every int64
    gap = torch.where(is_same, 0.0, gap).nan_to_num_(nan=math.inf, posinf=math.inf)
    largest = max(_largest(each.abs().nan_to_num(0.0, 0.0, 0.0)) for each in (p, q))
    return _largest(gap), largest, int((~is_same).sum())


def _largest(x: Tensor) -> float:
    """Absolute; NaN where there is one."""
    if not x.numel():
        return 0.0
    low, high = torch.aminmax(x.abs() if x.is_complex() else x)
    return high.item() if math.isnan(high.item()) else max(-low.item(), high.item())


def blocks(shape: tuple[int, ...], most: int) -> Iterator[Box]:
    """Boxes of at most so many elements that cover a shape, in its order in memory."""
    if math.prod(shape) <= most:
        yield tuple((0, size) for size in shape)
        return
    inner = math.prod(shape[1:])
    rows = max(1, most // inner)
    for start in range(0, shape[0], rows):
        stop = min(start + rows, shape[0])
        if inner <= most:
            yield ((start, stop), *((0, size) for size in shape[1:]))
        else:
            yield from (((start, stop), *rest) for rest in blocks(shape[1:], most))


# -- what is no tensor ------------------------------------------------------------------------------------


#: sections of values with an entry of each data rank, or of each stage
_OF_RANKS = ("loader/", "strategy_values/", "optimizer_groups/")


def _values(a: CheckpointReader, b: CheckpointReader, *, is_same_plan: bool) -> dict[str, tuple[str, str]]:
    one, other = ({"step": each.manifest.step, **each.manifest.values} for each in (a, b))
    alone = {path for path in one.keys() ^ other.keys() if not is_same_plan and path.startswith(_OF_RANKS)}
    return _differing(
        *(_flat({path: value for path, value in each.items() if path not in alone}) for each in (one, other))
    )


def _about(reader: CheckpointReader) -> dict[str, Any]:
    manifest = reader.manifest
    told = {"plan": manifest.plan, "versions": manifest.versions, "config": manifest.config}
    return _flat(told | {"tokenizer": manifest.tokenizer})


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    """Plain values by their path in a nest; what stands for a tensor (`values.encode`) is left out."""
    if isinstance(value, Mapping) and len(value) == 1 and (tag := next(iter(value))) in TAGS:
        return {} if tag == "$tensor" else _flat(value[tag], path)
    if isinstance(value, Mapping):
        items = [(str(key), each) for key, each in value.items()]
    elif isinstance(value, list):
        items = [(str(index), each) for index, each in enumerate(value)]
    else:
        return {path: value}
    if not items:
        return {path: value}
    found: dict[str, Any] = {}
    for key, each in items:
        found |= _flat(each, f"{path}.{key}" if path else key)
    return found


_ABSENT = object()


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    found = {}
    for path in dict.fromkeys((*one, *other)):
        x, y = one.get(path, _ABSENT), other.get(path, _ABSENT)
        if x != y and not (x != x and y != y):
            found[path] = _shown(x), _shown(y)
    return found


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else repr(value)
