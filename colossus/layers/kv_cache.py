"""The keys and values of the tokens that a decoding model has seen, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.error_place import located_error


@dataclass
class _Held:
    """Of one call of one attention: ``length`` tokens of [batch, key/value heads, capacity, head_dim] are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0


class KeyValueCache:
    """Keys (with their positions, where these are rotary) and values of all attentions of one rank.

    Layers find it in the batch's information (`BatchInfo.cache`). Whoever runs the model calls `advance` after each
    forward. Of each attention a rank holds 2 x batch x heads x capacity x head_dim elements, of its own samples and
    key/value heads; the capacity is doubled when it is full (`capacity_for`).

    Attributes:
        seen: tokens of earlier forwards: the position of the first token of this one.

    Args:
        capacity: tokens to hold room for at first.
        limit: more will never come, so that room is for no more.
    """

    def __init__(self, capacity: int = 64, limit: int | None = None) -> None:
        self.seen = 0
        #: by position, shared by all layers; and the rows of this forward
        self._tables: dict[Hashable, tuple[Tensor, ...]] = {}
        self._rows: dict[Hashable, tuple[Tensor, ...]] = {}
        self._capacity, self._limit = capacity, limit
        self._held: dict[nn.Module, list[_Held]] = {}

    def advance(self, tokens: int) -> None:
        """A forward of this many tokens is done.

        Raises:
            ValueError: when an attention was not called with these tokens: then what it holds is not the past.
        """
        self.seen += tokens
        self._rows.clear()
        for layer, calls in self._held.items():
            if any(held.length != self.seen for held in calls):
                raise located_error(
                    f"{_title(layer)}: the model has seen {self.seen} tokens, this attention "
                    f"{', '.join(str(held.length) for held in calls)}: with a key/value cache every attention is "
                    f"called with all tokens of a forward, in the same order each time"
                )

    @property
    def num_bytes(self) -> int:
        """Of all that is held, room for more included."""
        return sum(held.keys.nbytes + held.values.nbytes for calls in self._held.values() for held in calls)

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Positions in the sequence of the tokens of this forward, [tokens]; the same object within a forward."""
        (positions,) = self.rows("positions", tokens, lambda count: (torch.arange(count, device=device),))
        return positions

    def rows(self, name: Hashable, tokens: int, make: Callable[[int], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """The rows of the tokens of this forward, out of tables by position that all layers share.

        Args:
            make: gives the tables, [count, ..] each.
        """
        found = self._rows.get(name)
        if found is None:
            stop = self.seen + tokens
            tables = self._tables.get(name)
            if tables is None or len(tables[0]) < stop:
                tables = self._tables[name] = make(capacity_for(stop, self._capacity, self._limit))
            found = self._rows[name] = tuple(table.narrow(0, self.seen, tokens) for table in tables)
        return found

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of new tokens to all that were seen, and to themselves.

        Args:
            layer: whose keys and values these are. One that is called several times in a forward has several entries.
            query: [batch, heads, tokens, head_dim].
            key, value: [batch, key/value heads, tokens, head_dim]; they are kept.

        Returns:
            [batch, heads, tokens, head_dim]
        """
        grouped = key.shape[-3] != query.shape[-3]
        key, value = self._extend(layer, key, value)
        tokens = query.shape[-2]
        if tokens == 1:
            if grouped:
                return _attend_in_groups(query, key, value)
            return F.scaled_dot_product_attention(query, key, value)
        if not self.seen:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        past = torch.ones(tokens, key.shape[-2], dtype=torch.bool, device=query.device).tril_(self.seen)
        return F.scaled_dot_product_attention(query, key, value, past, enable_gqa=grouped)

    def _extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the new ones, which are written behind those that are there."""
        calls = self._held.get(layer)
        if calls is None:
            calls = self._held[layer] = []
        held = None
        for each in calls:
            if each.length == self.seen:
                held = each
                break
        stop = self.seen + key.shape[-2]
        if held is None:
            if self.seen:
                raise located_error(
                    f"{_title(layer)}: it is called for the first time, or once more "
                    f"than before, after {self.seen} tokens were seen: with a key/value cache every forward calls it "
                    f"equally often"
                )
            held = _Held(self._room_for(key, stop), self._room_for(value, stop))
            calls.append(held)
        elif held.keys.shape[:2] != key.shape[:2]:
            raise located_error(
                f"{_title(layer)}: {key.shape[0]} samples with {key.shape[1]} key/value heads, but its cache is of "
                f"{held.keys.shape[0]} with {held.keys.shape[1]}: a batch keeps its samples"
            )
        if stop > held.keys.shape[-2]:
            held.keys, held.values = self._grown(held.keys, stop), self._grown(held.values, stop)
        # narrow: an index takes twice as long
        held.keys.narrow(2, self.seen, stop - self.seen).copy_(key)
        held.values.narrow(2, self.seen, stop - self.seen).copy_(value)
        held.length = stop
        return held.keys.narrow(2, 0, stop), held.values.narrow(2, 0, stop)

    def _room_for(self, like: Tensor, tokens: int) -> Tensor:
        capacity = capacity_for(tokens, self._capacity, self._limit)
        return like.new_empty((*like.shape[:-2], capacity, like.shape[-1]))

    def _grown(self, old: Tensor, tokens: int) -> Tensor:
        new = self._room_for(old, tokens)
        new[..., : self.seen, :] = old[..., : self.seen, :]
        return new


def capacity_for(tokens: int, first: int, limit: int | None = None) -> int:
    """Tokens that there is room for once ``tokens`` are held: ``first``, doubled until they fit, at most the limit."""
    capacity = max(1, first)
    while capacity < tokens:
        capacity *= 2
    return capacity if limit is None else max(tokens, min(capacity, limit))


def _attend_in_groups(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention of one token with fewer key/value heads than heads: those that share keys are the tokens of one head.

    So the cache is read as it is, where torch's ``enable_gqa`` would repeat it for each head.
    """
    batch, heads, _, size = query.shape
    kv = key.shape[-3]
    out = F.scaled_dot_product_attention(query.reshape(batch, kv, heads // kv, size), key, value)
    return out.reshape(batch, heads, 1, size)


def _title(layer: nn.Module) -> str:
    return str(getattr(layer, "title", type(layer).__name__))
