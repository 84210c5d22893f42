"""Which tensor of a checkpoint goes to which parameter or buffer of a model, by names and shapes alone. No torch."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from colossus.checkpoint.errors import CheckpointError

Shape = tuple[int, ...]
#: saved name -> name in the model, or None for what is to be left out
Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: names that an error lists of each kind
_MOST_LISTED = 5


@dataclass(frozen=True)
class Known:
    """A parameter or buffer of the model: its full shape, and all its names (a tied one has several)."""

    shape: Shape
    names: tuple[str, ...]


@dataclass(frozen=True)
class WeightMatch:
    """What goes where, by first names.

    Attributes:
        sources: name in the model -> name in the checkpoint, of what is loaded.
        grown: name in the model -> (rows saved, rows here), of those of ``sources`` that have more rows here.
        shortened: name in the model -> the same, of those that take the first of more rows.
        missing: names in the model that were asked for and that the checkpoint does not have.
        left_over: names in the checkpoint that the model does not have.
        other_shape: name in the model -> (shape saved, shape here), where these do not fit.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    grown: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    shortened: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    left_over: Sequence[str] = ()
    other_shape: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Whether nothing is missing, left over or of another shape."""
        return not (self.missing or self.left_over or self.other_shape)

    def __str__(self) -> str:
        """``2 missing there: norm.bias, ..; 1 of another shape: head.weight (8, 4) there, (9, 4) here``."""
        close = self._nearest_left_over()
        missing = [f"{name} (there: {close[name]}?)" if name in close else name for name in self.missing]
        kinds = {
            "missing there": missing,
            "not in this model": list(self.left_over),
            "of another shape": [
                f"{name} {saved} there, {here} here" for name, (saved, here) in self.other_shape.items()
            ],
        }
        return "; ".join(f"{len(names)} {kind}: {_listed(names)}" for kind, names in kinds.items() if names)

    def _nearest_left_over(self) -> dict[str, str]:
        """What the checkpoint may have for the names that are listed as missing."""
        found = {}
        for name in self.missing[:_MOST_LISTED]:
            if close := difflib.get_close_matches(name, self.left_over[:10_000], n=1, cutoff=0.7):
                found[name] = close[0]
        return found


def match_exactly(known: Mapping[str, Known], saved: Mapping[str, Shape]) -> WeightMatch:
    """Everything by its own first name."""
    return _compared({name: name for name in known if name in saved}, known, saved, known, saved, grow=())


def match_weights(
    known: Mapping[str, Known],
    saved: Mapping[str, Shape],
    aliases: Mapping[str, str],
    *,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    grow: Sequence[str] = (),
    shorten: Sequence[str] = (),
    strict: bool = False,
) -> WeightMatch:
    """What of a checkpoint goes into a model that need not be the one which was saved.

    A tied parameter is found under any of its names, on both sides.

    Args:
        known: by first name, of the whole model.
        saved: shapes by the names under which values are.
        aliases: other names of these -> the name under which the value is.
        only: patterns (`fnmatch`) of names in the model; what none of them matches keeps its values.
        rename: see `renamed`.
        grow: patterns of names in the model that may have more rows (dim 0) than were saved.
        shorten: patterns of those that may have fewer, and take the first ones.
        strict: refuse what is not complete.

    Raises:
        CheckpointError: for a pattern or a rename that meets nothing, and where two saved tensors would go to one
            parameter.
    """
    names = [*saved, *aliases]
    new_names = renamed(names, rename)
    of_model = {each: first for first, entry in known.items() for each in entry.names}
    for title, patterns in (("only", only or ()), ("grow", grow)):
        _require_met(title, patterns, of_model)
    if only is not None and not only:
        raise CheckpointError("only: has no patterns, so nothing would be loaded; None loads everything")
    wanted = {
        first: entry for first, entry in known.items() if only is None or any(matches(n, only) for n in entry.names)
    }
    sources: dict[str, str] = {}
    under: dict[str, str] = {}  # name in the model -> the saved name that it came by, for messages
    used, dropped = set(), set()
    for name in names:
        value, new = aliases.get(name, name), new_names[name]
        if new is None:
            dropped.add(name)
            continue
        first = of_model.get(new)
        if first is None:
            continue
        used.add(value)
        if first not in wanted:
            continue
        if sources.setdefault(first, value) != value:
            raise CheckpointError(
                f"{under[first]} and {name} of the checkpoint both go to {_title(first, known[first])}: leave one out "
                f"with rename={{{name!r}: None}}"
            )
        under.setdefault(first, name)
    # what is dropped under one name may be wanted under another; what is not asked for is not left over
    left = {value for value in saved if value not in used and value not in dropped}
    if only is not None:
        left = {value for value in left if matches(new_names[value] or value, only)}
    found = _compared(sources, wanted, saved, known, left, grow=grow, shorten=shorten)
    if not found.sources:
        raise CheckpointError(
            f"nothing in the checkpoint fits this model: {found}"
            + ("" if rename else "; rename={saved prefix: prefix here} renames")
        )
    if strict and not found.is_complete:
        raise CheckpointError(
            f"it does not fit the model: {found}. only=[patterns] loads a part, rename={{..}} renames, grow=[patterns] "
            f"lets tables have more rows here, strict=False loads what fits"
        )
    return found


def renamed(names: Sequence[str], rename: Rename | None) -> dict[str, str | None]:
    """New names of saved ones.

    Args:
        rename: a function of a name; or a dict whose first key that meets a name renames it. A key is a prefix of whole
            parts (``{"encoder": "trunk"}``; ``""`` is in front of all, and as a value takes the prefix away), or has
            stars, and those of its value stand for what they met (``{"blocks.*.up.*": "blocks.*.up.base.*"}``). A
            value of None leaves out.

    Raises:
        CheckpointError: for a key that meets no name, and for stars that do not agree.
    """
    if rename is None:
        return {name: name for name in names}
    if not isinstance(rename, Mapping):
        found: dict[str, str | None] = {}
        for name in names:
            new = found[name] = rename(name)
            if new is not None and not isinstance(new, str):
                raise CheckpointError(f"rename({name!r}) gave {new!r}: it gives the name in this model, or None")
        return found
    found = {name: name for name in names}
    for key, value in reversed(list(rename.items())):  # the first key wins
        rule = _rule(key, value)
        met = {name: new for name in names if (new := rule(name)) != _UNMET}
        if not met:
            raise CheckpointError(f"rename: {key!r} meets no name of the checkpoint{nearest_names(key, names)}")
        found |= met
    return found


#: no name
_UNMET = "\0"


def _rule(key: str, value: str | None) -> Callable[[str], str | None]:
    """One entry of a dict of renames, as a function; `_UNMET` for a name that it does not meet."""
    if "*" in key:
        pattern = re.compile("(.*)".join(map(re.escape, key.split("*"))))
        if value is not None and value.count("*") not in (0, key.count("*")):
            raise CheckpointError(f"rename: {key!r} has {key.count('*')} stars, {value!r} has {value.count('*')}")

        def by_pattern(name: str) -> str | None:
            met = pattern.fullmatch(name)
            if met is None:
                return _UNMET
            if value is None or "*" not in value:
                return value
            parts = value.split("*")
            return "".join(part + star for part, star in zip(parts, (*met.groups(), ""), strict=True))

        return by_pattern
    prefix = key.removesuffix(".")

    def by_prefix(name: str) -> str | None:
        rest = name if not prefix else name[len(prefix) :].removeprefix(".")
        if prefix and name != prefix and not name.startswith(prefix + "."):
            return _UNMET
        return None if value is None else ".".join(filter(None, (value.removesuffix("."), rest)))

    return by_prefix


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _compared(
    sources: Mapping[str, str],
    wanted: Mapping[str, Known],
    saved: Mapping[str, Shape],
    known: Mapping[str, Known],
    left: Iterable[str],
    *,
    grow: Sequence[str],
    shorten: Sequence[str] = (),
) -> WeightMatch:
    """The match of these sources, with what does not fit told apart."""
    fitting, grown, shortened, other = {}, {}, {}, {}
    for name, source in sources.items():
        there, here = saved[source], known[name].shape
        if there == here:
            fitting[name] = source
        elif _grows(there, here) and any(matches(each, grow) for each in known[name].names):
            fitting[name], grown[name] = source, (there[0], here[0])
        elif _grows(here, there) and any(matches(each, shorten) for each in known[name].names):
            fitting[name], shortened[name] = source, (there[0], here[0])
        else:
            other[name] = there, here
    missing = sorted(wanted.keys() - sources.keys())
    return WeightMatch(fitting, grown, shortened, missing, sorted(set(left) - set(sources.values())), other)


def _grows(there: Shape, here: Shape) -> bool:
    return len(there) == len(here) > 0 and there[1:] == here[1:] and 0 < there[0] < here[0]


def _require_met(title: str, patterns: Sequence[str], names: Iterable[str]) -> None:
    known = list(names)
    for pattern in patterns:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in known):
            raise CheckpointError(
                f"{title}: {pattern!r} meets no parameter of the model{nearest_names(pattern, known)}"
            )


def nearest_names(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known[:10_000], n=3, cutoff=0.4) or sorted(known)[:3]
    return f"; there are {', '.join(close)}, .." if close else ""


def _title(first: str, entry: Known) -> str:
    return f"{first} of this model" + (f" (tied: {', '.join(entry.names)})" if len(entry.names) > 1 else "")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_MOST_LISTED]) + (", .." if len(names) > _MOST_LISTED else "")
