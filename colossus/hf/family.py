"""A family of Hugging Face's models: a table of keys of its config and a table of its tensors. No torch.

The reader, the writer and all checks read these tables; none of them has code for one family.
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
from colossus.layout.layout import Box
from colossus.registry import HF_FAMILIES, MODELS

Shape = tuple[int, ...]

#: options that say nothing about a trained model; all others that a family does not name must have their defaults
_OF_TRAINING = frozenset((
    "dropout", "attention_dropout", "activation_checkpoint", "label_smoothing", "z_loss", "sparse_embeddings",
    "loss_chunk", "objective", "lora", "reference",
))  # fmt: skip
TABLE, HEAD = "embedding.weight", "head.weight"
#: families whose differing options an error lists
_NEAREST = 3


@dataclass(frozen=True)
class Key:
    """A key of ``config.json`` and the option of ours that it sets. Keys that set one option must agree.

    Attributes:
        theirs: the key's name in ``config.json``.
        ours: our option, with the name of its section (``experts.num``).
        default: transformers' value where the key is missing or null; None leaves our option's default.
        choices: their names -> ours; of several names with one meaning the first is written.
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
    """A tensor of theirs and the parameters of ours that it consists of. ``*`` in names stands for a layer's number.

    Attributes:
        name: the tensor's name with the prefix of the base model (``transformer.``).
        parts: our parameters, concatenated along dim 0.
        transposed: the file has ``[.., in, out]`` where we have ``[.., out, in]``.
        interleaved: entries of the parts alternate along the file's last dim (gpt-oss), in place of a concatenation.
        index: the file's tensor is entry ``index`` of dim 0 of the only part, without that dim.
        layers: numbers of the layers that have the tensor; None: all layers.
        file_shape: the shape in the file, where it has the same numbers in other dims.
        other_names: further names under which the tensor is looked for.
        may_be_missing: a folder without it can be read; the parameter then keeps its initial values, if the caller asks
            for that.
    """

    name: str
    parts: tuple[Part, ...]
    transposed: bool = False
    interleaved: bool = False
    index: int | None = None
    layers: Sequence[int] | None = None
    file_shape: Shape | None = None
    other_names: tuple[str, ...] = ()
    may_be_missing: bool = False

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == math.prod(self.rows), self

    @property
    def rows(self) -> Shape:
        """The shape of the file's row-major array in the dims of our parameters, all parts concatenated along dim 0.

        Interleaved parts have a last dim of their own.
        """
        if self.index is not None:
            return (1, *self.parts[0].shape[1:])
        length = self.parts[0].shape[0] if self.interleaved else sum(part.shape[0] for part in self.parts)
        rows = (length, *self.parts[0].shape[1:])
        if self.transposed:
            rows = (*rows[:-2], rows[-1], rows[-2])
        return (*rows, len(self.parts)) if self.interleaved else rows

    @property
    def shape(self) -> Shape:
        """The shape of the tensor in the file."""
        return self.file_shape or (self.rows if self.index is None else self.rows[1:])

    def located(self) -> Iterator[tuple[Part, int]]:
        """Yield each part and its offset along dim 0 of the file's array, negative for a tensor with an ``index``."""
        first = -(self.index or 0)
        for part in self.parts:
            yield part, first
            first += 0 if self.interleaved else part.shape[0]

    def in_file(self, box: Box, part: Part) -> Box:
        """Return the box of the file's array that has a box of a part, (start, stop) of every dim."""
        if self.transposed:
            box = (*box[:-2], box[-1], box[-2])
        number = self.parts.index(part)
        return (*box, (number, number + 1)) if self.interleaved else box

    def of_part(self, array: Any, part: Part) -> Any:
        """Return a view of the file's array (a tensor of the shape `rows`) in the dims of a part."""
        array = array[..., self.parts.index(part)] if self.interleaved else array
        return array.mT if self.transposed else array

    def of_layer(self, number: int) -> Row:
        name, *others = (pattern.replace("*", str(number)) for pattern in (self.name, *self.other_names))
        parts = tuple(Part(part.name.replace("*", str(number)), part.shape) for part in self.parts)
        return replace(self, name=name, parts=parts, other_names=tuple(others))


