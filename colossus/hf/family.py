"""What a family of Hugging Face's models is: its config in our options, its tensors in our parameters. No torch."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from colossus.checkpoint.companions import TOKEN_IDS
from colossus.hf.settings import Settings

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """A parameter of ours: its logical name and full shape."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class HFTensor:
    """A tensor of theirs, and the parameters of ours that it is made of.

    Attributes:
        name: with the prefix of the base model (``transformer.``).
        shape: as it is in the file.
        parts: one behind the other along dim 0.
        transposed: the file has ``[in, out]`` where we have ``[out, in]``.
        other_names: under which it is looked for, too.
        may_be_missing: a folder without it can be read; the parameter then keeps its initial values, where asked for.
    """

    name: str
    shape: Shape
    parts: tuple[Part, ...]
    transposed: bool = False
    other_names: tuple[str, ...] = ()
    may_be_missing: bool = False

    def __post_init__(self) -> None:
        assert math.prod(self.shape) == math.prod(self.stacked), self

    @property
    def stacked(self) -> Shape:
        """The shape of all parts, one behind the other."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def rows(self) -> Shape:
        """The row-major array that the file has, in the dims of our parameters."""
        return self.stacked[::-1] if self.transposed else self.stacked

    def located(self) -> Iterator[tuple[Part, int]]:
        """Each part, and its first place in dim 0 of all of them."""
        first = 0
        for part in self.parts:
            yield part, first
            first += part.shape[0]


class Family(ABC):
    """A model type of Hugging Face.

    Attributes:
        model_type: as ``config.json`` names it.
        architecture: the class of transformers that has what our model has.
        prefix: of the names of the base model within it.
        ours: the types of our models that may be one of these.
        is_language_model: whether its config names ids of tokens.
        ignored: patterns (`fnmatch`) of tensors that are no parameters of the model, or that it does without.
    """

    model_type: ClassVar[str]
    architecture: ClassVar[str]
    prefix: ClassVar[str]
    ours: ClassVar[tuple[str, ...]]
    is_language_model: ClassVar[bool] = True
    ignored: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def to_spec(self, settings: Settings, given: Mapping[str, Any]) -> dict[str, Any]:
        """Our model, ``dict(type="GPT", ...)``; what we cannot do is told to the settings.

        Args:
            given: options of ours that take the place of what the config says.
        """

    @abstractmethod
    def differences(self, options: Any) -> list[str]:
        """What keeps a model of ours from being one of these: each as ``norm = 'rmsnorm'``."""

    @abstractmethod
    def to_config(self, options: Any) -> dict[str, Any]:
        """What ``config.json`` says of a model of ours that has no differences."""

    def beside(self, options: Any, told: Mapping[str, Any]) -> dict[str, Any]:
        """What ``config.json`` says that is none of the model's; see `colossus.checkpoint.companions`."""
        return dict(told.get(TOKEN_IDS, {})) if self.is_language_model else {}

    @abstractmethod
    def tensors(self, options: Any) -> Sequence[HFTensor]:
        """All tensors of the model, in the order of its modules."""

    def aliases(self, options: Any) -> dict[str, str]:
        """Names of ours -> the name under which a tied parameter is."""
        return {}


def unlike(options: Any, **wanted: Any) -> list[str]:
    """The options that differ from what is wanted: ``positions = 'rotary' (not 'learned')``."""
    return [
        f"{key} = {getattr(options, key)!r} (not {value!r})"
        for key, value in wanted.items()
        if getattr(options, key) != value
    ]
