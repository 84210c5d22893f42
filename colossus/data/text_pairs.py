"""Pairs of texts: two rows of a batch, one behind the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.utils.data import default_collate

from colossus.data.batch import map_batch


def collate_pairs(samples: Sequence[Any]) -> Any:
    """Return a batch of pairs for ``data.collate_fn``: entries [2, ..] of n samples as [2 n, ..], each pair together.

    So order, shards and microbatches are of pairs: ``train.global_batch_size`` counts them, and no rank has half of
    one.
    """
    return map_batch(lambda x: x.flatten(0, 1), default_collate(list(samples)))
