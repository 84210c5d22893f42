"""A shard: some rows of one tensor at a server, its optimizer state, and the rules by which it changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from colossus.rows.row_gradient import RowGradient
from colossus.rows.row_rules import rule_of

#: rules of a push; ``gradient`` is an update by the optimizer of the tensor
RULES = ("zero", "copy", "add", "gradient")

#: values for a shard: for all of it, for some rows, or none
Part = Tensor | RowGradient | None


@dataclass(frozen=True)
class ShardSpec:
    """The specification of a shard, the same from all workers.

    Attributes:
        name, shape, dtype: those of the whole tensor.
        start, stop: rows of the tensor in this shard.
        optimizer: optimizer of the rule ``gradient``, dict(type=.., **options) by a name of `colossus.rows.row_rules`.
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
    """Values and optimizer state of a shard.

    Args:
        spec: specification of the shard.
        values: [stop - start, ...], or [1] for a scalar; the shard owns them.

    Attributes:
        state: state of the optimizer, under torch's names: tensors with these rows, and scalars.
        version: number of updates.
    """

    def __init__(self, spec: ShardSpec, values: Tensor) -> None:
        self.spec, self.values, self.version = spec, values, 0
        self.state: dict[str, Any] = {}

    @torch.no_grad()
    def push(self, rule: str, part: Part, options: Mapping[str, Any]) -> None:
        """Update the shard.

        Args:
            rule: ``zero``, ``copy``, ``add``, or ``gradient``.
            part: rows by their number within the shard; None: all rows for ``zero``, no change for ``gradient``.
            options: options of the optimizer, which override those of its creation; ``scale``: a factor of the
                gradient; ``clip_value``: the largest absolute value of an element of it, after that.
        """
        values = self.values
        if rule == "gradient":
            if part is None:
                return
            self._update(part, {**self.spec.optimizer, **options})
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
        scale, largest = options.pop("scale", 1.0), options.pop("clip_value", None)
        ids, rows = (gradient.ids, gradient.rows) if isinstance(gradient, RowGradient) else (None, gradient)
        rows = rows.to(self.values.dtype)
        rows = rows if scale == 1 else rows * scale
        rows = rows if largest is None else rows.clamp(-largest, largest)
        rule_of(options["type"]).update(self.values, self.state, ids, rows, options)

    # -- state --------------------------------------------------------------------------------------------

    def by_row(self) -> dict[str, Tensor]:
        """Return the tensors with a row for each row of the shard: ``value`` and tensors of the state."""
        rows = len(self.values)
        state = {key: x for key, x in self.state.items() if isinstance(x, Tensor) and x.dim() and len(x) == rows}
        return {"value": self.values, **state}

    def scalars(self) -> dict[str, float]:
        """Return the optimizer state of the whole tensor (the number of its updates)."""
        rows = self.by_row()
        return {key: float(x) for key, x in self.state.items() if key not in rows}

    @torch.no_grad()
    def load(self, start: int, rows: Mapping[str, Tensor], scalars: Mapping[str, float]) -> None:
        """Load rows from row ``start`` of the shard on, under the names of `by_row`, and scalars.

        State that the optimizer would create with its first update is created. Other rows stay as they are.
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
    """Raise ValueError if a tensor's optimizer does not exist or does not have these options."""
    options = dict(optimizer)
    rule = rule_of(options.pop("type", ""))
    for key in options:
        if key not in rule.options:
            names = ", ".join(rule.options)
            raise ValueError(f"the optimizer {rule.name!r} of {name!r} has no option {key!r}; it has {names}")
