"""The modes of sequence parallelism: over which axes each one passes keys and values, or exchanges heads. No torch."""

from __future__ import annotations

import math


class SequenceMode:
    """Tokens are split over all axes of a mode; they differ in how attention looks past the tokens of a rank.

    Attributes:
        ring: axes round which keys and values are passed (outer).
        ulysses: axes over which tokens are exchanged for heads (inner).
    """

    name = ""
    ring: tuple[str, ...] = ()
    ulysses: tuple[str, ...] = ()

    @classmethod
    def axis_sizes(cls, size: int, ulysses: int | None = None) -> dict[str, int]:
        """Size of each atomic axis, outermost first, for ``size`` ranks.

        Args:
            ulysses: ranks of the inner axis, for a mode that has both.

        Raises:
            ValueError: when ``size`` does not factor so.
        """
        if ulysses is not None:
            raise ValueError(
                f"parallel.sequence.ulysses = {ulysses} means nothing in mode {cls.name!r}; it is for mode 'hybrid'"
            )
        return {"sequence": size}


class Ring(SequenceMode):
    name = "ring"
    ring = ("sequence",)


class Ulysses(SequenceMode):
    name = "ulysses"
    ulysses = ("sequence",)


class Hybrid(SequenceMode):
    """Ulysses among neighbouring ranks, and a ring across (2405.07719)."""

    name = "hybrid"
    ring = ("ring",)
    ulysses = ("ulysses",)

    @classmethod
    def axis_sizes(cls, size: int, ulysses: int | None = None) -> dict[str, int]:
        # by itself as near to a square as can be
        inner = ulysses or max(n for n in range(1, math.isqrt(size) + 1) if size % n == 0)
        if size % inner:
            divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ValueError(
                f"parallel.sequence.ulysses = {inner} does not divide parallel.sequence.size = {size}; use one of "
                f"{divisors}"
            )
        return {"ring": size // inner, "ulysses": inner}
