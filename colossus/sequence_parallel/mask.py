"""Masks of attention as functions of positions: an algebra that prints, compares and needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

#: a distance beyond the end of any sequence
FAR = 1 << 40


@dataclass(frozen=True)
class Mask:
    """A range of positions that each query attends to; neither of its ends ever falls from one query to the next.

    ``Mask.full()``, ``Mask.causal()``, ``Mask.window(left, right)``, ``Mask.chunk(size)`` and ``Mask.prefix(size)`` are
    its kinds, and ``&`` intersects two. The documents of a batch, where it has any, intersect every mask.

    Attributes:
        left, right: the most tokens before and behind itself that a query attends to.
        chunk_size: a query attends to tokens of its own chunk of so many.
        prefix_size: a query attends to itself, those before it, and the first so many tokens.
    """

    left: int = FAR
    right: int = FAR
    chunk_size: int = FAR
    prefix_size: int = FAR

    def __post_init__(self) -> None:
        if min(self.left, self.right, self.prefix_size) < 0 or self.chunk_size < 1:
            raise ValueError(f"{self}: sizes of a mask cannot be negative, and a chunk has at least one token")

    @classmethod
    def full(cls) -> Mask:
        """Return the mask of all tokens."""
        return cls()

    @classmethod
    def causal(cls) -> Mask:
        """Return the mask of a token and all before it."""
        return cls(right=0)

    @classmethod
    def window(cls, left: int, right: int = 0) -> Mask:
        """Return the mask of a token, ``left`` tokens before it and ``right`` behind it (2310.06825, Mistral)."""
        return cls(left, right)

    @classmethod
    def chunk(cls, size: int) -> Mask:
        """Return the mask of chunks of ``size`` tokens; Llama 4 attends to ``Mask.causal() & Mask.chunk(8192)``."""
        return cls(chunk_size=size)

    @classmethod
    def prefix(cls, size: int) -> Mask:
        """Return the mask of a token, all before it, and the first ``size`` tokens, which see each other."""
        return cls(prefix_size=size)

    def __and__(self, other: Mask) -> Mask:
        small, large = sorted((self.chunk_size, other.chunk_size))
        if large < FAR and large % small:
            raise ValueError(f"{self} & {other}: the size of one chunk must be a multiple of the other's")
        left, right = min(self.left, other.left), min(self.right, other.right)
        return Mask(left, right, small, min(self.prefix_size, other.prefix_size))

    def first(self, query: int) -> int:
        """Return the first position that a query attends to."""
        return max(0, query - self.left, query - query % self.chunk_size)

    def last(self, query: int) -> int:
        """Return the last position that a query attends to; it may lie behind the end of the sequence."""
        chunk_end = query - query % self.chunk_size + self.chunk_size - 1
        return min(query + self.right, chunk_end, max(query, self.prefix_size - 1))

    def within(self, num_tokens: int) -> Mask:
        """Return the simplest mask that is the same for sequences of ``num_tokens``."""
        left, right = (FAR if size >= num_tokens - 1 else size for size in (self.left, self.right))
        chunk, prefix = (FAR if size >= num_tokens else size for size in (self.chunk_size, self.prefix_size))
        if right == 0 or prefix <= 1:
            right, prefix = 0, FAR
        return Mask(left, right, chunk, prefix)

    def num_pairs(self, num_tokens: int) -> int:
        """Return the number of pairs of a query and a key in a sequence of one document."""
        ends = (min(self.last(query), num_tokens - 1) - self.first(query) + 1 for query in range(num_tokens))
        return sum(ends)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """The four attributes, in order."""
        return self.left, self.right, self.chunk_size, self.prefix_size

    @property
    def is_causal(self) -> bool:
        """True if no query attends to a token behind it."""
        return self.right == 0

    def __str__(self) -> str:
        def written(size: int) -> str:
            return "all" if size >= FAR else str(size)

        parts = []
        if self.left < FAR or 0 < self.right < FAR:
            parts.append(f"window({written(self.left)}, {written(self.right)})")
        elif self.right == 0:
            parts.append("causal")
        if self.chunk_size < FAR:
            parts.append(f"chunk({self.chunk_size})")
        if self.prefix_size < FAR:
            parts.append(f"prefix({self.prefix_size})")
        return " & ".join(parts) or "full"

    __repr__ = __str__


CAUSAL = Mask.causal()
FULL = Mask.full()
