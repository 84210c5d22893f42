"""A graph as a config names it: a name, a dict with options, a function or matrices of the user's own. No torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from colossus.graphs.graph_family import GraphFamily
from colossus.graphs.own import OwnFunction, OwnMatrices, is_matrices
from colossus.registry import GRAPHS, nearest


def make_family(spec: Any) -> GraphFamily:
    """The family that ``spec`` names.

    Args:
        spec: a name of `GRAPHS`; ``dict(type=name or callable, **options)``; a function, see `OwnFunction`; a matrix or
            a list of them, see `OwnMatrices`; or a family.

    Raises:
        ValueError: in words, with the nearest name.
    """
    if isinstance(spec, GraphFamily):
        return spec
    if is_matrices(spec):
        return OwnMatrices(spec)
    if not isinstance(spec, Mapping):
        spec = {"type": spec}
    options = dict(spec)
    if "type" not in options:
        raise ValueError(f'a graph needs a type: dict(type="exponential", **options); known: {_known()}')
    kind = options.pop("type")
    if is_matrices(kind):
        if options:
            raise ValueError(f"matrices take no options, got {', '.join(options)}")
        return OwnMatrices(kind)
    if not callable(kind) and not isinstance(kind, str):
        raise ValueError(
            f"must be a name ({_known()}), a function (replicas, step) -> matrix, or matrices, got {_brief(kind)}"
        )
    if isinstance(kind, str) and kind.lstrip()[:1] in ("[", "{", "("):
        raise ValueError(f"{_brief(kind)} is meant for matrices or a dict, but it is not written as Python has them")
    made = GRAPHS.get(kind) if isinstance(kind, str) else kind
    if inspect.isclass(made) and issubclass(made, GraphFamily):
        _require_options(kind, made, options)
        return made(**options)
    return OwnFunction(made, options)


def name_of_graph(spec: Any) -> str:
    """How messages call it; empty for matrices."""
    if isinstance(spec, Mapping):
        return name_of_graph(spec.get("type"))
    if isinstance(spec, str):
        return spec
    if is_matrices(spec):
        return ""
    return str(getattr(spec, "__name__", type(spec).__name__))


def _require_options(kind: Any, made: type[GraphFamily], options: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(made.__init__).parameters if name not in ("self", "args", "kwargs")]
    for name in options:
        if name not in known:
            close = nearest(name, known)
            hint = f"did you mean {close}? " if close else ""
            takes = f"known options: {', '.join(known)}" if known else "it takes none"
            raise ValueError(f"graph {name_of_graph(kind)!r} has no option {name!r}; {hint}{takes}")


def _known() -> str:
    return ", ".join(GRAPHS.names())


def _brief(value: Any) -> str:
    text = " ".join(repr(value).split())
    return text if len(text) <= 60 else text[:57] + "..."
