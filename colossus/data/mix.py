"""A weighted mixture of datasets: the sample at each position is a pure function of seed and position.

Positions are dealt out in blocks of 10,000. In each block every source has the same number of places, its weight, and
the seed decides which. So the number of samples that a source has given before any position is known without a state,
and with it the next one: each source is read through in epochs of its own, in the order of `permute`.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from colossus.data.documents.row_source import fingerprint_of
from colossus.data.make_loaders import parse_data
from colossus.data.sampler import IndexArray, permute
from colossus.data.tokenizer import DatasetTokenizer, require_same_tokens, tokenizer_of
from colossus.data.tokens import BatchedDataset, TooLittleData
from colossus.random import derive_seeds, hash_key

#: positions in a block: weights are exact to 1/10,000
BLOCK = 10_000


class Mix(BatchedDataset):
    """Samples of several datasets by weight in training; in validation all of each, evenly interleaved.

    Args:
        sources: name -> a dataset that reads batches (`BatchedDataset`), or ``dict(type=.., **options)`` of one.
        weights: name -> share of the samples; they need not add up to 1.
        changes: number of a sample -> the weights from it on. The first sample of a step is the step
            times ``train.global_batch_size``, if the batch was always the same.
        seq_len, vocab_size, tokenizer, seed: for the sources that have these arguments.
        split: ``"train"`` or ``"validation"``.

    Attributes:
        fingerprint: hash of the sources and of seeds of their own, without the weights.

    Raises:
        ValueError: for names or weights that do not fit.
        TooLittleData: if a source has no validation data of its own.
    """

    def __init__(
        self,
        sources: Mapping[str, Any],
        weights: Mapping[str, float],
        changes: Mapping[int, Mapping[str, float]] | None = None,
        seq_len: int | None = None,
        split: str = "train",
        vocab_size: int | None = None,
        tokenizer: str | os.PathLike[str] | None = None,
        seed: int = 0,
    ) -> None:
        if not isinstance(sources, Mapping) or not sources:
            raise ValueError(
                f"Mix: sources = {sources!r}: a dict, name -> a dataset, or dict(type=.., **options) of one"
            )
        defaults = dict(seq_len=seq_len, vocab_size=vocab_size, tokenizer=tokenizer, seed=seed)
        self.sources = {name: _dataset(name, source, split, defaults) for name, source in sources.items()}
        self.name, self.seed = f"Mix ({split})", seed
        self._lengths = np.array([len(source) for source in self.sources.values()])
        self._firsts = np.cumsum(self._lengths) - self._lengths
        #: validation: the place of each sample among those of all sources, so that a beginning has its share of each
        self._interleaved: np.ndarray | None = None
        if split == "validation":
            shares = np.concatenate([(np.arange(count) + 0.5) / count for count in self._lengths])
            self._interleaved = np.argsort(shares, kind="stable")
        starts = {0: weights, **_starts(changes or {})}
        #: first position of each part with its own weights, and places of a block for each source
        self._starts = np.array([*starts])
        self._counts = [_places(own, self.sources, start) for start, own in starts.items()]
        #: samples that the sources have given before each part
        self._before = [np.zeros(len(self.sources), np.int64)]
        for part, (start, stop) in enumerate(itertools.pairwise(self._starts.tolist())):
            self._before.append(self._taken_in(part, stop - start))
        prints = {name: getattr(source, "fingerprint", "") for name, source in self.sources.items()}
        for name, source in self.sources.items():  # a seed of its own packs other documents into a row
            own = getattr(source, "seed", seed)
            prints[name] += "" if own == seed else f" seed {own}"
        self.fingerprint = fingerprint_of("Mix", *(f"{name}={text}" for name, text in prints.items()))
        sizes = (getattr(source, "vocab_size", None) for source in self.sources.values())
        self.vocab_size = max((size for size in sizes if size is not None), default=None)
        self.tokenizer: DatasetTokenizer | None = None
        for name, source in self.sources.items():
            require_same_tokens(self.tokenizer, own := tokenizer_of(source), f"data.sources.{name}")
            self.tokenizer = self.tokenizer or own

    def __len__(self) -> int:
        return int(self._lengths.sum())

    @property
    def lengths(self) -> np.ndarray:
        """The tokens of each sample, [samples], if all sources say those of theirs."""
        lengths = np.concatenate([source.lengths for source in self.sources.values()])
        return lengths if self._interleaved is None else lengths[self._interleaved]

    def samples_at(self, places: IndexArray) -> IndexArray:
        """Return the samples at positions of the endless sequence, any shape; those of the first source come first."""
        flat = places.reshape(-1)
        samples = np.empty_like(flat)
        parts = np.searchsorted(self._starts, flat, side="right") - 1
        blocks = (flat - self._starts[parts]) // BLOCK
        for part, block in np.unique(np.stack((parts, blocks)), axis=1).T.tolist():
            here = (parts == part) & (blocks == block)
            source_of, ordinals = _block(self.seed, int(self._starts[part]), block, self._counts[part])
            within = flat[here] - self._starts[part] - block * BLOCK
            sources = source_of[within]
            counts = np.array(self._counts[part])
            numbers = self._before[part][sources] + counts[sources] * block + ordinals[within]
            samples[here] = self._read_by(sources, numbers)
        return samples.reshape(places.shape)

    def _read_by(self, sources: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Return the samples with these numbers in the endless sequences of their sources."""
        epochs, positions = np.divmod(numbers, self._lengths[sources])
        samples = np.empty_like(numbers)
        for source, name in enumerate(self.sources):
            own_seed = derive_seeds(self.seed, (3, hash_key(name)))[0]
            for epoch in np.unique(epochs[sources == source]).tolist():
                here = (sources == source) & (epochs == epoch)
                count = int(self._lengths[source])
                samples[here] = self._firsts[source] + permute(positions[here], count, own_seed, epoch)
        return samples

    def _taken_in(self, part: int, count: int) -> np.ndarray:
        """Return the samples of each source before the position ``count`` behind the start of a part."""
        block, rest = divmod(count, BLOCK)
        source_of, _ = _block(self.seed, int(self._starts[part]), block, self._counts[part])
        in_block = np.bincount(source_of[:rest], minlength=len(self.sources))
        counts: np.ndarray = self._before[part] + np.array(self._counts[part]) * block + in_block
        return counts

    def taken(self, number: int) -> dict[str, int]:
        """Return the number of samples that each source has given before the sample ``number``."""
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        counts = self._taken_in(part, number - int(self._starts[part]))
        return dict(zip(self.sources, counts.tolist(), strict=True))

    def epochs(self, number: int) -> dict[str, float]:
        """Return how often each source was read through before the sample ``number``."""
        return {name: count / len(self.sources[name]) for name, count in self.taken(number).items()}

    def batch(self, indices: np.ndarray) -> Any:
        """Return samples ``indices`` [b] as tensors whose dim 0 is b."""
        indices = np.asarray(indices)
        if self._interleaved is not None:
            indices = self._interleaved[indices]
        sources = np.searchsorted(self._firsts + self._lengths, indices, side="right")
        places, parts = [], []
        for number, (name, source) in enumerate(self.sources.items()):
            here = np.flatnonzero(sources == number)
            if len(here):
                places.append(here)
                parts.append((name, source.batch(indices[here] - self._firsts[number])))
        order = torch.from_numpy(np.argsort(np.concatenate(places)))
        return _joined([part for _, part in parts], [name for name, _ in parts], order)

    def describe(self) -> str:
        """Return one line for logs."""
        counts = np.array(self._counts[0]) / BLOCK
        shares = (
            f"{name} {share:.2%} of {len(source):,} samples"
            for (name, source), share in zip(self.sources.items(), counts, strict=True)
        )
        num_changes = len(self._starts) - 1
        return f"{self.name}: {', '.join(shares)}" + (f", {num_changes} changes" if num_changes else "")

    def tree(self) -> list[str]:
        """Return the lines of the mixture and of its sources."""
        lines = [self.describe()]
        for name, source in self.sources.items():
            own = source.tree()
            lines += [f"  {name}: {own[0]}", *(f"  {line}" for line in own[1:])]
        return lines


