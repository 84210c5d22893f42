"""Whether the heads of an attention divide: its width, its groups, the ranks that split them. No torch."""

from __future__ import annotations

from colossus.arithmetic import either, nearest_multiples, not_a_multiple
from colossus.tensor_parallel.choose_sharding import IndivisibleSize, Shardings


def head_problems(
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int | None = None,
    *,
    rotary: bool = False,
    prefix: str = "",
) -> list[str]:
    """What is wrong with these sizes on any number of ranks, one line each.

    Args:
        num_kv_heads: of grouped-query attention (2305.13245); else num_heads.
        head_dim: features of a head; None where they are hidden_size / num_heads.
        prefix: goes before the name of a size, ``model.`` for the keys of a config.
    """
    problems = []
    if head_dim is not None:
        if rotary and head_dim % 2:
            problems.append(
                f"{prefix}head_dim = {head_dim} is odd, but rotary positions turn pairs of features; nearest: "
                f"{either([n for n in (head_dim - 1, head_dim + 1) if n])}"
            )
    elif hidden_size % num_heads:
        problems.append(
            not_a_multiple(f"{prefix}hidden_size", hidden_size, f"{prefix}num_heads = {num_heads}", num_heads)
        )
    elif rotary and hidden_size // num_heads % 2:
        near = either(nearest_multiples(hidden_size, 2 * num_heads))
        problems.append(
            f"{prefix}hidden_size / {prefix}num_heads = {hidden_size} / {num_heads} = {hidden_size // num_heads} is "
            f"odd, but rotary positions turn pairs of features; nearest hidden_size: {near}"
        )
    if num_heads % num_kv_heads:
        divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        nearest = min(divisors, key=lambda n: abs(n - num_kv_heads))
        problems.append(
            f"{prefix}num_kv_heads = {num_kv_heads} does not divide {prefix}num_heads = {num_heads} (every key/value "
            f"head serves the same number of query heads); nearest: {nearest}"
        )
    return problems


def indivisible_heads(num_heads: int, num_kv_heads: int, shardings: Shardings) -> list[IndivisibleSize]:
    """The numbers of heads that do not divide over the ranks of the inner region's features: heads are split whole.

    Key/value heads may also be fewer than the ranks, if they divide these (`are_replicated`).
    """
    axes = shardings.regions.inner.features
    ways = shardings.ways(axes)
    counts = {"num_heads": num_heads} | ({"num_kv_heads": num_kv_heads} if num_kv_heads != num_heads else {})
    return [
        IndivisibleSize(name, count, axes, ways)
        for name, count in counts.items()
        if count % ways and (name == "num_heads" or ways % count)
    ]


def are_replicated(num_kv_heads: int, shardings: Shardings | None) -> bool:
    """Whether key/value heads are fewer than the ranks that split heads, so that each of these stores all of them."""
    return shardings is not None and num_kv_heads < shardings.ways(shardings.regions.inner.features)


def uneven_kv_heads(num_heads: int, num_kv_heads: int, ways: int, by: str, prefix: str = "") -> str:
    """Why ``num_kv_heads`` key/value heads do not fit ``ways`` ranks, more than there are.

    Args:
        by: names these ranks with their number (``parallel.tensor.size = 4``).
    """
    fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0 and (ways % n == 0 or n % ways == 0)]
    nearest = min(fitting, key=lambda n: abs(n - num_kv_heads))
    return (
        f"{prefix}num_kv_heads = {num_kv_heads} does not divide {by}: of key/value heads that are fewer than the ranks "
        f"each serves as many ranks; nearest: {nearest}"
    )
