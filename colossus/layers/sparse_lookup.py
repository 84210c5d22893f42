"""Lookups whose gradient is of the rows touched."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from colossus.layers.row_source import row_source


def sparse_embedding(ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    """``F.embedding(ids, table, padding_idx, sparse=True)``: ids [..], table [rows, dim], result [.., dim]."""
    source = row_source(table)
    if source is None:
        return F.embedding(ids, table, padding_idx, sparse=True)
    rows, where = source.look_up(ids, padding_idx)
    return F.embedding(where, rows)
