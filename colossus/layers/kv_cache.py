"""The keys and values of the tokens that a decoding model has seen, so that each token is computed once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.arithmetic import round_up
from colossus.error_place import located_error

#: tokens by which the room grows: what is copied then is little beside what attention has read for them
_MORE = 256


@dataclass
class _Held:
    """Of one attention: ``length`` tokens of [batch, key/value heads, room, head_dim] are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0


class KeyValueCache:
    """Keys (with their positions, where these are rotary) and values of all attentions of one rank.

    Layers find it in the batch's information (`BatchInfo.cache`). Whoever runs the model calls `advance` after each
    forward. Of each attention a rank holds 2 x batch x heads x room x head_dim elements, of its own samples and
    key/value heads, where the room is the tokens seen, rounded up to 256.

    Attributes:
        seen: tokens of earlier forwards: the position of the first token of this one.
    """

    def __init__(self) -> None:
        self.seen = 0
        self._held: dict[nn.Module, _Held] = {}

    def advance(self, tokens: int) -> None:
        """A forward of this many tokens is done.

        Raises:
            ValueError: when an attention was not called with these tokens: then what it holds is not the past.
        """
        self.seen += tokens
        for layer, held in self._held.items():
            if held.length != self.seen:
                _refuse(layer)

    @property
    def num_bytes(self) -> int:
        """Of all that is held, room for more included."""
        return sum(held.keys.nbytes + held.values.nbytes for held in self._held.values())

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Causal attention of new tokens to all that were seen, and to themselves: [batch, heads, tokens, head_dim].

        Args:
            layer: whose keys and values these are; called once in each forward.
            query: [batch, heads, tokens, head_dim].
            key, value: [batch, key/value heads, tokens, head_dim]; they are kept.
        """
        key, value = self._extend(layer, key, value)
        batch, heads, tokens, size = query.shape
        kv = key.shape[-3]
        if tokens == 1:
            # heads that share keys are the tokens of one: so the cache is not repeated, as ``enable_gqa`` does
            grouped = query.reshape(batch, kv, heads // kv, size)
            return F.scaled_dot_product_attention(grouped, key, value).reshape(batch, heads, 1, size)
        if not self.seen:
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=kv != heads)
        past = torch.ones(tokens, key.shape[-2], dtype=torch.bool, device=query.device).tril_(self.seen)
        return F.scaled_dot_product_attention(query, key, value, past, enable_gqa=kv != heads)

    def _extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of all tokens up to the new ones, which are written behind those that are there."""
        held = self._held.get(layer)
        if held is None:
            empty = key.new_empty((*key.shape[:-2], 0, key.shape[-1]))
            held = self._held[layer] = _Held(empty, empty)
        if held.length != self.seen or held.keys.shape[:2] != key.shape[:2]:
            _refuse(layer)
        stop = self.seen + key.shape[-2]
        if stop > held.keys.shape[-2]:
            held.keys, held.values = self._grown(held.keys, stop), self._grown(held.values, stop)
        # narrow: an index takes twice as long
        held.keys.narrow(2, self.seen, stop - self.seen).copy_(key)
        held.values.narrow(2, self.seen, stop - self.seen).copy_(value)
        held.length = stop
        return held.keys.narrow(2, 0, stop), held.values.narrow(2, 0, stop)

    def _grown(self, old: Tensor, tokens: int) -> Tensor:
        new = old.new_empty((*old.shape[:-2], round_up(tokens, _MORE), old.shape[-1]))
        new[..., : self.seen, :] = old[..., : self.seen, :]
        return new


def _refuse(layer: nn.Module) -> None:
    raise located_error(
        f"{getattr(layer, 'title', type(layer).__name__)}: with a key/value cache every attention is called once in "
        f"each forward, with all tokens of it and the same samples; a model that does otherwise is called with whole "
        f"sequences (key_value_cache = False)"
    )
