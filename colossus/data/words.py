"""The words of Python's standard library: real text with a large vocabulary on every machine."""

from __future__ import annotations

import hashlib
import platform
import re
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from colossus.data.text import STDLIB_FRACTION, stdlib_files, texts_of_split
from colossus.data.tokenizer import Ids, cached_ids
from colossus.data.tokens import SPLITS, TokenWindows, check_split

#: an identifier, a number, the end of some lines, or a sign
_WORD = re.compile(r"[^\W\d]\w*|\d[\w.]*|\n+|[^\w\s]")
#: version of the cached files; those of another version are not read
_VERSION = 1
#: the id of a word that is not in the vocabulary
UNKNOWN = 0


class PythonStdlibWords(TokenWindows):
    """The source of the running Python's standard library (see `PythonStdlib`) word by word.

    A word is an identifier, a number, the end of a line (with empty lines after it) or a sign. Ids of words are from 1
    on, by falling frequency in the training split; equally frequent words are in alphabetical order. 0 is any other
    word. Ids depend on the text alone, which differs between Python versions. They are computed once for a machine
    (`cached_ids`).

    Sample: ``inputs`` and ``labels`` as in `TokenWindows`. With ``pairs`` the inputs are dict(ids=.., pairs=..), both
    [seq_len]; the second has a bucket, 0..pairs - 1, of the hash of each word and the one before it.

    Args:
        seq_len: words of a sample.
        split: ``"train"`` or ``"validation"``; about 5 % of the files are held out.
        vocab_size: number of ids, 0 included: less frequent words become 0. None: one for each word. A larger number
            adds ids that do not occur.
        pairs: number of buckets of pairs of consecutive words; 0: no such inputs.
        max_bytes: bytes of text of both splits together; None: all.

    Attributes:
        num_words: number of different words in the training split.

    Raises:
        ValueError: if this Python has no readable sources, ``vocab_size`` is below 2, or ``pairs`` is negative.
        TooLittleData: if ``max_bytes`` is too small for a sample.
    """

    def __init__(
        self,
        seq_len: int,
        split: str = "train",
        vocab_size: int | None = None,
        pairs: int = 0,
        max_bytes: int | None = None,
    ) -> None:
        name = "PythonStdlibWords"
        check_split(split, STDLIB_FRACTION, name)
        if vocab_size is not None and vocab_size < 2:
            raise ValueError(f"{name}: vocab_size = {vocab_size} has no word beside the unknown one: use 2 or more")
        if pairs < 0:
            raise ValueError(f"{name}: pairs = {pairs} is negative: use a number of buckets, or 0 for none")
        encoded, digest = _encoded(max_bytes)
        self.num_words = int(encoded["train"].max(initial=0))
        ids = encoded[split]
        if vocab_size is not None and vocab_size <= self.num_words:
            ids = np.where(ids < vocab_size, ids, UNKNOWN)
        super().__init__(ids, seq_len, name=f"{name} ({split})", vocab_size=vocab_size or self.num_words + 1)
        self.pairs = pairs
        self._pair_ids = pair_buckets(ids, pairs) if pairs else None
        self._share_unknown, self._sha256 = float(np.mean(ids == UNKNOWN)), digest

    def batch(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        """Return ``inputs`` and ``labels`` of samples ``indices`` [b]: int64 [b, seq_len]; ``pairs`` adds an input."""
        rows = super().batch(indices)
        if self._pair_ids is None:
            return rows
        places = np.asarray(indices)[:, None] * self.seq_len + np.arange(self.seq_len)
        pairs = torch.from_numpy(self._pair_ids[places].astype(np.int64))
        return {"inputs": {"ids": rows["inputs"], "pairs": pairs}, "labels": rows["labels"]}  # type: ignore[dict-item]

    def describe(self) -> str:
        pairs = f", {self.pairs:,} buckets of pairs" if self.pairs else ""
        return (
            f"{super().describe()}, vocabulary {self.vocab_size:,} (the text has {self.num_words:,} words; unknown "
            f"here {self._share_unknown:.1%}){pairs}, sha256 {self._sha256[:12]}, Python {platform.python_version()}"
        )


def words_of(text: str) -> list[str]:
    """Return the words of a text, in order, without what separates them."""
    return _WORD.findall(text)


def pair_buckets(ids: np.ndarray, num_buckets: int) -> np.ndarray:
    """Return the bucket of each word and the one before it, [t] int32, from ids [t]; 0 comes before the first word."""
    own = ids.astype(np.uint64)
    before = np.concatenate((np.array([UNKNOWN], np.uint64), own[:-1]))
    mixed = before * np.uint64(0x9E3779B97F4A7C15) + own * np.uint64(0xC2B2AE3D27D4EB4F)
    mixed = (mixed ^ (mixed >> np.uint64(31))) * np.uint64(0xBF58476D1CE4E5B9)
    return ((mixed ^ (mixed >> np.uint64(29))) % np.uint64(num_buckets)).astype(np.int32)


@lru_cache(maxsize=1)
def _encoded(max_bytes: int | None) -> tuple[dict[str, Ids], str]:
    """Return the ids of both splits, and the digest of their text."""
    files = stdlib_files(1 << 62 if max_bytes is None else max_bytes, "PythonStdlibWords")
    texts = {split: texts_of_split(files, STDLIB_FRACTION, split)[1] for split in SPLITS}
    digest = hashlib.sha256()
    for split in SPLITS:
        for text in texts[split]:
            digest.update(hashlib.sha256(text).digest())
        digest.update(split.encode())
    key = hashlib.sha256(f"words {_VERSION} {digest.hexdigest()}".encode()).hexdigest()
    # the ids of both splits one after the other, and before them the position of the second
    ids = cached_ids(key, lambda: _encode(texts["train"], texts["validation"]))
    begin = int(ids[0])
    return {"train": ids[1:begin], "validation": ids[begin:]}, digest.hexdigest()


def _encode(train: Sequence[bytes], validation: Sequence[bytes]) -> Ids:
    words = {split: [words_of(text.decode("utf-8", "replace")) for text in texts]
             for split, texts in (("train", train), ("validation", validation))}  # fmt: skip
    counts: Counter[str] = Counter()
    for text in words["train"]:
        counts.update(text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    id_of = {word: number for number, word in enumerate(ranked, start=1)}
    ids = {split: [id_of.get(word, UNKNOWN) for text in texts for word in text] for split, texts in words.items()}
    begin = 1 + len(ids["train"])
    return np.array([begin, *ids["train"], *ids["validation"]], np.uint32)
