"""Variants of one config, each with a label: what is wrong with any of them is told before the first begins. No torch
until a model is built."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

from colossus.config import Config, ConfigError
from colossus.config.plans import world_size
from colossus.launch.checks import check_data, check_devices, check_model

T = TypeVar("T")


def each_of(texts: Iterable[str]) -> list[str]:
    """Texts of the command line, each once, with single spaces."""
    return [*dict.fromkeys(" ".join(text.split()) for text in texts)]


def of_each(labels: Collection[str], make: Callable[[str], T]) -> list[T]:
    """``make`` of each label.

    Raises:
        ConfigError: with all that it raises for any of them; what is wrong with all is said once.
    """
    made: list[T] = []
    problems: dict[str, ConfigError] = {}
    for label in labels:
        try:
            made.append(make(label))
        except ConfigError as error:
            problems[label] = error
    if not problems:
        return made
    errors = list(problems.values())
    if len(errors) == len(labels) and all(error.problems == errors[0].problems for error in errors):
        raise errors[0]
    lines = [f"{label}: {problem}" for label, error in problems.items() for problem in error.problems]
    raise ConfigError(lines, errors[0].source)


def check_plan(config: Config) -> None:
    """What a launch checks of a config before its processes start: devices, model, data.

    Raises:
        ConfigError: with what is wrong.
    """
    check_devices(config, world_size(config.parallel))
    check_model(config)
    check_data(config)
