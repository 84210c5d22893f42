"""``optimizer.groups`` and ``optimizer.layer_decay``: the options with which each parameter of a model is trained.

Rules apply to the whole model, before a pipeline splits it: the groups are the same on all ranks, under every plan,
also if a rank has no parameter of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from colossus.arithmetic import aligned, counted
from colossus.config import ConfigError
from colossus.config.sections import GroupRule, Optimizer
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.registry import nearest


@dataclass
class ParameterGroups:
    """The groups of an optimizer.

    Attributes:
        options: options of each group that differ from the optimizer's, ``lr_scale`` included; the model's first
            parameter is in the first group.
        group_of: full name of a trained parameter -> number of its group.
        description: a line for each pattern and each layer, for the log.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    description: list[str] = field(default_factory=list)

    def add(self, name: str, options: dict[str, Any]) -> None:
        if options not in self.options:
            self.options.append(options)
        self.group_of[name] = self.options.index(options)

    def set_apart(self, names: Iterable[str], **options: Any) -> None:
        """Move parameters into groups of their own, with ``options`` in addition to those of their group."""
        for name in names:
            self.add(name, {**self.options[self.group_of[name]], **options})

    def for_optimizer(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """Return the groups that a rank passes to an optimizer of torch, with the parameters that it trains."""
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in self.options]
        for name, param in named:
            groups[self.group_of[name]]["params"].append(param)
        return groups


def make_groups(section: Optimizer, model: nn.Module) -> ParameterGroups | None:
    """Return the groups of a whole model, and freeze the parameters that its rules freeze.

    Args:
        section: the section ``optimizer``.
        model: the model before a pipeline splits it, on the meta device.

    Returns:
        The groups; None where the section has neither ``groups`` nor ``layer_decay``.

    Raises:
        ConfigError: if a pattern matches no parameter or only some rows of a fused parameter, a model has no blocks for
            ``layer_decay``, or everything is frozen.
    """
    if not section.has_groups:
        return None
    names: dict[str, list[str]] = {}
    for logical in logical_parameters(model):
        names.setdefault(logical.parameter_name, []).append(logical.name)
    layers = _layers(model, section.layer_decay) if section.layer_decay is not None else {}
    groups = ParameterGroups()
    for name, param in model.named_parameters():
        settings = _settings(section.groups, name, names[name])
        if settings.pop("frozen", False):
            param.requires_grad_(False)
        elif param.requires_grad:
            _, layer_scale = layers.get(name, ("", 1.0))
            groups.add(name, {**settings, "lr_scale": settings.get("lr_scale", 1.0) * layer_scale})
    groups.description = _describe(section, model, names, layers)
    if not groups.group_of:
        raise ConfigError(
            f"optimizer.groups: all {counted(len(names), 'parameter')} are frozen, so nothing would be trained: set "
            f"frozen=False for some in a later rule"
        )
    return groups


def one_group(model: nn.Module) -> ParameterGroups:
    """Return a single group with all trained parameters of a whole model."""
    groups = ParameterGroups()
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.add(name, {})
    return groups


def _matches(patterns: Sequence[str], name: str, part: str) -> bool:
    """Return whether a pattern matches a parameter, by its name or by that of a logical parameter in it."""
    return any(fnmatchcase(title, pattern) for pattern in patterns for title in (name, part))


def _options(rule: GroupRule) -> dict[str, Any]:
    own = {"lr_scale": rule.lr_scale, "frozen": rule.frozen}
    return {**{key: value for key, value in own.items() if value is not None}, **rule.options}


def _settings(rules: Sequence[GroupRule], name: str, parts: Sequence[str]) -> dict[str, Any]:
    """Return the options of all rules that match a parameter, or all its logical ones; a later rule wins."""
    settings: dict[str, Any] = {}
    for number, rule in enumerate(rules):
        matched = [part for part in parts if _matches(rule.match, name, part)]
        if matched and len(matched) < len(parts):
            raise ConfigError(
                f"optimizer.groups.{number}.match: matches {', '.join(matched)}, but not "
                f"{', '.join(part for part in parts if part not in matched)}: these are rows of one parameter, which "
                f"is in one group under every plan. Match {name!r}, or each of its rows"
            )
        if matched:
            settings |= _options(rule)
    return settings