def row(theirs: str, ours: str | Sequence[str], *shape: int, **more: Any) -> Row:
    """Return the row of a tensor that is one parameter of ours, or several of one shape.

    Args:
        more: further attributes of the `Row`.
    """
    names = [ours] if isinstance(ours, str) else ours
    return Row(theirs, tuple(Part(name, shape) for name in names), **more)


def module(theirs: str, ours: str | Sequence[str], *shape: int, bias: bool = True, **more: Any) -> list[Row]:
    """Return the rows of weight and bias of a norm ``[features]`` or a linear ``[out, in]``.

    Args:
        ours: our module, or several of ours whose tensors the file has as one.
        more: further attributes of the weight's `Row`.
    """
    names = [ours] if isinstance(ours, str) else ours
    rows = [row(f"{theirs}.weight", [f"{name}.weight" for name in names], *shape, **more)]
    if bias:
        more = {**more, "transposed": False}
        rows.append(row(f"{theirs}.bias", [f"{name}.bias" for name in names], shape[0], **more))
    return rows


class Family(ABC):
    """A model type of Hugging Face.

    Attributes:
        model_type: the name of the type in ``config.json``.
        architecture: the class of transformers that computes what our model computes.
        prefix: the prefix of the base model's parameter names within it.
        ours: the types of our models that can be written as this family; a folder is read as the first.
        keys: the keys of its config that set options of ours.
        required: keys of its config that must have these values, which are their defaults.
        fixed: options that have these values in all of its models.
        derived: options that its config cannot set, because they follow from others.
        written: options beside those of ``keys`` that `to_spec` and `to_config` read and write.
        ignored: patterns (`fnmatch`) of tensors that are no parameters of our model.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str]
    ours: ClassVar[tuple[str, ...]]
    keys: ClassVar[tuple[Key, ...]]
    required: ClassVar[Mapping[str, Any]] = {}
    fixed: ClassVar[Mapping[str, Any]] = {}
    derived: ClassVar[tuple[str, ...]] = ()
    written: ClassVar[tuple[str, ...]] = ()
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def rows(self, options: Any) -> Sequence[Row]:
        """Return all tensors of a model with these options, in the order of its modules, with an untied head's."""

    def to_spec(self, config: Mapping[str, Any], overrides: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
        """Return our model, ``dict(type="GPT", ...)``, for a ``config.json``.

        Args:
            overrides: options of ours that take the place of the config's.
            problems: a list to which the method adds each key and value that colossus has no model for.
        """
        for name, wanted in self.required.items():
            if config.get(name) not in (None, wanted):
                problems.append(f"{name} = {config[name]!r}: colossus has {wanted!r} only")
        fields = MODELS.options(self.ours[0]).model_fields
        spec: dict[str, Any] = {"type": self.ours[0]}
        for name, value in self.fixed.items():
            if name.partition(".")[0] in fields:
                set_option(spec, name, value)
        set_by: dict[str, tuple[str, Any]] = {}
        for key in self.keys:
            value = key.default if config.get(key.theirs) is None else config[key.theirs]
            if key.choices is not None:
                if not isinstance(value, str) or value not in key.choices:
                    problems.append(f"{key.theirs} = {value!r}: it must be one of {', '.join(map(repr, key.choices))}")
                    continue
                value = key.choices[value]
            first, other = set_by.setdefault(key.ours, (key.theirs, value))
            if other != value and key.ours not in overrides:
                both = f"{first} = {other!r}, {key.theirs} = {value!r}"
                problems.append(f"{both}: colossus has one option for both: set {key.ours}")
            if value is not None:
                set_option(spec, key.ours, value)
        return spec

    def to_config(self, options: Any) -> dict[str, Any]:
        """Return the ``config.json`` of a model of ours that has no differences: the inverse of `to_spec`."""
        config = dict(self.required)
        for key in self.keys:
            value = attrgetter(key.ours)(options)
            choices = (key.choices or {}).items()
            config[key.theirs] = next((theirs for theirs, ours in choices if ours == value), value)
        return config

    def differences(self, options: Any) -> list[str]:
        """Return the options that keep our model from being of this family: ``norm = 'rmsnorm' (not 'layernorm')``."""
        stated = {name: value for name, value in options.model_dump().items() if name not in self.derived}
        follow = type(options)(**stated)
        allowed = {name: [value] for name, value in self.fixed.items()}
        allowed |= {name: [getattr(follow, name)] for name in self.derived}
        allowed |= {key.ours: list(dict.fromkeys(key.choices.values())) for key in self.keys if key.choices}
        fields = type(options).model_fields
        named = {name.partition(".")[0] for name in (*allowed, *self.written, *(key.ours for key in self.keys))}
        allowed |= {
            name: [field.default]
            for name, field in fields.items()
            if name not in named | _OF_TRAINING and field.default_factory is None
        }
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

    def extra_config(self, options: Any, assets: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of ``config.json`` that say nothing about the model, from the sections of `Assets.config`."""
        return dict(assets.get(TOKEN_IDS, {}))

    def aliases(self, options: Any) -> dict[str, str]:
        """Return the names of tied parameters -> the name under which the shared parameter is stored."""
        return {HEAD: TABLE} if getattr(options, "tie_embeddings", False) else {}

    def tensors(self, options: Any) -> list[Row]:
        """Return the rows of all layers, without a tied head.

        Older versions of transformers may have saved a tied head in the table's place.
        """
        tensors: list[Row] = []
        for in_layers, rows in itertools.groupby(self.rows(options), lambda row: "*" in row.name):
            some = list(rows)
            layers = range(options.num_layers) if in_layers else ()
            tensors += [row.of_layer(n) for n in layers for row in some if row.layers is None or n in row.layers]
            tensors += [] if in_layers else some
        if not self.aliases(options):
            return tensors
        (head,) = (row for row in tensors if row.parts[0].name == HEAD)
        return [
            replace(row, other_names=(head.name,)) if row.parts[0].name == TABLE else row
            for row in tensors
            if row is not head
        ]


def set_option(spec: dict[str, Any], name: str, value: Any) -> None:
    """Set an option in a spec of ours, whose sections are dicts."""
    *sections, last = name.split(".")
    for section in sections:
        spec = spec.setdefault(section, {})
    spec[last] = value


def family_of(kind: str, options: Any) -> Family:
    """Return the family of Hugging Face as which a model of ours can be written.

    Args:
        kind: the registered name of the model's type.

    Raises:
        CheckpointError: there is none; the message names the options that differ.
    """
    refused: list[tuple[int, str, str]] = []
    for name in HF_FAMILIES.names():
        family: Family = HF_FAMILIES.get(name)()
        if kind in family.ours:
            differences = family.differences(options)
            if not differences:
                return family
            refused.append((len(differences), family.model_type, ", ".join(differences)))
    if not refused:
        names = ", ".join(sorted({ours for name in HF_FAMILIES.names() for ours in HF_FAMILIES.get(name)().ours}))
        raise CheckpointError(
            f"the model cannot be written for Hugging Face: it is a {kind}; models that can be written are {names}"
        )
    nearest = sorted(refused)[:_NEAREST]
    words = [f"no {name}, since {differences}" for _, name, differences in nearest]
    if others := [name for _, name, _ in sorted(refused)[_NEAREST:]]:
        words.append(f"nor, by more options, {', '.join(sorted(others))}")
    raise CheckpointError(f"the model cannot be written for Hugging Face: it is {'; '.join(words)}")
