"""Options of the datasets that a config can name. No torch.

The datasets themselves check what depends on files. They get ``seq_len``, ``vocab_size``, ``pairs`` and the seed of the
model and the run, unless the config sets them here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from colossus.config.errors import brief
from colossus.config.section import Count, CountOrZero, Section


def _path(value: Any) -> Any:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"must be a path, got {brief(value)}")
    return value


Path = Annotated[Any, AfterValidator(_path)]


class DatasetOptions(Section):
    """Base of the options of datasets."""

    #: "train" or "validation"; None: both, each for its part of the run
    split: Literal["train", "validation"] | None = None


class DigitsOptions(DatasetOptions):
    pass


class RowsOptions(DatasetOptions):
    """Options of datasets whose samples are rows of tokens."""

    #: tokens of a sample; None: those of the model
    seq_len: Count | None = None


class TextOptions(RowsOptions):
    #: path of a tokenizer.json, or of a folder with it, "bytes"; None: that of the model, else bytes
    tokenizer: Any = None


class PythonStdlibOptions(TextOptions):
    #: bytes of Python's standard library that are read
    max_bytes: Count = 8_000_000


class TextFolderOptions(TextOptions):
    #: the folder
    path: Path
    #: pattern of its files
    pattern: str = "**/*.txt"
    #: fraction of the tokens that is held out
    validation_fraction: float = 0.05


class TokenFileOptions(TextOptions):
    #: a file of token ids, .npy or raw
    path: Path
    #: type of the ids in a raw file; None: by its size and the vocabulary
    dtype: str | None = None
    #: fraction of the tokens that is held out
    validation_fraction: float = 0.05
    #: size of the vocabulary; None: that of the model
    vocab_size: Count | None = None


class PythonStdlibWordsOptions(RowsOptions):
    #: number of words; None: that of the model
    vocab_size: Count | None = None
    #: rows of a second table, of hashed pairs of words; None: those of the model
    pairs: CountOrZero | None = None
    #: bytes of Python's standard library that are read; None: all
    max_bytes: Count | None = None


class PackedOptions(TextOptions):
    #: dict(type=.., **options) of a source of documents, or a source
    source: Any
    #: "best_fit", or another way to put documents into rows
    strategy: str = "best_fit"
    #: documents of more tokens than a row: "cut", "error" or left out; None: by the source
    long: str | None = None
    #: fraction of the documents that is held out
    validation_fraction: float = 0.05
    #: size of the vocabulary; None: that of the model
    vocab_size: Count | None = None
    #: seed of the order of rows; by default that of the run
    seed: CountOrZero | None = None


class MixOptions(TextOptions):
    #: name -> a dataset, or dict(type=.., **options) of one
    sources: Mapping[str, Any]
    #: name -> its share of the samples
    weights: Mapping[str, Any]
    #: sample -> the weights from there on
    changes: Mapping[Any, Mapping[str, Any]] | None = None
    #: size of the vocabulary; None: that of the model
    vocab_size: Count | None = None
    #: seed of the mixture; by default that of the run
    seed: CountOrZero | None = None