# -- layers ---------------------------------------------------------------------------------------------------


def _layers(model: nn.Module, decay: float) -> dict[str, tuple[str, float]]:
    """Return, by full name of each parameter, its layer and the layer's factor of the learning rate.

    The factor of block k of n (from 0) is decay^(n - k), that of parameters before the blocks decay^(n + 1), that of
    parameters after them 1, in the order of the model's parameters. See BEiT (2106.08254) and timm's
    ``param_groups_layer_decay``.
    """
    blocks, layers = _blocks(model), dict[str, tuple[str, float]]()
    layer_of = {id(param): number for number, block in enumerate(blocks) for param in block.parameters()}
    names = [name for name, module in model.named_modules() if module in blocks]
    outside = f"before {names[0]}", decay ** (len(blocks) + 1)
    for name, param in model.named_parameters():
        number = layer_of.get(id(param))
        if number is not None:
            outside = f"after {names[-1]}", 1.0
            layers[name] = names[number], decay ** (len(blocks) - number)
        else:
            layers[name] = outside
    return layers


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in the largest ModuleList or Sequential of one class, in the same way as a pipeline does."""
    lists = [list(module.children()) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if not alike:
        raise ConfigError(
            f"optimizer.layer_decay: {type(model).__name__} has no list of blocks (ModuleList or Sequential of one "
            f"class): set learning rates of layers by rules, optimizer.groups = [dict(match=.., lr_scale=..)]"
        )

    def num_elements(blocks: list[nn.Module]) -> int:
        return sum(spec_of(param).num_elements for block in blocks for param in block.parameters())

    return max(alike, key=num_elements)


# -- in words -------------------------------------------------------------------------------------------------


def _describe(
    section: Optimizer,
    model: nn.Module,
    names: Mapping[str, Sequence[str]],
    layers: Mapping[str, tuple[str, float]],
) -> list[str]:
    """Return a line for each pattern with the whole parameters that it matches, and a line for each layer.

    Raises:
        ConfigError: for patterns that match nothing.
    """
    sizes = {name: spec_of(param).num_elements for name, param in model.named_parameters()}
    rows, problems = list[list[str]](), list[str]()

    def row(title: str, matched: Sequence[str], options: Mapping[str, Any]) -> None:
        elements = counted(sum(sizes[name] for name in matched), "element")
        settings = ", ".join(f"{key} = {value!r}" for key, value in options.items())
        rows.append([title, counted(len(matched), "parameter"), elements, settings])

    for number, rule in enumerate(section.groups):
        for pattern in rule.match:
            matched = [name for name, parts in names.items() if any(_matches([pattern], name, part) for part in parts)]
            if not matched:
                problems.append(f"optimizer.groups.{number}.match: {_no_match(pattern, names)}")
            row(pattern, matched, _options(rule))
    for layer in dict.fromkeys(layers.values()):
        row(layer[0], [name for name in layers if layers[name] == layer], {"lr_scale": round(layer[1], 6)})
    if problems:
        raise ConfigError(problems)
    return aligned(rows, left_columns=(0, 3)).splitlines()


def _no_match(pattern: str, names: Mapping[str, Sequence[str]]) -> str:
    titles = [title for name, parts in names.items() for title in (name, *parts)]
    pieces = {piece for name in titles for piece in (name, *name.split("."), name.rpartition(".")[0])}
    close = nearest(re.sub(r"[*?]+", "", pattern).strip("."), sorted(pieces))
    like = [name for name in names if close is not None and close in name][:3] or list(names)[:3]
    return f"{pattern!r} matches no parameter; names are like {', '.join(like)}"
