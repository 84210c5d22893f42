"""Variants of one config, each with a label; the problems of all are raised together.

No torch until a model is built.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.launch.checks import check_data, check_devices, check_model

T = TypeVar("T")


def unique_texts(texts: Iterable[str]) -> list[str]:
    """Return texts of the command line without repeats, with single spaces."""
    return [*dict.fromkeys(" ".join(text.split()) for text in texts)]


def make_all(labels: Collection[str], make: Callable[[str], T]) -> list[T]:
    """Return the results of ``make`` for all labels.

    Raises:
        ConfigError: with all problems of any label; a problem of all labels is listed once.
    """
    results: list[T] = []
    problems: dict[str, ConfigError] = {}
    for label in labels:
        try:
            results.append(make(label))
        except ConfigError as error:
            problems[label] = error
    if not problems:
        return results
    errors = list(problems.values())
    if len(errors) == len(labels) and all(error.problems == errors[0].problems for error in errors):
        raise errors[0]
    lines = [f"{label}: {problem}" for label, error in problems.items() for problem in error.problems]
    raise ConfigError(lines, errors[0].source)


def check_plan(config: Config) -> None:
    """Check a config as a launch does before its processes start: devices, model, data.

    Raises:
        ConfigError: with the problems.
    """
    check_devices(config, world_size(config.parallel))
    check_model(config)
    check_data(config)
