"""Whether a model of a user's own, which says that it can be continued from a key/value cache, can."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from colossus.config import model_options
from colossus.layers.embedding import Embedding
from colossus.layers.kv_cache import KeyValueCache

if TYPE_CHECKING:
    from colossus.inference.text_model import TextModel

#: the attribute of a model's class that says so: `colossus.layers.Attention` alone mixes tokens, and nothing counts
#: positions but it (rotary) and `colossus.layers.PositionEmbedding`
DECLARED = "key_value_cache"
#: tokens of the trial; fewer where the model has no positions for them
_LENGTHS = (256, 64, 16, 4)
#: largest difference of logits, relative to the largest of them, that is rounding in float32
_ROUNDING = 1e-3


def find_problem(model: TextModel) -> str:
    """What shows that it cannot; nothing when nothing does. Collective.

    The logits of some tokens are computed at once, and in parts with a cache, in float32 at least: they differ where
    something looks at other tokens by itself, or counts positions from 0.
    """
    most = min(each for each in (model.num_positions, _sequence_length(model), _LENGTHS[0]) if each is not None)
    for length in dict.fromkeys(min(most, each) for each in _LENGTHS):
        ids = _ids(model, length)
        try:
            with model.wide():
                whole = model.logits(ids, only_last=False)
        except IndexError:  # positions that are not of colossus
            continue
        assert whole is not None
        try:
            with model.wide():
                parts = _in_parts(model, ids)
        except (ValueError, RuntimeError, IndexError) as error:
            return str(error).partition("\n")[0]
        gap = float((whole - parts).abs().amax() / whole.abs().amax().clamp(min=1e-30))
        if gap <= _ROUNDING:
            return ""
        return (
            f"its logits change by {gap:.2g} of the largest when tokens are computed in parts: something but "
            f"colossus.layers.Attention mixes tokens, or counts positions from 0, so {DECLARED} = True is wrong"
        )
    return f"it fails on {_LENGTHS[-1]} tokens"


def _in_parts(model: TextModel, ids: Tensor) -> Tensor:
    """A beginning, some tokens one by one, the rest at once."""
    length = ids.shape[1]
    cache, start, parts = KeyValueCache(length), 0, []
    for size in (length // 2, *(1,) * min(8, length - length // 2), length):
        if part := ids[:, start : start + size].shape[1]:
            found = model.logits(ids[:, start : start + part], cache, only_last=False)
            assert found is not None
            parts.append(found)
            start += part
    return torch.cat(parts, 1)


def _ids(model: TextModel, length: int) -> Tensor:
    """[rows, length], of ids that every embedding has: which one is of tokens is not known."""
    kinds = (Embedding, nn.Embedding)
    sizes = [each.num_embeddings for each in model.module.modules() if isinstance(each, kinds)]
    most = min([*sizes, model.vocab_size or 2])
    row = torch.randint(most, (1, length), generator=torch.Generator().manual_seed(0))
    return row.expand(model.row_multiple, -1)


def _sequence_length(model: TextModel) -> int | None:
    return getattr(model_options(model.config), "seq_len", None)
