"""Ranges of the options of built-in components, which their own constructors would refuse on every rank. No torch."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from colossus.config.errors import brief
from colossus.config.schema import Config
from colossus.config.section import Named
from colossus.registry import DATASETS, LR_SCHEDULES, OPTIMIZERS, TABLE_OPTIMIZERS, Registry

#: datasets whose tokens are bytes, unless there is a tokenizer
BYTE_DATASETS = ("PythonStdlib", "TextFolder")


def is_text(kind: Any) -> bool:
    """Whether ``data.type``, a name or the class itself, is one of `BYTE_DATASETS`."""
    if isinstance(kind, str):
        return kind in BYTE_DATASETS
    module, name = getattr(kind, "__module__", None), getattr(kind, "__qualname__", None)
    return module == "colossus.data.text" and name in BYTE_DATASETS


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _at_least_0(value: Any) -> bool:
    return _number(value) and value >= 0


def _betas(value: Any) -> bool:
    return (
        isinstance(value, tuple | list) and len(value) == 2 and all(_number(beta) and 0 <= beta < 1 for beta in value)
    )


def _switch(value: Any) -> bool:
    return isinstance(value, bool)


#: of the built-in optimizers: option -> whether a value is right, and what it must be
_OPTIMIZER: dict[str, tuple[Callable[[Any], bool], str]] = {
    "weight_decay": (_at_least_0, "must be a number of at least 0"),
    "eps": (_at_least_0, "must be a number of at least 0"),
    "momentum": (_at_least_0, "must be a number of at least 0"),
    "dampening": (_number, "must be a number"),
    "lr_decay": (_at_least_0, "must be a number of at least 0"),
    "initial_accumulator_value": (_at_least_0, "must be a number of at least 0"),
    "betas": (_betas, "must be two numbers, each at least 0 and below 1, such as (0.9, 0.999)"),
    **dict.fromkeys(("amsgrad", "maximize", "nesterov", "fused"), (_switch, "must be True or False")),
}
#: of those of tables, beside
_TABLE_OPTIMIZER: dict[str, tuple[Callable[[Any], bool], str]] = {
    **_OPTIMIZER,
    "weight_decay": (
        lambda value: _number(value) and value == 0,
        "must be 0: rows that a step has not looked up do not change, so they would not decay",
    ),
    "amsgrad": (lambda value: value is False, "must be False: there is no form of amsgrad for rows"),
}


def range_problems(key: str, named: Named, registry: Registry) -> list[str]:
    """One line for each option whose value cannot be right."""
    options = named.options
    if registry is OPTIMIZERS:
        problems = []
        for option in ("params", "named_parameters"):
            if option in options:
                problems.append(f"{key}.{option}: the parameters are those of the model; leave it out")
        if named.type in ("AdamW", "Adam", "Adagrad", "SGD"):
            problems += _optimizer_problems(key, options, _OPTIMIZER)
        return problems
    if registry is TABLE_OPTIMIZERS:
        return _optimizer_problems(key, options, _TABLE_OPTIMIZER)
    if registry is DATASETS and "num_workers" in options:
        workers = options["num_workers"]
        if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
            return [f"{key}.num_workers: must be a whole number of at least 0, got {brief(workers)}"]
    if registry is DATASETS and not isinstance(options.get("read_ahead", True), bool):
        return [f"{key}.read_ahead: must be True or False, got {brief(options['read_ahead'])}"]
    if registry is LR_SCHEDULES and callable(named.type):
        return _schedule_problems(key, named)
    return []


def _optimizer_problems(
    key: str, options: dict[str, Any], ranges: dict[str, tuple[Callable[[Any], bool], str]]
) -> list[str]:
    problems = [
        f"{key}.{option}: {words}, got {brief(options[option])}"
        for option, (right, words) in ranges.items()
        if option in options and not right(options[option])
    ]
    plain = not options.get("momentum") or options.get("dampening")
    if options.get("nesterov") is True and plain and not problems:
        problems.append(f"{key}.nesterov: needs a momentum above 0 and no dampening")
    return problems


def _schedule_problems(key: str, named: Named) -> list[str]:
    """A schedule of the user's own takes the progress (0 to 1) and ``min_ratio``, and gives the part of the peak."""
    try:
        signature = inspect.signature(named.type)
    except (TypeError, ValueError):
        return []
    try:
        signature.bind(0.0, 0.0, **named.options)
    except TypeError as error:
        return [
            f"{key}.type: is called as f(progress, min_ratio, **options), with progress from 0 to 1, and returns the "
            f"learning rate as a part of optimizer.lr; {getattr(named.type, '__name__', 'it')}{signature}: {error}"
        ]
    for progress in (0.0, 0.5, 1.0):
        try:
            part = named.type(progress, getattr(named, "min_ratio", 0.0), **named.options)
        except Exception as error:
            return [f"{key}.type: at progress {progress:g} it raises {type(error).__name__}: {error}"]
        try:
            is_right = _at_least_0(float(part))
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            return [
                f"{key}.type: at progress {progress:g} it returns {brief(part)}; it must return the learning rate as a "
                f"part of optimizer.lr, a number of at least 0"
            ]
    return []


def pairs_problems(config: Config, options: object) -> list[str]:
    """One line where words data gives other buckets of pairs than the model has rows for."""
    rows, data = getattr(options, "pairs", None), config.data
    if rows is None or not isinstance(data, Named) or data.type != "PythonStdlibWords":
        return []
    buckets = data.options.get("pairs", rows)
    if buckets == rows:
        return []
    return [f"data.pairs = {brief(buckets)}, but model.pairs = {rows}: leave data.pairs out, it is the model's then"]


def vocabulary_problems(config: Config, options: object) -> list[str]:
    """One line when the model has fewer embeddings than the data has ids, where both are known."""
    vocabulary, data = getattr(options, "vocab_size", None), config.data
    if not isinstance(data, Named) or not is_text(data.type) or vocabulary is None or vocabulary >= 256:
        return []
    if data.options.get("tokenizer") not in (None, "bytes"):
        return []  # which ids it gives is known when it has encoded the data, also before the launch
    return [
        f"model.vocab_size = {vocabulary}: data.type = {data.type!r} is bytes, with ids up to 255; "
        f"set model.vocab_size to 256 or more"
    ]
