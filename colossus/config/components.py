"""Options of named components, ``dict(type=.., **options)``: their names, types and ranges, checked without torch.

Each built-in component is declared in `colossus.registry` with the class of its options, a pydantic model beside it
that imports no torch; or the component imports none, and the annotations of its arguments are the model. Of a user's
own class or function the names of its arguments are known.
"""

from __future__ import annotations

import contextlib
import inspect
import types
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from pydantic import BaseModel, ValidationError, create_model

from colossus.config.errors import ConfigError, explain
from colossus.config.learning_rates import learning_rate_problems
from colossus.config.schema import Config, ReadingOptions
from colossus.config.section import Named, Section
from colossus.import_path import is_path
from colossus.registry import (
    DATASETS,
    HOOKS,
    LR_SCHEDULES,
    MODELS,
    OPTIMIZERS,
    SCHEDULES,
    SEQUENCE_MODES,
    STRATEGIES,
    TABLE_OPTIMIZERS,
    TENSOR_MODES,
    Registry,
)

#: datasets whose tokens are bytes, unless there is a tokenizer
BYTE_DATASETS = ("Mix", "Packed", "PythonStdlib", "TextFolder")


def is_text(kind: Any) -> bool:
    """Return whether ``data.type``, a name or the class itself, is one of `BYTE_DATASETS`."""
    return (kind if isinstance(kind, str) else DATASETS.name_of(kind)) in BYTE_DATASETS


def named_components(config: Config) -> list[tuple[str, Named, Registry]]:
    """Return (key, section, registry) of each component that a config names."""
    entries: list[tuple[str, Any, Registry]] = [
        ("model", config.model, MODELS),
        ("data", config.data, DATASETS),
        ("optimizer", config.optimizer, OPTIMIZERS),
        ("optimizer.tables", config.optimizer.tables, TABLE_OPTIMIZERS),
        ("lr_schedule", config.lr_schedule, LR_SCHEDULES),
        ("schedule", config.schedule, SCHEDULES),
        ("parallel.strategy", config.parallel.strategy, STRATEGIES),
    ]
    entries += [(f"hooks.{number}", hook, HOOKS) for number, hook in enumerate(config.hooks)]
    return [(key, section, registry) for key, section, registry in entries if isinstance(section, Named)]


def check_names(config: Config) -> None:
    """Raise ConfigError unless every ``type`` can be found and has the options that are set."""
    problems = []
    for key, named, registry in named_components(config):
        problems += option_problems(key, named, registry)
    if not any(problem.startswith("lr_schedule") for problem in problems):
        problems += learning_rate_problems(config)
    for axis, registry in (("tensor", TENSOR_MODES), ("sequence", SEQUENCE_MODES)):
        mode = getattr(config.parallel, axis).mode
        if mode is not None and mode not in registry:
            problems.append(f"parallel.{axis}.mode: {registry.missing(mode)}")
    if problems:
        raise ConfigError(problems)


def options_of(key: str, named: Named | None, registry: Registry) -> Any:
    """Return the checked options of a component, of the class that is declared for it; None if there is none.

    Raises:
        ConfigError: for unknown keys and wrong values, as ``model.<key>: ...``.
    """
    section = registry.options(named.type) if named is not None and isinstance(named.type, str) else None
    if named is None or section is None:
        return None
    options, problems = _validated(key, named.options, section)
    if problems:
        raise ConfigError(problems)
    return options


