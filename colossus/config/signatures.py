"""Options of named components, checked against what the component takes, without importing torch.

A misspelt ``optimizer.weight_decya`` should be found before processes start. Built-in components live in modules that
import torch, so their source is parsed instead of run; registered classes and callables are inspected.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from colossus.config.errors import unknown_key
from colossus.config.schema import READING_OPTIONS
from colossus.config.section import Named
from colossus.registry import DATASETS, Registry


def option_problems(key: str, named: Named, registry: Registry) -> list[str]:
    """One line for each option of ``named`` that its component does not take; nothing where that is not known."""
    known = parameters(named.type, registry)
    if known is None:
        return []
    if registry is DATASETS:
        known = [*known, *READING_OPTIONS, "validation"]
    fields = [name for name in type(named).model_fields if name not in known]
    return [
        f"{key}.{option}: {unknown_key(f'{key}.{option}', option, [*fields, *known])}"
        for option in named.options
        if option not in known
    ]


def parameters(kind: str | Callable[..., Any], registry: Registry) -> list[str] | None:
    """Names of the arguments a component can take, or None when it takes any or they are not known."""
    if not isinstance(kind, str):
        return _inspected(kind)
    if kind in registry._entries:
        return _inspected(registry._entries[kind])
    module, _, name = registry._builtin.get(kind, "").partition(":")
    return _parsed(module, name) if name else None


def _inspected(component: Callable[..., Any]) -> list[str] | None:
    try:
        found = inspect.signature(component).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in found):
        return None
    return [parameter.name for parameter in found if parameter.kind is not parameter.POSITIONAL_ONLY]


def _parsed(module: str, name: str) -> list[str] | None:
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)  # of the whole name, it would import the packages around it
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*below).with_suffix(".py") if below else Path(spec.origin)
    if not file.is_file():
        return None
    tree = ast.parse(file.read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            return _arguments(node, skip=0)
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"]
            return _arguments(methods[0], skip=1) if methods else None
    return None


def _arguments(function: ast.FunctionDef, skip: int) -> list[str] | None:
    found = function.args
    if found.kwarg is not None:
        return None
    return [argument.arg for argument in [*found.args[skip:], *found.kwonlyargs]]
