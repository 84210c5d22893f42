"""The match of a checkpoint's tensors to a model's parameters and buffers, by names and shapes alone. No torch."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from colossus.checkpoint.adapter_names import adapter_names, plain_names
from colossus.checkpoint.errors import CheckpointError

Shape = tuple[int, ...]
#: saved name -> name in the model, or None for a tensor that is left out
Rename = Mapping[str, str | None] | Callable[[str], str | None]

#: number of names that an error lists of each kind
_MOST_LISTED = 5


@dataclass(frozen=True)
class WeightMatch:
    """The match of saved tensors to a model's, by first names.

    Attributes:
        sources: name in the model -> name in the checkpoint, of tensors that are loaded.
        resized: name in the model -> (rows saved, rows here), of those whose first rows alone are loaded.
        missing: names in the model that were asked for and that the checkpoint does not have.
        left_over: names in the checkpoint that the model does not have.
        other_shape: name in the model -> (shape saved, shape here), where these do not fit.
    """

    sources: Mapping[str, str] = field(default_factory=dict)
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    missing: Sequence[str] = ()
    left_over: Sequence[str] = ()
    other_shape: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        """Return whether nothing is missing, left over or of another shape."""
        return not (self.missing or self.left_over or self.other_shape)

    def __str__(self) -> str:
        """Return ``2 missing there: norm.bias, ..; 1 of another shape: head.weight (8, 4) there, (9, 4) here``."""
        kinds = {
            "missing there": self.missing,
            "not in this model": self.left_over,
            "of another shape": [
                f"{name} {saved} there, {here} here" for name, (saved, here) in self.other_shape.items()
            ],
        }
        return "; ".join(
            f"{len(names)} {kind}: {', '.join(names[:_MOST_LISTED])}{', ..' * (len(names) > _MOST_LISTED)}"
            for kind, names in kinds.items()
            if names
        )


def match_exactly(model: Mapping[str, Shape], saved: Mapping[str, Shape]) -> WeightMatch:
    """Match every tensor by its own first name."""
    return _compared({name: name for name in model if name in saved}, model, saved, set(model), set(saved))


def match_weights(
    model: Mapping[str, Shape],
    names: Mapping[str, Collection[str]],
    saved: Mapping[str, Shape],
    aliases: Mapping[str, str],
    *,
    only: Sequence[str] | None = None,
    rename: Rename | None = None,
    grow: Sequence[str] = (),
    shorten: Sequence[str] = (),
    strict: bool = False,
) -> WeightMatch:
    """Match a checkpoint to a model that may differ from the saved one.

    A tied parameter is found under any of its names, on both sides. A weight below an adapter is found under its name
    without it, too, and adapters that the checkpoint does not have begin with their initial values.

    Args:
        model: shapes of the model's parameters and buffers by first name.
        names: all names of each (a tied one has several), by first name.
        saved: shapes in the checkpoint by name.
        aliases: other names of saved tensors -> the name under which the value is.
        only, rename, grow, strict: those of `Checkpoints.load_weights`.
        shorten: patterns of names in the model that may have fewer rows than were saved, and read the first ones.

    Raises:
        CheckpointError: if a pattern or a rename matches nothing, or two saved tensors would go to one parameter.
    """
    first_names = {name: first for first, aliases_of in names.items() for name in aliases_of}
    for title, patterns in (("only", only or ()), ("grow", grow)):
        for pattern in patterns:
            if not any(matches(name, (pattern,)) for name in first_names):
                raise CheckpointError(f"{title}: {pattern!r} matches no parameter of the model")
    plain = plain_names(first_names)
    first_names |= {name: first_names[own] for name, own in plain.items() if name not in first_names}
    wanted = {first for first in model if only is None or any(matches(name, only) for name in names[first])}
    sources: dict[str, str] = {}
    new_names, left_over = renamed([*saved, *aliases], rename), set(saved)
    for name, new in new_names.items():
        value = aliases.get(name, name)
        if new is None:  # under this name; under another it may be wanted
            left_over.discard(name)
            continue
        first = first_names.get(new)
        if first is None or first not in wanted:
            continue
        if sources.setdefault(first, value) != value:
            raise CheckpointError(
                f"{sources[first]} and {name} of the checkpoint both go to {first} of this model: leave one out with "
                f"rename={{{name!r}: None}}"
            )
    adapters = adapter_names(model)
    if only is None and not adapters & sources.keys():
        wanted -= adapters
    if only is not None:  # tensors that nobody asked for are not left over
        left_over = {name for name in left_over if matches(new_names[name] or name, only)}
    match = _compared(sources, model, saved, wanted, left_over, names, grow=grow, shorten=shorten)
    if not match.sources:
        raise CheckpointError(f"nothing in the checkpoint fits this model: {match}")
    if strict and not match.is_complete:
        raise CheckpointError(
            f"it does not fit the model: {match}. only=[patterns] loads a part, rename={{..}} renames, grow=[patterns] "
            f"lets tables have more rows here, strict=False loads what fits"
        )
    return match


def renamed(names: Sequence[str], rename: Rename | None) -> dict[str, str | None]:
    """Return the new names of saved tensors, None for those that are left out.

    Args:
        names: saved names.
        rename: a function of a name, or a dict whose first key that matches a name renames it. A key is a prefix of
            whole parts (``{"encoder": "trunk"}``; the key ``""`` adds a prefix to all names, the value ``""`` removes
            one). A key with stars matches a pattern, and stars of its value stand for the matched text
            (``{"blocks.*.up.*": "blocks.*.up.base.*"}``). The value None leaves a tensor out.
    """
    new_names: dict[str, str | None] = {name: name for name in names}
    if rename is None:
        return new_names
    if not isinstance(rename, Mapping):
        return {name: rename(name) for name in names}
    for key, value in reversed([*rename.items()]):  # the first key wins
        if value is not None and "*" in value and value.count("*") != key.count("*"):
            raise CheckpointError(f"rename: {key!r} has {key.count('*')} stars, {value!r} has {value.count('*')}")
        matched = {key: value} if key in new_names else {}
        starred, into = (key, value) if "*" in key else (_below(key), None if value is None else _below(value))
        pattern = re.compile("(.*)".join(map(re.escape, starred.split("*"))))
        for name in names:
            if stars := pattern.fullmatch(name):
                target = into
                for star in stars.groups() if target is not None else ():
                    target = target and target.replace("*", star, 1)
                matched[name] = target
        if not matched:
            raise CheckpointError(f"rename: {key!r} matches no name of the checkpoint")
        new_names |= matched
    return new_names


def _below(prefix: str) -> str:
    """Return a pattern of the names below a prefix of whole parts."""
    return f"{prefix.removesuffix('.')}.*" if prefix else "*"


def matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _compared(
    sources: Mapping[str, str],
    model: Mapping[str, Shape],
    saved: Mapping[str, Shape],
    wanted: set[str],
    left_over: set[str],
    names: Mapping[str, Collection[str]] = {},
    *,
    grow: Sequence[str] = (),
    shorten: Sequence[str] = (),
) -> WeightMatch:
    """Return the match of these sources, with those that do not fit by kind."""
    fitting, resized, other = {}, {}, {}
    for name, source in sources.items():
        there, here = saved[source], model[name]
        if there == here:
            fitting[name] = source
            continue
        allowed = grow if there[:1] < here[:1] else shorten
        is_by_rows = len(there) == len(here) and there[1:] == here[1:]
        if is_by_rows and any(matches(alias, allowed) for alias in names.get(name, ())):
            fitting[name], resized[name] = source, (there[0], here[0])
        else:
            other[name] = there, here
    missing = sorted(wanted - sources.keys())
    return WeightMatch(fitting, resized, missing, sorted(left_over - set(sources.values())), other)


def natural_order(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts names as a reader would: ``blocks.2`` before ``blocks.10``."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]
