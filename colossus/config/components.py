"""Options of named components, ``dict(type=.., **options)``: their names and ranges, checked without torch.

A misspelt ``optimizer.weight_decya`` should be found before processes start. Built-in components live in modules that
import torch, so their source is parsed instead of run; registered classes and callables are inspected.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from colossus.config.errors import brief, explain, unknown_key
from colossus.config.optimizer_section import GROUP_OPTIONS, GroupRule
from colossus.config.schema import ReadingOptions
from colossus.config.section import FROM_LIST, Named, NotNegative, Positive, Section
from colossus.registry import (
    DATASETS,
    HOOK_OPTIONS,
    HOOKS,
    OPTIMIZERS,
    TABLE_OPTIMIZERS,
    TORCH_OPTIMIZERS,
    Registry,
)

#: datasets whose tokens are bytes, unless there is a tokenizer
BYTE_DATASETS = ("Mix", "Packed", "PythonStdlib", "TextFolder")
#: arguments of an optimizer that the engine passes, and no config
_FROM_ENGINE = ("params", "holders", "named_parameters")


def is_text(kind: Any) -> bool:
    """Return whether ``data.type``, a name or the class itself, is one of `BYTE_DATASETS`."""
    if isinstance(kind, str):
        return kind in BYTE_DATASETS
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)
    return str(module).startswith("colossus.data.") and name in BYTE_DATASETS


def option_problems(key: str, named: Named, registry: Registry) -> list[str]:
    """Return a line for each option of ``named`` that its component does not have, or not with this value."""
    accepted = parameters(named.type, registry)
    if accepted is not None and registry is OPTIMIZERS:
        accepted = [name for name in accepted if name not in _FROM_ENGINE]
    reading = (*ReadingOptions.model_fields, "validation") if registry is DATASETS else ()
    names = _unknown(key, named, [*accepted, *reading]) if accepted is not None else []
    values = _range_problems(key, named.type, named.options, registry)
    problems = names + values
    for number, rule in enumerate(getattr(named, "groups", ()) if registry is OPTIMIZERS else ()):
        rule_key = f"{key}.groups.{number}"
        group_options = GROUP_OPTIONS.get(named.type, ()) if isinstance(named.type, str) else ()
        class_options = [name for name in accepted or () if name != "lr"]
        names = _unknown(rule_key, rule, [*class_options, *group_options]) if accepted is not None else []
        together = _range_problems(rule_key, named.type, {**named.options, **rule.options}, registry)
        problems += names + [problem for problem in together if problem.replace(rule_key, key, 1) not in values]
    return problems


def _unknown(key: str, section: Named | GroupRule, accepted: Sequence[str]) -> list[str]:
    accepted = list(dict.fromkeys([*type(section).model_fields, *accepted]))
    wrong = [option for option in section.options if option not in accepted]
    return [f"{key}.{option}: {unknown_key(f'{key}.{option}', accepted)}" for option in wrong]


# -- names ----------------------------------------------------------------------------------------------------


def parameters(kind: str | Callable[..., Any], registry: Registry) -> list[str] | None:
    """Return the names of a component's arguments, or None if it accepts any or they are unknown."""
    component = registry._entries.get(kind) if isinstance(kind, str) else kind
    if component is None:
        module, _, name = registry._builtin.get(str(kind), "").partition(":")
        return _parsed(module, name) if name else None
    try:
        arguments = inspect.signature(component).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in arguments):
        return None
    return [parameter.name for parameter in arguments if parameter.kind is not parameter.POSITIONAL_ONLY]


@cache
def _parsed(module: str, name: str) -> list[str] | None:
    top, *below = module.split(".")
    spec = importlib.util.find_spec(top)  # find_spec of the whole name would import its parent packages
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent.joinpath(*below).with_suffix(".py") if below else Path(spec.origin)
    if not file.is_file():
        return None
    body, wanted, num_bound = ast.parse(file.read_text(encoding="utf-8")).body, name, 0
    for node in body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            body, wanted, num_bound = node.body, "__init__", 1
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == wanted and node.args.kwarg is None:
            return [argument.arg for argument in [*node.args.args[num_bound:], *node.args.kwonlyargs]]
    return None


# -- values ---------------------------------------------------------------------------------------------------


def _only(right: Any, why: str) -> AfterValidator:
    def check(value: Any) -> Any:
        if value != right:
            raise ValueError(f"{why}, got {brief(value)}")
        return value

    return AfterValidator(check)


Beta = Annotated[float, Field(ge=0, lt=1)]


class _Ranges(Section):
    """The ranges of options, for any component that has them."""

    model_config = ConfigDict(extra="ignore")


class _Optimizer(_Ranges):
    weight_decay: NotNegative = 0.0
    eps: NotNegative = 0.0
    momentum: NotNegative = 0.0
    dampening: float = 0.0
    betas: Annotated[tuple[Beta, Beta], FROM_LIST] = (0.9, 0.999)
    amsgrad: bool = False
    nesterov: bool = False
    fused: bool = False


class _Exact(_Optimizer):
    """Options of optimizers that need whole parameters."""

    momentum: Beta = 0.9


class _LARS(_Exact):
    trust_coefficient: Positive = 1e-3


class _Adafactor(_Ranges):
    weight_decay: NotNegative = 0.0
    beta2_decay: Annotated[float, Field(le=0)] = -0.8
    d: Annotated[float, Field(ge=1)] = 1.0
    eps: Annotated[tuple[NotNegative | None, NotNegative], FROM_LIST] = (None, 1e-3)


class _Muon(_Exact):
    ns_steps: Annotated[int, Field(ge=1, lt=100)] = 5
    adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None
    dtype: Literal["bf16", "fp32", "fp64"] = "bf16"
    ns_coefficients: Annotated[tuple[float, float, float], FROM_LIST] = (3.4445, -4.775, 2.0315)
    adamw: dict[str, Any] | None = None


_EXACT: dict[str, type[Section]] = {"Adafactor": _Adafactor, "LAMB": _Exact, "LARS": _LARS, "Muon": _Muon}


class _TableOptimizer(_Optimizer):
    """Options of an optimizer of tables with sparse gradients."""

    weight_decay: Annotated[float, _only(0, "must be 0: rows that a step has not looked up would not decay")] = 0.0
    amsgrad: Annotated[bool, _only(False, "must be False: there is no form of amsgrad for rows")] = False


def _range_problems(key: str, kind: Any, options: dict[str, Any], registry: Registry) -> list[str]:
    ranges: dict[str, type[Section]] = {OPTIMIZERS.kind: _Optimizer, TABLE_OPTIMIZERS.kind: _TableOptimizer}
    section = (ranges | {DATASETS.kind: ReadingOptions}).get(registry.kind)
    if registry is HOOKS and kind in HOOK_OPTIONS:
        section = HOOK_OPTIONS.get(kind)
    if registry is OPTIMIZERS and kind not in TORCH_OPTIMIZERS:
        section = _EXACT.get(kind) if isinstance(kind, str) else None
    if section is None:
        return []
    try:
        checked = section.model_validate(options)
    except ValidationError as error:
        return [f"{path}: {problem}" for path, problem in explain(error, section, key).items()]
    if isinstance(checked, _Optimizer) and checked.nesterov and (not checked.momentum or checked.dampening):
        return [f"{key}.nesterov: needs a momentum above 0 and no dampening"]
    return []