def _dataset(name: str, source: Any, split: str, defaults: Mapping[str, Any]) -> Any:
    spec = parse_data(source)
    if spec.reading_options:
        raise ValueError(f"Mix: {', '.join(spec.reading_options)} of {name!r}: set it in data, for all sources")
    if not spec.takes_split and split == "validation":
        raise TooLittleData(f"Mix: {name!r} takes no split='validation'")
    dataset = spec.build({**defaults, "split": split} if spec.takes_split else defaults)
    if not isinstance(dataset, BatchedDataset):
        raise ValueError(
            f"Mix: {name!r} is a {type(dataset).__name__}, not a dataset that reads batches: make it a subclass of "
            f"colossus.data.BatchedDataset"
        )
    if hasattr(dataset, "samples_at"):
        raise ValueError(f"Mix: {name!r} has an order of its own, as a Mix has: make its sources those of this Mix")
    return dataset


def _starts(changes: Any) -> dict[int, Any]:
    """Return the weights by the number of the first sample, in order."""
    try:
        starts = dict(sorted((int(start), weights) for start, weights in changes.items()))
    except (AttributeError, TypeError, ValueError):
        starts = {0: None}
    if min(starts, default=1) < 1:
        raise ValueError(f"Mix: changes = {changes!r}: a dict, number of a sample, above 0 -> weights from it on")
    return starts


