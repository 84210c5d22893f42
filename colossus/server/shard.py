"""Some rows of one tensor at a server: values, what its optimizer keeps, and the rules by which they change."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.rows.row_rules import rule_of

#: what a push may do; ``gradient`` is an update by the optimizer of the tensor
RULES = ("zero", "copy", "add", "gradient")

#: options of an update, beside those of its optimizer: see `Shard.push`
_OF_UPDATES = ("scale", "clip_value")

#: of a shard: all of it, some rows of it, or nothing
Part = Tensor | RowGradient | None


@dataclass(frozen=True)
class ShardSpec:
    """What a shard is, the same from all workers.

    Attributes:
        name, shape, dtype: of the whole tensor.
        start, stop: rows of it that are here.
        optimizer: for the rule ``gradient``: dict(type=name of a rule of `colossus.rows.row_rules`, **options).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int
    optimizer: Mapping[str, Any]

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> ShardSpec:
        return cls(**{**data, "shape": tuple(data["shape"])})

    def __str__(self) -> str:
        optimizer = ", ".join(f"{key}={value!r}" for key, value in self.optimizer.items())
        return f"{self.dtype} {list(self.shape)}, rows {self.start} to {self.stop}, optimizer {optimizer or 'none'}"


class Shard:
    """
    Args:
        values: [stop - start, ...], or [1] of a scalar; the shard's own.

    Attributes:
        state: of the optimizer, under torch's names: tensors with these rows, and scalars.
        version: how many updates were applied.
    """

    def __init__(self, spec: ShardSpec, values: Tensor) -> None:
        self.spec, self.values, self.version = spec, values, 0
        options = dict(spec.optimizer)
        name = options.pop("type", None)
        self._rule, self._options = (None if name is None else rule_of(name)), options
        self.state: dict[str, Any] = {}

    def check(self, rule: str, part: Part, options: Mapping[str, Any]) -> None:
        """
        Raises:
            ValueError: what `push` cannot do, before anything is changed.
        """
        name, values = repr(self.spec.name), self.values
        if rule not in RULES:
            raise ValueError(f"there is no rule {rule!r}; there are {', '.join(RULES)}")
        sent = part.rows if isinstance(part, RowGradient) else part
        if sent is None:
            if rule in ("copy", "add"):
                raise ValueError(f"{rule} of {name} needs a tensor")
        elif sent.dtype != values.dtype and not (sent.is_floating_point() and values.is_floating_point()):
            raise ValueError(f"{name} is {values.dtype}, and {sent.dtype} was sent")
        if rule == "add" and values.dtype == torch.bool:
            raise ValueError(f"{name} is torch.bool, which has no sum; there are zero and copy")
        if rule != "gradient":
            if options:
                raise ValueError(f"{rule} of {name} takes no options, and {', '.join(options)} was given")
            return
        if not values.is_floating_point():
            raise ValueError(f"{name} is {values.dtype}, which has no gradients")
        if self._rule is None:
            raise ValueError(
                f"{name} was made without an optimizer, so it takes no gradients; there are zero, copy and add"
            )
        known = (*self._rule.options, *_OF_UPDATES)
        for key in options:
            if key not in known:
                raise ValueError(
                    f"an update of {name} by {self._rule.name!r} has no option {key!r}; it has {', '.join(known)}"
                )
        lr = options.get("lr")
        if lr is not None and not (isinstance(lr, int | float) and 0 <= lr < math.inf):
            raise ValueError(f"an update of {name} with lr = {lr!r}; it is a number, at least 0")
        options = {**self._options, **options}
        if options.get("lr") is None:
            raise ValueError(f"the optimizer of {name} has no lr, and none was given with its gradient; give lr")
        if isinstance(part, RowGradient) and options.get("weight_decay"):
            raise ValueError(
                f"the optimizer of {name} has weight_decay = {options['weight_decay']}, which needs all rows in each "
                f"update; rows alone were sent"
            )

    @torch.no_grad()
    def push(self, rule: str, part: Part, options: Mapping[str, Any]) -> None:
        """One update, which `check` has let pass.

        Args:
            rule: ``zero``, ``copy``, ``add``, or ``gradient``.
            part: rows by their number within the shard; None: for ``zero`` all of it, for ``gradient`` nothing.
            options: of the optimizer, before those that it was made with; ``scale``: a factor of the gradient;
                ``clip_value``: the largest absolute value of an element of it, after that.
        """
        values = self.values
        if rule == "gradient":
            if part is None:
                return
            self._update(part, {**self._options, **options})
        elif isinstance(part, RowGradient):
            if rule == "zero":
                values.index_fill_(0, part.ids, 0)
            elif rule == "copy":
                values.index_copy_(0, part.ids, part.rows.to(values.dtype))
            else:
                values.index_add_(0, part.ids, part.rows.to(values.dtype))
        elif rule == "zero":
            values.zero_()
        elif rule == "copy":
            values.copy_(part)  # type: ignore[arg-type]
        else:
            values.add_(part)  # type: ignore[arg-type]
        self.version += 1

    def _update(self, gradient: Tensor | RowGradient, options: dict[str, Any]) -> None:
        assert self._rule is not None
        scale, largest = options.pop("scale", 1.0), options.pop("clip_value", None)
        ids, rows = (gradient.ids, gradient.rows) if isinstance(gradient, RowGradient) else (None, gradient)
        rows = rows.to(self.values.dtype)
        rows = rows if scale == 1 else rows * scale
        rows = rows if largest is None else rows.clamp(-largest, largest)
        self._rule.update(self.values, self.state, ids, rows, options)

    # -- state --------------------------------------------------------------------------------------------

    def by_row(self) -> dict[str, Tensor]:
        """What has a row for each row of the shard: ``value`` and tensors of the state."""
        rows = len(self.values)
        kept = {key: x for key, x in self.state.items() if isinstance(x, Tensor) and x.dim() and len(x) == rows}
        return {"value": self.values, **kept}

    def scalars(self) -> dict[str, float]:
        """What the optimizer keeps once for the tensor (the number of its updates)."""
        rows = self.by_row()
        return {key: float(x) for key, x in self.state.items() if key not in rows}

    @torch.no_grad()
    def load(self, start: int, rows: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Take rows from ``start`` within the shard on, under the names of `by_row`, and the scalars.

        State that the optimizer makes with its first update is made. Rows that are not given stay as they are.
        """
        for key, value in rows.items():
            if key == "value":
                whole = self.values
            else:
                if key not in self.state:
                    self.state[key] = value.new_zeros((len(self.values), *value.shape[1:]))
                whole = self.state[key]
            whole[start : start + len(value)] = value
        for key, scalar in scalars.items():
            self.state[key] = torch.tensor(scalar)


def check_optimizer(name: str, optimizer: Mapping[str, Any]) -> None:
    """
    Raises:
        ValueError: a tensor's optimizer is none that there is, or has not such options.
    """
    if not optimizer:
        return
    options = dict(optimizer)
    rule = rule_of(options.pop("type", ""))
    for key in options:
        if key not in rule.options:
            known = ", ".join(rule.options)
            raise ValueError(f"the optimizer {rule.name!r} of {name!r} has no option {key!r}; it has {known}")


def parts_of(
    shards: Mapping[str, Shard], names: Sequence[str], kinds: Sequence[str], arrays: Sequence[Tensor]
) -> Iterator[tuple[Shard, Part]]:
    """What a request brings for each of its tensors.

    Args:
        kinds: "dense": one array, as the shard; "rows": two, ids int64 [n] within the shard, ascending and each once,
            and rows [n, ...]; "none".

    Raises:
        ValueError: something does not fit.
    """
    left = iter(arrays)
    for name, kind in zip(names, kinds, strict=True):
        shard = shards[name]
        part: Part = None
        if kind == "dense":
            part = next(left)
            if part.shape != shard.values.shape:
                raise ValueError(f"{name!r} is {list(shard.values.shape)} here, and {list(part.shape)} was sent")
        elif kind == "rows":
            part = RowGradient(next(left), next(left))
            check_rows(part, shard.values.shape, name)
        elif kind != "none":
            raise ValueError(f"{name!r} comes as {kind!r}; there are dense, rows and none")
        yield shard, part


def check_rows(part: RowGradient, shape: Sequence[int], name: str) -> None:
    """
    Raises:
        ValueError: they are no rows of a tensor of this shape.
    """
    if not shape:
        raise ValueError(f"{name!r} is a scalar, which has no rows")
    check_ids(part.ids, shape[0], name)
    if list(part.rows.shape) != (expected := [len(part.ids), *shape[1:]]):
        raise ValueError(
            f"{len(part.ids)} rows of {name!r}, {list(shape)}, are {expected}, not {list(part.rows.shape)}"
        )


def check_ids(ids: Tensor, num_rows: int, name: str) -> None:
    """
    Raises:
        ValueError: ids are not int64 [n], ascending, each once, and of this many rows.
    """
    if ids.dtype != torch.int64 or ids.dim() != 1:
        raise ValueError(f"ids of rows of {name!r} are int64 [n], not {ids.dtype} {list(ids.shape)}")
    if not len(ids):
        return
    if (ids[1:] <= ids[:-1]).any():
        raise ValueError(f"ids of rows of {name!r} ascend, each once")
    if ids[0] < 0 or ids[-1] >= num_rows:
        row = int(ids[0] if ids[0] < 0 else ids[-1])
        raise ValueError(f"row {row} of {name!r} is not one of its {num_rows} rows here")
