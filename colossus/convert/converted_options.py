"""Options of models of plain torch and of transformers' own code in a config. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from colossus.config.section import Section


class ConvertedOptions(Section):
    """Options of `colossus.parallelize`."""

    #: name of a module -> its split
    rules: Mapping[str, str] | None = None
    #: names of the blocks of a pipeline
    blocks: str | Sequence[str] | None = None


class HFOptions(ConvertedOptions):
    """Options of ``dict(type="hf", native=True)``, once its folder is read."""

    #: the content of its ``config.json``
    config: Mapping[str, Any]
    native: bool = True
    #: folder with its tensors; None: the initial values of transformers
    weights: str | None = None
    #: its class; None: the first of the config
    architecture: str | None = None


class TorchOptions(ConvertedOptions):
    #: class or function that makes the model, or its path, "package.module:name"
    factory: str | Callable[..., Any]
    #: its arguments
    kwargs: Mapping[str, Any] | None = None
    #: an input, for a model that is traced
    example: Any = None