def _places(weights: Mapping[str, float], names: Mapping[str, Any], start: int) -> tuple[int, ...]:
    """Return the places of each source in a block: shares by the largest remainder."""
    key = f"changes[{start}]" if start else "weights"
    values = [weights.get(name) for name in names] if isinstance(weights, Mapping) else [None]
    numbers = [value for value in values if isinstance(value, int | float) and 0 <= value < math.inf]
    if len(numbers) < len(names) or set(weights) != set(names) or not sum(numbers):
        raise ValueError(f"Mix: {key} = {weights!r}: one number from 0 on for each of {', '.join(names)}")
    shares = np.array(numbers) / sum(numbers) * BLOCK
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[: BLOCK - int(counts.sum())]] += 1
    for name, value, count in zip(names, numbers, counts.tolist(), strict=True):
        if value and not count:
            raise ValueError(f"Mix: {key}: {name!r} would have less than one of {BLOCK:,} samples")
    return tuple(counts.tolist())


@functools.lru_cache(maxsize=8)
def _block(seed: int, start: int, block: int, counts: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return the source of each place of a block, and its number among the places of that source, [BLOCK] both."""
    (key,) = derive_seeds(seed, (4, start, block))
    shuffled = permute(np.arange(BLOCK), BLOCK, key, 0)
    source_of = np.searchsorted(np.cumsum(counts), shuffled, side="right")
    ordinals = np.empty(BLOCK, np.int64)
    for source, count in enumerate(counts):
        ordinals[source_of == source] = np.arange(count)
    return source_of, ordinals


def _joined(parts: list[Any], names: list[str], order: torch.Tensor) -> Any:
    """Return batches of the same form one after the other, in this order of their samples."""
    if isinstance(parts[0], dict) and all(isinstance(part, dict) and part.keys() == parts[0].keys() for part in parts):
        return {key: _joined([part[key] for part in parts], names, order) for key in parts[0]}
    if all(isinstance(part, torch.Tensor) for part in parts) and len({part.shape[1:] for part in parts}) == 1:
        return torch.cat(parts)[order]
    raise ValueError(
        f"Mix: samples of {' and '.join(names)} differ in their entries or shapes: use sources of one kind"
    )