def option_problems(key: str, named: Named, registry: Registry) -> list[str]:
    """Return a line if there is no such component, and one for each option that it has not, or not with this value."""
    kind = named.type
    if is_path(kind):
        try:
            kind = registry.get(kind)
        except ValueError as error:
            return [f"{key}.type: {error}"]
    if isinstance(kind, str) and kind not in registry:
        return [f"{key}.type: {registry.missing(kind)}"]
    section, own = describe(kind, registry), list(type(named).model_fields)
    reading = [*ReadingOptions.model_fields, "validation"] if registry is DATASETS else []
    of_reader = {name: value for name, value in named.options.items() if name in reading}
    problems = _validated(key, of_reader, ReadingOptions)[1]
    if section is None:
        return problems
    options = {name: value for name, value in named.options.items() if name not in of_reader}
    title = kind if isinstance(kind, str) else getattr(kind, "__name__", type(kind).__name__)
    problems += _validated(key, options, section, title, own, reading)[1]
    of_groups = getattr(section, "of_groups", ())
    for number, rule in enumerate(getattr(named, "groups", ()) if registry is OPTIMIZERS else ()):
        changed = {**options, **{name: value for name, value in rule.options.items() if name not in of_groups}}
        rule_key = f"{key}.groups.{number}"
        more = _validated(rule_key, changed, section, title, list(type(rule).model_fields), of_groups)[1]
        problems += [problem for problem in more if problem.replace(rule_key, key, 1) not in problems]
    return problems


def _validated(
    key: str,
    options: Mapping[str, Any],
    section: type[Any],
    title: str = "the component",
    before: Sequence[str] = (),
    after: Sequence[str] = (),
) -> tuple[Any, list[str]]:
    """Return the options of a component, or None and a line for each problem.

    Args:
        key: the key of the component.
        options: its options.
        section: the class of its options: a pydantic model, or a user's own class.
        title: the name of the component, for messages.
        before, after: further keys that may stand beside the options, for messages.
    """
    try:
        return section(**options), []
    except ValidationError as error:
        problems = explain(error, section, key, before, after)
        needed = f"is missing: {title} needs it"
        return None, [f"{path}: {needed if text == 'is missing' else text}" for path, text in problems.items()]
    except (TypeError, ValueError) as error:
        return None, [f"{key}: {error}"]


# -- descriptions -----------------------------------------------------------------------------------------------


def describe(kind: str | Callable[..., Any], registry: Registry) -> type[BaseModel] | None:
    """Return the class of a component's options; None if it takes any, or they are unknown.

    Args:
        kind: its name in the registry, or the component itself.
        registry: the registry of its kind.
    """
    name = kind if isinstance(kind, str) else registry.name_of(kind)
    if name is not None and (declared := registry.options(name)) is not None:
        return declared
    component = registry.get(kind) if isinstance(kind, str) else kind
    try:
        return _of_signature(component, registry.passed)
    except TypeError:  # it cannot be hashed
        return None


class _Arguments(Section):
    """The options that the signature of a component states."""


@cache
def _of_signature(component: Any, passed: tuple[str, ...]) -> type[BaseModel] | None:
    try:
        arguments = list(inspect.signature(component).parameters.values())
    except (TypeError, ValueError):
        return None
    if any(argument.kind is argument.VAR_KEYWORD or argument.name.startswith("_") for argument in arguments):
        return None
    kinds: dict[str, Any] = {}
    is_ours = str(getattr(component, "__module__", "")).startswith("colossus.")
    if is_ours:
        function = component.__init__ if inspect.isclass(component) else component
        with contextlib.suppress(NameError):  # a type that is imported for checkers alone
            kinds = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for place, argument in enumerate(arguments):
        # a user's own function may have an option where the package would pass a value
        is_passed = argument.name in passed and (is_ours or place == 0)
        if is_passed or argument.kind not in (argument.POSITIONAL_OR_KEYWORD, argument.KEYWORD_ONLY):
            continue
        is_required = is_ours and argument.default is argument.empty
        default = ... if is_required else argument.default if is_ours else None
        fields[argument.name] = (_checked(kinds.get(argument.name, Any)), default)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an argument may be called as a method of pydantic's is
        return create_model("Options", __base__=_Arguments, **fields)


def _checked(kind: Any) -> Any:
    """Return the type that is checked: of two classes (a path or a string), the component itself checks which."""
    classes = [one for one in typing.get_args(kind) if one is not type(None)]
    return Any if isinstance(kind, types.UnionType) and len(classes) > 1 else kind
