"""``optimizer.groups`` and ``optimizer.layer_decay``: which parameters of a model are trained with which options.

Rules are judged on the whole model, before a pipeline cuts it: the groups are the same ones on all ranks, under every
plan, also where a rank has no parameter of one.
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
from colossus.config.optimizer_section import GroupRule, Optimizer
from colossus.layout.parameter import logical_parameters, spec_of
from colossus.registry import nearest


@dataclass
class ParameterGroups:
    """The groups of an optimizer.

    Attributes:
        options: of each group what is another than the optimizer's, ``lr_scale`` included; the model's first parameter
            is in the first group.
        group_of: full name of a parameter that is trained -> number of its group.
        met: what is shown of the rules: a line for each pattern, and for the layers.
    """

    options: list[dict[str, Any]] = field(default_factory=list)
    group_of: dict[str, int] = field(default_factory=dict)
    met: list[str] = field(default_factory=list)

    def add(self, name: str, options: dict[str, Any]) -> None:
        if options not in self.options:
            self.options.append(options)
        self.group_of[name] = self.options.index(options)

    def set_apart(self, names: Iterable[str], **options: Any) -> None:
        """Move parameters into groups of their own, which have ``options``, too."""
        for name in names:
            self.add(name, {**self.options[self.group_of[name]], **options})

    def of(self, named: Sequence[tuple[str, nn.Parameter]]) -> list[dict[str, Any]]:
        """The groups of a rank as an optimizer of torch takes them, of the parameters that it trains."""
        groups: list[dict[str, Any]] = [{"params": [], **options} for options in self.options]
        for name, param in named:
            groups[self.group_of[name]]["params"].append(param)
        return groups


def make_groups(section: Optimizer, model: nn.Module) -> ParameterGroups | None:
    """The groups of a whole model, on the meta device, whose frozen parameters are frozen; None where the section says
    nothing of groups.

    Raises:
        ConfigError: for a pattern that meets no parameter, one that takes the rows of a fused parameter apart, and a
            model without blocks for ``layer_decay``, or of which all is frozen.
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
            _, of_layer = layers.get(name, ("", 1.0))
            groups.add(name, {**settings, "lr_scale": settings.get("lr_scale", 1.0) * of_layer})
    groups.met = _describe(section, model, names, layers)
    if not groups.group_of:
        raise ConfigError(
            f"optimizer.groups: all {counted(len(names), 'parameter')} are frozen, so nothing would be trained: say "
            f"frozen=False of some in a later rule"
        )
    return groups


def one_group(model: nn.Module) -> ParameterGroups:
    """That of a whole model of which nothing is said."""
    groups = ParameterGroups()
    for name, param in model.named_parameters():
        if param.requires_grad:
            groups.add(name, {})
    return groups


def _meets(patterns: Sequence[str], name: str, part: str) -> bool:
    """Whether one of them matches a parameter, by its name or by that of a logical parameter in it."""
    return any(fnmatchcase(each, pattern) for pattern in patterns for each in (name, part))


def _given(rule: GroupRule) -> dict[str, Any]:
    own = {"lr_scale": rule.lr_scale, "frozen": rule.frozen}
    return {**{key: value for key, value in own.items() if value is not None}, **rule.options}


def _settings(rules: Sequence[GroupRule], name: str, parts: Sequence[str]) -> dict[str, Any]:
    """What all rules that meet a parameter, or each of its logical ones, say of it, the last of each key."""
    settings: dict[str, Any] = {}
    for number, rule in enumerate(rules):
        met = [part for part in parts if _meets(rule.match, name, part)]
        if met and len(met) < len(parts):
            raise ConfigError(
                f"optimizer.groups.{number}.match: meets {', '.join(met)}, but not "
                f"{', '.join(part for part in parts if part not in met)}: these are rows of one parameter, which is in "
                f"one group under every plan. Match {name!r}, or each of its rows"
            )
        if met:
            settings |= _given(rule)
    return settings


# -- layers ---------------------------------------------------------------------------------------------------


def _layers(model: nn.Module, decay: float) -> dict[str, tuple[str, float]]:
    """Full name of each parameter -> its layer, and which part of the learning rate that has: decay^(n - k) block k of
    n (from 0), decay^(n + 1) what is before the blocks, 1 what is behind them, in the order in which the model has its
    parameters.

    As in BEiT (2106.08254) and in timm's ``param_groups_layer_decay``.
    """
    blocks, layers = _blocks(model), dict[str, tuple[str, float]]()
    layer_of = {id(param): number for number, block in enumerate(blocks) for param in block.parameters()}
    names = [name for name, module in model.named_modules() if module in blocks]
    outside = f"before {names[0]}", decay ** (len(blocks) + 1)
    for name, param in model.named_parameters():
        number = layer_of.get(id(param))
        if number is not None:
            outside = f"behind {names[-1]}", 1.0
            layers[name] = names[number], decay ** (len(blocks) - number)
        else:
            layers[name] = outside
    return layers


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules in the largest ModuleList or Sequential of one class, as those of a pipeline are found."""
    lists = [list(module.children()) for module in model.modules() if isinstance(module, nn.ModuleList | nn.Sequential)]
    alike = [blocks for blocks in lists if len(blocks) > 1 and len({type(block) for block in blocks}) == 1]
    if not alike:
        raise ConfigError(
            f"optimizer.layer_decay: {type(model).__name__} has no list of blocks (ModuleList or Sequential of one "
            f"class): give each layer a learning rate by rules, optimizer.groups = [dict(match=.., lr_scale=..)]"
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
    """What each pattern has met, of whole parameters; what each layer has.

    Raises:
        ConfigError: for patterns that have met nothing.
    """
    sizes = {name: spec_of(param).num_elements for name, param in model.named_parameters()}
    rows, problems = list[list[str]](), list[str]()

    def row(what: str, met: Sequence[str], options: Mapping[str, Any]) -> None:
        elements = counted(sum(sizes[name] for name in met), "element")
        given = ", ".join(f"{key} = {value!r}" for key, value in options.items())
        rows.append([what, counted(len(met), "parameter"), elements, given])

    for number, rule in enumerate(section.groups):
        for pattern in rule.match:
            met = [name for name, parts in names.items() if any(_meets([pattern], name, part) for part in parts)]
            if not met:
                problems.append(f"optimizer.groups.{number}.match: {_met_nothing(pattern, names)}")
            row(pattern, met, _given(rule))
    for layer in dict.fromkeys(layers.values()):
        row(layer[0], [name for name in layers if layers[name] == layer], {"lr_scale": round(layer[1], 6)})
    if problems:
        raise ConfigError(problems)
    return aligned(rows, left_columns=(0, 3)).splitlines()


def _met_nothing(pattern: str, names: Mapping[str, Sequence[str]]) -> str:
    every = [each for name, parts in names.items() for each in (name, *parts)]
    pieces = {piece for name in every for piece in (name, *name.split("."), name.rpartition(".")[0])}
    close = nearest(re.sub(r"[*?]+", "", pattern).strip("."), sorted(pieces))
    like = [name for name in names if close is not None and close in name][:3] or list(names)[:3]
    return f"{pattern!r} meets no parameter; names are like {', '.join(like)}"
