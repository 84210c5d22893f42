"""Arithmetic of sizes and ranks, as error messages show it. No torch."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence


def round_up(value: int, unit: int) -> int:
    """Return the smallest multiple of ``unit`` that is not below ``value``."""
    return -(-value // unit) * unit


def divisors(value: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    small = [n for n in range(1, math.isqrt(value) + 1) if value % n == 0]
    return sorted({*small, *(value // n for n in small)})


def nearest_multiples(value: int, unit: int) -> list[int]:
    """Return the positive multiples of ``unit`` nearest to ``value``: one on either side, or ``value`` itself."""
    return sorted({value // unit * unit, round_up(value, unit)} - {0}) or [unit]


def nearest_powers(value: int, exponent: int) -> list[int]:
    """Return the numbers q ** exponent, q >= 1, on either side of ``value``, which is none of them."""
    root = round(value ** (1 / exponent))
    root -= root**exponent > value
    return [max(root, 1) ** exponent, (root + 1) ** exponent]


def either(numbers: Iterable[int]) -> str:
    """Return numbers as ``28 or 32``."""
    return " or ".join(map(str, numbers))


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0, 1``, or of more than eight ``ranks 0, 1, 2, 3 and 60 more``."""
    shown = ranks if len(ranks) <= 8 else ranks[:4]
    more = f" and {len(ranks) - len(shown)} more" if len(shown) < len(ranks) else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, shown))}{more}"


def listed(names: Sequence[str], most: int = 4) -> str:
    """Return the first of some names: ``a, b, c, d, ..``."""
    return ", ".join(names[:most]) + (", .." if len(names) > most else "")


def not_a_multiple(name: str, value: int, by: str, unit: int) -> str:
    """Return a message such as ``batch = 30 is not a multiple of data 4 x microbatches 2 = 8; nearest: 24 or 32``.

    Args:
        by: the meaning of ``unit``, with its number.
    """
    return f"{name} = {value} is not a multiple of {by}; nearest: {either(nearest_multiples(value, unit))}"


def factors(sizes: Mapping[str, int]) -> str:
    """Return sizes as ``data 2 x pipeline 1 x tensor 4``."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items())


def byte_count(size: float) -> str:
    """Return a size as ``517 B``, ``9.90 KB``, ``1.20 GB``: in powers of 1000, three digits."""
    units = ["B", "KB", "MB", "GB", "TB", "PB"]
    while size >= 999.5 and len(units) > 1:
        size, units = size / 1000, units[1:]
    digits = 0 if units[0] == "B" or size >= 99.95 else 1 if size >= 9.995 else 2
    return f"{size:.{digits}f} {units[0]}"


_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def parse_bytes(text: str) -> int:
    """Return the bytes of ``80GB`` (powers of 1000), ``79.6GiB`` (powers of 1024), ``500 MB``, or a plain number.

    Raises:
        ValueError: for any other text, and for less than a byte.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", text, re.IGNORECASE)
    size = 0
    if match is not None and (match[2] or not match[3]):
        size = int(float(match[1]) * (_BINARY if match[3] else _UNITS)[match[2].upper()])
    if not size:
        raise ValueError(f"{text!r} is no size of memory; write 80GB, 79.6GiB or a number of bytes")
    return size


def parse_seconds(value: str | float) -> float:
    """Return the seconds of a number, or of a text with a unit: ``90s``, ``30m``, ``1h``, ``2d``.

    Raises:
        ValueError: for any other text.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", str(value))
    if match is None or isinstance(value, bool) or not float(match[1]):
        raise ValueError(f"{value!r} is no time; write 90s, 30m, 1h, 2d or a number of seconds")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def clock(seconds: float) -> str:
    """Return a duration as ``1:15`` for 75 seconds, ``1:02:05`` for more than an hour."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def aligned(rows: Sequence[Sequence[str]], left_columns: Collection[int] = (), widest: int | None = None) -> str:
    """Return the rows of a table as text, columns aligned right except those in ``left_columns``.

    A cell longer than ``widest`` moves the cells after it.
    """
    widths = [min(max(map(len, column)), widest or sys.maxsize) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if index in left_columns else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join(line.rstrip() for line in lines)


def counted(number: int, noun: str, plural: str = "s") -> str:
    """Return ``1 step``, ``2 steps``."""
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def expert_factor(data: int, sequence: int, expert: int) -> int:
    """Return how many of the ``expert`` ranks that share experts are neighbours along data.

    The other factor is the whole sequence axis, or 1 where that does not divide ``expert``.

    Raises:
        ValueError: ``expert`` is neither the sequence size times a divisor of data, nor a divisor of data.
    """
    if expert % sequence == 0 and data % (expert // sequence) == 0:
        return expert // sequence
    if data % expert == 0:
        return expert
    divisors = {size for size in range(1, data + 1) if data % size == 0}
    whole = f" nor sequence {sequence} times one" if sequence > 1 else ""
    fits = either(sorted(divisors | {sequence * size for size in divisors}))
    raise ValueError(f"parallel.expert = {expert} is not a divisor of data {data}{whole}; use {fits}")
