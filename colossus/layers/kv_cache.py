"""The keys and values of the tokens that a decoding model has seen, so that each token is computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from colossus.arithmetic import round_up
from colossus.error_place import located_error
from colossus.sequence_parallel.kernels import attend_once
from colossus.sequence_parallel.mask import CAUSAL, Mask
from colossus.sequence_parallel.tiles import visible

#: tokens by which the buffer grows; the copy then is small beside what attention has read for these tokens
_MORE = 256

Result = TypeVar("Result")


@dataclass
class _LayerCache:
    """The cache of one attention: ``length`` tokens of [batch, key/value heads, room, head_dim] are filled."""

    keys: Tensor
    values: Tensor
    length: int = 0


class KeyValueCache:
    """Keys (rotated, with rotary positions) and values of all attentions of one rank.

    Layers find it in the batch's information (`BatchInfo.cache`). The code that runs the model calls `advance` after
    each forward. For each attention a rank stores 2 x batch x heads x room x head_dim elements, for its own samples and
    key/value heads; the room is the number of seen tokens, rounded up to 256.

    Attributes:
        num_tokens: tokens of earlier forwards, which is the position of the first token of this one.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self._layers: dict[nn.Module, _LayerCache] = {}
        self._derived: dict[nn.Module, Any] = {}

    def advance(self, tokens: int) -> None:
        """Count the tokens of a finished forward.

        Raises:
            ValueError: an attention was not called with these tokens, so that its cache misses them.
        """
        self.num_tokens += tokens
        for layer, stored in self._layers.items():
            if stored.length != self.num_tokens:
                _refuse(layer)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole cache, including unused room."""
        return sum(stored.keys.nbytes + stored.values.nbytes for stored in self._layers.values())

    def derived(self, layer: nn.Module, make: Callable[[], Result]) -> Result:
        """Return what a layer makes of its weights, made once: they do not change while a model decodes."""
        if layer not in self._derived:
            self._derived[layer] = make()
        result: Result = self._derived[layer]
        return result

    def attend(self, layer: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Mask, **options: Any) -> Tensor:
        """Return attention of new tokens to earlier ones and themselves: [batch, heads, tokens, head_dim].

        Args:
            layer: the attention with these keys and values; called once in each forward.
            query: [batch, heads, tokens, head_dim].
            key, value: [batch, key/value heads, tokens, head_dim]; they are stored.
            mask: what a token attends to; nothing behind it.
            options: see `attend_to_past`.
        """
        return self.attend_to_past(query, *self.extend(layer, key, value), mask, **options)

    def attend_to_past(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask, sinks: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Return attention of new tokens to the keys and values of all tokens, see `extend` and `attend`.

        Args:
            sinks: a score of each head beside those of the keys, [heads], if any.
            options: scale and soft_cap of `colossus.sequence_parallel.kernels.attend_once`.
        """
        batch, heads, tokens, size = query.shape
        kv = key.shape[-3]
        if tokens == 1:
            if first := mask.first(self.num_tokens):
                key, value = key[..., first:, :], value[..., first:, :]
            # heads that share keys become tokens of one head, since ``enable_gqa`` would repeat the cache
            grouped = query.reshape(batch, kv, heads // kv, size)
            sinks = None if sinks is None else sinks.view(kv, -1)
            out = attend_once(grouped, key, value, sinks=sinks, **options)
            return out.reshape(batch, heads, 1, -1)
        options["sinks"] = None if sinks is None else sinks[:, None]
        if not self.num_tokens and mask.within(tokens) == CAUSAL:
            return attend_once(query, key, value, causal=True, **options)
        positions = torch.arange(key.shape[-2], device=query.device)
        seen = visible(mask, positions[-tokens:], positions)[None, None]
        return attend_once(query, key, value, mask=seen, **options)

    def extend(self, layer: nn.Module, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of all tokens up to the new ones, after storing the new ones."""
        stored = self._layers.get(layer)
        if stored is None:
            stored = self._layers[layer] = _LayerCache(key[..., :0, :], value[..., :0, :])
        if stored.length != self.num_tokens or stored.keys.shape[:2] != key.shape[:2]:
            _refuse(layer)
        stop = self.num_tokens + key.shape[-2]
        if stop > stored.keys.shape[-2]:
            stored.keys, stored.values = self._grown(stored.keys, stop), self._grown(stored.values, stop)
        # narrow: an index takes twice as long
        stored.keys.narrow(2, self.num_tokens, stop - self.num_tokens).copy_(key)
        stored.values.narrow(2, self.num_tokens, stop - self.num_tokens).copy_(value)
        stored.length = stop
        return stored.keys.narrow(2, 0, stop), stored.values.narrow(2, 0, stop)

    def _grown(self, old: Tensor, tokens: int) -> Tensor:
        new = old.new_empty((*old.shape[:-2], round_up(tokens, _MORE), old.shape[-1]))
        new[..., : self.num_tokens, :] = old[..., : self.num_tokens, :]
        return new


def _refuse(layer: nn.Module) -> None:
    raise located_error(
        f"{getattr(layer, 'title', type(layer).__name__)}: with a key/value cache every attention must be called once "
        f"in each forward, with all of its tokens and the same samples; call other models with whole sequences "
        f"(key_value_cache = False)"
    )
