"""The data of a config as text: the tree of its sources, and rows with their documents."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from colossus.checkpoint.manifest import BYTES
from colossus.config import Config, ConfigError
from colossus.config.batch_sizes import BatchSizes
from colossus.data.documents.packed import NO_LABEL
from colossus.data.documents.prepare import preparing_with
from colossus.data.make_loaders import loaders_of
from colossus.data.tokenizer import DatasetTokenizer, load_tokenizer
from colossus.data.tokens import BatchedDataset

_COLOURS = (36, 33, 35, 32, 34, 31)


def prepare(config: Config, processes: int) -> list[str]:
    """Prepare the documents of a config by several processes, and return the tree of its training data."""
    with preparing_with(processes):
        return _dataset(config).tree()


def render_data(config: Config, first: int, count: int, *, in_colour: bool) -> Iterator[str]:
    """Yield the lines of the tree of the training data, and of rows ``first`` to ``first + count - 1``."""
    dataset = _dataset(config)
    yield from dataset.tree()
    if callable(epochs := getattr(dataset, "epochs", None)):
        by_name = epochs(BatchSizes(config.train.global_batch_size, config.train.batch_ramp).before(config.train.steps))
        by_source = ", ".join(f"{count:.2f} of {name}" for name, count in by_name.items())
        yield f"epochs after {config.train.steps:,} steps: {by_source}"
    if not 0 <= first < len(dataset):
        raise ConfigError(f"--from {first}: the training data has the rows 0 to {len(dataset) - 1}")
    for number in range(first, min(first + count, len(dataset))):
        sample = dataset[number]
        inputs = sample["inputs"] if isinstance(sample["inputs"], dict) else {"ids": sample["inputs"]}
        ids, labels = np.asarray(inputs.get("ids", ())), np.asarray(sample["labels"])
        if ids.ndim != 1 or ids.shape != labels.shape:
            raise ConfigError(f"data: rows of tokens are shown, but {type(dataset).__name__} has other samples")
        documents = np.asarray(inputs.get("documents", np.zeros_like(ids)))
        filled = len(ids) - _padding(ids, labels, documents)
        yield (
            f"\nrow {number}: {len(np.unique(documents[:filled])):,} documents, {filled:,} tokens, "
            f"{int((labels != NO_LABEL).sum()):,} labels, {len(ids) - filled:,} of padding"
        )
        tokenizer = getattr(dataset, "tokenizer", None)
        yield _painted(ids[:filled], labels[:filled], documents[:filled], tokenizer, in_colour)


def _dataset(config: Config) -> Any:
    loaders = loaders_of(config, config.data, data_rank=0, data_size=1, device="cpu")
    dataset = getattr(loaders.train.source, "dataset", None)
    loaders.close()
    if not isinstance(dataset, BatchedDataset):
        raise ConfigError("data: rows of tokens are shown; this data has none that are read by number", config.source)
    return dataset


def _padding(ids: np.ndarray, labels: np.ndarray, documents: np.ndarray) -> int:
    """Return the number of tokens at the end that are a document of zeros without labels."""
    is_last = documents == documents[-1]
    return int(is_last.sum()) if (ids[is_last] == 0).all() and (labels[is_last] == NO_LABEL).all() else 0


def _painted(
    ids: np.ndarray, labels: np.ndarray, documents: np.ndarray, tokenizer: DatasetTokenizer | None, in_colour: bool
) -> str:
    """Return the text of a row, cut where documents begin, and where labels begin and end."""
    is_label = np.concatenate(([labels[0] != NO_LABEL], labels[:-1] != NO_LABEL))  # of the token before is this token
    begins = np.concatenate(([True], documents[1:] != documents[:-1]))
    is_label[begins] = np.concatenate((is_label[1:], [False]))[begins]  # a first token is shown as its next
    changes = np.concatenate(([True], is_label[1:] != is_label[:-1])) | begins
    bounds = [*np.flatnonzero(changes).tolist(), len(ids)]
    parts = []
    for start, stop in pairwise(bounds):
        text = _text(ids[start:stop], tokenizer)
        if in_colour:
            colour = _COLOURS[int(documents[start]) % len(_COLOURS)]
            parts.append(f"\033[{'' if is_label[start] else '2;'}{colour}m{text}\033[0m")
        else:
            bar = "|" if begins[start] and start else ""
            parts.append(bar + text if is_label[start] else f"{bar}[{text}]")
    return "".join(parts)


def _text(ids: np.ndarray, tokenizer: DatasetTokenizer | None) -> str:
    if tokenizer is None:
        return " ".join(map(str, ids.tolist())) + " "
    if tokenizer.name == BYTES:
        return ids.astype(np.uint8).tobytes().decode("utf-8", "replace").replace("\0", "\\0")
    text: str = load_tokenizer(tokenizer.content, "data").decode(ids.tolist(), skip_special_tokens=False)
    return text
