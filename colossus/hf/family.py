"""What a family of Hugging Face's models is: a table of keys of its config and one of its tensors. No torch.

The reader, the writer and all checks read these tables and know no family.
"""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar

from pydantic import BaseModel

from colossus.checkpoint.errors import CheckpointError
from colossus.checkpoint.weight_sources import TOKEN_IDS
from colossus.registry import HF_FAMILIES, MODEL_OPTIONS

Shape = tuple[int, ...]

TABLE, HEAD = "embedding.weight", "head.weight"


@dataclass(frozen=True)
class Key:
    """A key of ``config.json``, and the option of ours that it sets. Keys with one option must agree.

    Attributes:
        ours: with the name of its section (``experts.num``).
        default: of transformers, where the key is missing or null; None leaves it to our option's default.
        choices: their names -> ours; of those with one meaning the first is written.
    """

    theirs: str
    ours: str
    default: Any = None
    choices: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Part:
    """A parameter of ours: its logical name and full shape."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Row:
    """A tensor of theirs, and the parameters of ours that it is made of. A ``*`` in names is the number of each layer.

    Attributes:
        name: with the prefix of the base model (``transformer.``).
        parts: one behind the other along dim 0.
        transposed: the file has ``[in, out]`` where we have ``[out, in]``.
        index: the file has this one of dim 0 of the one part, without the dim.
        layers: numbers of those that have it; None of all.
        file_shape: where the file has the same numbers in other dims.
        other_names: under which it is looked for, too.
        may_be_missing: a folder without it can be read; the parameter then keeps its initial values, where asked for.
    """

    name: str
    parts: tuple[Part, ...]
    transposed: bool = False
    index: int | None = None
    layers: Sequence[int] | None = None
    file_shape: Shape | None = None
    other_names: tuple[str, ...] = ()
    may_be_missing: bool = False

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == math.prod(self.rows), self

    @property
    def rows(self) -> Shape:
        """The row-major array that the file has, in the dims of our parameters: all parts, one behind the other."""
        if self.index is not None:
            return (1, *self.parts[0].shape[1:])
        stacked = (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])
        return stacked[::-1] if self.transposed else stacked

    @property
    def shape(self) -> Shape:
        """As it is in the file."""
        return self.file_shape or (self.rows if self.index is None else self.rows[1:])

    def located(self) -> Iterator[tuple[Part, int]]:
        """Each part, and its first place in dim 0 of all of them, before it where the file has only an index."""
        first = -(self.index or 0)
        for part in self.parts:
            yield part, first
            first += part.shape[0]

    def of_layer(self, number: int) -> Row:
        name, *others = (each.replace("*", str(number)) for each in (self.name, *self.other_names))
        parts = tuple(Part(part.name.replace("*", str(number)), part.shape) for part in self.parts)
        return replace(self, name=name, parts=parts, other_names=tuple(others))


def row(theirs: str, ours: str | Sequence[str], *shape: int, **more: Any) -> Row:
    """A tensor that is a parameter of ours, or several of one shape; ``more`` are attributes of the `Row`."""
    names = [ours] if isinstance(ours, str) else ours
    return Row(theirs, tuple(Part(name, shape) for name in names), **more)


def module(theirs: str, ours: str | Sequence[str], *shape: int, bias: bool = True, **more: Any) -> list[Row]:
    """Weight and bias of a norm ``[features]``, or of a linear ``[out, in]``, which may be several of ours."""
    names = [ours] if isinstance(ours, str) else ours
    found = [row(f"{theirs}.weight", [f"{name}.weight" for name in names], *shape, **more)]
    if bias:
        more = {**more, "transposed": False}
        found.append(row(f"{theirs}.bias", [f"{name}.bias" for name in names], shape[0], **more))
    return found


class Family(ABC):
    """A model type of Hugging Face.

    Attributes:
        model_type: as ``config.json`` names it.
        architecture: the class of transformers that has what our model has.
        prefix: of the names of the base model within it.
        ours: the types of our models that may be one of these; the first is what a folder becomes.
        keys: of its config.
        required: keys of its config that must have these values, which are their defaults.
        fixed: options that all of its models have with these values.
        derived: options that its config cannot set, so that they follow from others.
        ignored: patterns (`fnmatch`) of tensors that are no parameters of the model, or that it does without.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str]
    ours: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[Key, ...]]
    required: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    derived: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def rows(self, options: Any) -> Sequence[Row]:
        """All tensors of a model with these options, in the order of its modules; an untied head's, too."""

    def to_spec(self, config: Mapping[str, Any], given: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """Our model, ``dict(type="GPT", ...)``, of a ``config.json``; what we cannot do is added to the problems.

        Args:
            given: options of ours that take the place of what the config says.
        """
        for name, wanted in self.required.items():
            if config.get(name) not in (None, wanted):
                problems.append(f"{name} = {config[name]!r}: colossus has {wanted!r} only")
        fields = MODEL_OPTIONS.get(self.ours[0]).model_fields
        spec: dict[str, Any] = {"type": self.ours[0]}
        for name, value in self.fixed.items():
            if name.partition(".")[0] in fields:
                set_option(spec, name, value)
        set_by: dict[str, tuple[str, Any]] = {}
        for key in self.keys:
            value = key.default if config.get(key.theirs) is None else config[key.theirs]
            if key.choices is not None:
                if not isinstance(value, str) or value not in key.choices:
                    problems.append(f"{key.theirs} = {value!r}: known are {', '.join(map(repr, key.choices))}")
                    continue
                value = key.choices[value]
            first, other = set_by.setdefault(key.ours, (key.theirs, value))
            if other != value and key.ours not in given:
                both = f"{first} = {other!r}, {key.theirs} = {value!r}"
                problems.append(f"{both}: colossus has one value for them, {key.ours}: give it")
            if value is not None:
                set_option(spec, key.ours, value)
        return spec

    def to_config(self, options: Any) -> dict[str, Any]:
        """What ``config.json`` says of a model of ours that has no differences: the inverse of `to_spec`."""
        config = dict(self.required)
        for key in self.keys:
            value = attrgetter(key.ours)(options)
            choices = (key.choices or {}).items()
            config[key.theirs] = next((theirs for theirs, ours in choices if ours == value), value)
        return config

    def differences(self, options: Any) -> list[str]:
        """What keeps a model of ours from being one of these: each as ``norm = 'rmsnorm' (not 'layernorm')``."""
        stated = {name: value for name, value in options.model_dump().items() if name not in self.derived}
        follow = type(options)(**stated)
        allowed = {name: [value] for name, value in self.fixed.items()}
        allowed |= {name: [getattr(follow, name)] for name in self.derived}
        allowed |= {key.ours: list(dict.fromkeys(key.choices.values())) for key in self.keys if key.choices}
        fields = type(options).model_fields
        sections = {name.partition(".")[0] for name in allowed if "." in name}
        missing = {name for name in sections if getattr(options, name, None) is None}
        compared = {
            name: (attrgetter(name)(options), values)
            for name, values in allowed.items()
            if name.partition(".")[0] in fields.keys() - missing
        }
        return [f"{name} = None" for name in sorted(missing)] + [
            f"{name} = {'{..}' if isinstance(value, BaseModel) else repr(value)} (not {' or '.join(map(repr, values))})"
            for name, (value, values) in compared.items()
            if value not in values
        ]

    def beside(self, options: Any, assets: Mapping[str, Any]) -> dict[str, Any]:
        """What ``config.json`` says that is none of the model's, of the sections of `Assets.config`."""
        return dict(assets.get(TOKEN_IDS, {}))

    def aliases(self, options: Any) -> dict[str, str]:
        """Names of ours -> the name under which a tied parameter is."""
        return {HEAD: TABLE} if getattr(options, "tie_embeddings", False) else {}

    def tensors(self, options: Any) -> list[Row]:
        """The rows of all layers, without a tied head, which older versions may have saved in the table's place."""
        found: list[Row] = []
        for in_layers, rows in itertools.groupby(self.rows(options), lambda each: "*" in each.name):
            some = list(rows)
            layers = range(options.num_layers) if in_layers else ()
            found += [each.of_layer(n) for n in layers for each in some if each.layers is None or n in each.layers]
            found += [] if in_layers else some
        if not self.aliases(options):
            return found
        (head,) = (each for each in found if each.parts[0].name == HEAD)
        return [
            replace(each, other_names=(head.name,)) if each.parts[0].name == TABLE else each
            for each in found
            if each is not head
        ]


def set_option(spec: dict[str, Any], name: str, value: Any) -> None:
    """In a spec of ours, which has sections as dicts."""
    *sections, last = name.split(".")
    for section in sections:
        spec = spec.setdefault(section, {})
    spec[last] = value


def family_of(kind: str, options: Any) -> Family:
    """The family of Hugging Face that a model of ours is one of.

    Args:
        kind: the registered name of its type.

    Raises:
        CheckpointError: it is none; which options differ.
    """
    refused = []
    for name in HF_FAMILIES.names():
        family: Family = HF_FAMILIES.get(name)()
        if kind in family.ours:
            differences = family.differences(options)
            if not differences:
                return family
            refused.append(f"no {family.model_type}, since {', '.join(differences)}")
    if not refused:
        refused = [f"a {kind}; those that can be are {', '.join(MODEL_OPTIONS.names())}"]
    raise CheckpointError(f"the model cannot be written for Hugging Face: it is {'; '.join(refused)}")
