"""Checks that the heads of an attention divide: its width, its groups, the ranks that split them. No torch."""

from __future__ import annotations

from colossus.arithmetic import not_a_multiple
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
    """Return the problems of these sizes on any number of ranks, one line each.

    Args:
        hidden_size: features of the attention's input.
        num_heads: heads of queries.
        num_kv_heads: heads of keys and values (grouped-query attention, 2305.13245); num_heads without groups.
        head_dim: features of a head; None where they are hidden_size / num_heads.
        rotary: whether queries and keys have rotary positions.
        prefix: prefix of the names of sizes, ``model.`` for the keys of a config.
    """
    problems = []
    pairs, factor = (2, "2 x ") if rotary else (1, "")  # rotary positions rotate pairs of features
    if head_dim is not None:
        if head_dim % pairs:
            problems.append(not_a_multiple(f"{prefix}head_dim", head_dim, "2, since rotary positions rotate pairs", 2))
    elif hidden_size % (pairs * num_heads):
        by = f"{factor}{prefix}num_heads = {pairs * num_heads}{' (rotary positions rotate pairs)' * rotary}"
        problems.append(not_a_multiple(f"{prefix}hidden_size", hidden_size, by, pairs * num_heads))
    if num_heads % num_kv_heads:
        problems.append(
            f"{prefix}num_kv_heads = {num_kv_heads} does not divide {prefix}num_heads = {num_heads} (every key/value "
            f"head serves the same number of query heads)"
        )
    return problems


def indivisible_heads(num_heads: int, num_kv_heads: int, shardings: Shardings) -> list[IndivisibleSize]:
    """Return the numbers of heads that the ranks that split features inside a column/row pair do not divide.

    Heads are never cut. There may be fewer key/value heads than ranks, if their number divides the ranks' (see
    `are_replicated`).
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
    """Return whether key/value heads are fewer than the ranks that split heads, so that each rank stores them all."""
    return shardings is not None and num_kv_heads < shardings.ways(shardings.regions.inner.features)


def uneven_kv_heads(num_kv_heads: int, by: str, prefix: str = "") -> str:
    """Return the message that fewer key/value heads than ranks do not divide the number of ranks.

    Args:
        by: name and number of these ranks (``parallel.tensor.size = 4``).
    """
    return (
        f"{prefix}num_kv_heads = {num_kv_heads} does not divide {by}: where key/value heads are fewer than the ranks, "
        f"each must serve equally many ranks"
    )
