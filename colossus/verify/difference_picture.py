"""A picture of differences by module, for a terminal: which layers differ, and by how much over rounding."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from colossus.verify.step_comparison import Difference

#: rows of a picture: fewer than the first tell too little
_FEW_ROWS, _MOST_ROWS = 8, 24
#: its columns, and the decades of its scale
_COLUMNS, _LOWEST, _HIGHEST = 40, -16, 2


def picture(differences: Sequence[Difference]) -> list[str]:
    """Return a bar for each module, of the largest relative difference among its values, on a logarithmic scale.

    Modules are named as deep as there is room for; where that tells too little, deeper, and the worst are shown. A
    ``|`` marks what rounding explains: bars that go beyond it are differences.

    Args:
        differences: all values of one kind in one step, in the order of the model.
    """
    modules = _by_module([item for item in differences if item.name])
    if len(modules) < 2:
        return []
    rows = dict(sorted(modules.items(), key=lambda row: -_excess(row[1]))[:_MOST_ROWS])
    rows = {name: item for name, item in modules.items() if name in rows}
    hidden = len(modules) - len(rows)
    width = max(map(len, rows))
    lines = [f"{name:<{width}}  {_number(item.relative):>7}  {_bar(item)}" for name, item in rows.items()]
    return [*lines, f"and {hidden} more, which differ less"] if hidden else lines


def _by_module(differences: Sequence[Difference]) -> Mapping[str, Difference]:
    """Return the worst difference of each module, at the greatest depth of names that has no more than enough rows."""
    deepest = max((item.name.count(".") for item in differences), default=0)
    modules = _at_depth(differences, 1)
    for depth in range(2, deepest + 1):
        deeper = _at_depth(differences, depth)
        if len(modules) >= _FEW_ROWS and len(deeper) > _MOST_ROWS:
            break
        modules = deeper
    return modules


def _at_depth(differences: Sequence[Difference], depth: int) -> dict[str, Difference]:
    modules: dict[str, Difference] = {}
    for item in differences:
        parts = item.name.split(".")
        name = ".".join(parts[: min(depth, max(len(parts) - 1, 1))])
        if name not in modules or _excess(item) > _excess(modules[name]):
            modules[name] = item
    return modules


def _excess(item: Difference) -> float:
    """Return the difference over its bound; infinite for NaN, and for any where there is no rounding."""
    if math.isnan(item.relative):
        return math.inf
    return item.relative / item.bound if item.bound else (math.inf if item.relative else 0.0)


def _number(relative: float) -> str:
    return f"{relative:.1g}" if math.isfinite(relative) else "other"


def _column(relative: float) -> int:
    exponent = math.log10(relative) if relative > 0 else _LOWEST
    place = (min(max(exponent, _LOWEST), _HIGHEST) - _LOWEST) / (_HIGHEST - _LOWEST)
    return round(place * (_COLUMNS - 1))


def _bar(item: Difference) -> str:
    filled = _COLUMNS if not math.isfinite(item.relative) else _column(item.relative)
    bar = ["#" if column < filled else " " for column in range(_COLUMNS)]
    bar[_column(item.bound)] = "|"
    return "".join(bar).rstrip()
