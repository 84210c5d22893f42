"""Bags of rows of a table, reduced to one row each."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.error_place import located_error
from colossus.layers.lookup import distinct_rows, look_up
from colossus.rows.row_source import row_source
from colossus.tensor_parallel.dtypes import gradient_dtype

BagMode = Literal["sum", "mean", "max"]


def embedding_bag(
    ids: Tensor,
    table: Tensor,
    *,
    mode: str,
    sparse: bool,
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    title: str = "embedding_bag",
) -> Tensor:
    """``F.embedding_bag`` on the rows that are looked up, each of them once.

    An id that is ``padding_idx`` belongs to no bag, and its row is not looked up. An empty bag gives zeros. Of ``max``
    each feature's gradient goes to the row that has the largest value of it.

    Args:
        ids: [bags, n].
        table: [rows, dim].
        per_sample_weights: of the shape of ids, with mode ``sum``; may want a gradient.
        title: how an error names it.

    Returns:
        [bags, dim], in the dtype of the table or, with a source of rows, that in which its gradients are summed.

    Raises:
        ValueError: for shapes and modes that do not fit.
    """
    if ids.dim() != 2:
        raise located_error(
            f"{title}: ids have shape {tuple(ids.shape)}, not [bags, n]. Bags of unlike lengths are filled up with "
            f"padding_idx; there are no offsets, along which no batch can be cut"
        )
    weights = _flat_weights(ids, per_sample_weights, mode, title)
    starts = torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    ids = ids.reshape(-1)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[0]
    wide = gradient_dtype(table)
    with_few_rows = sparse or row_source(table) is not None
    if padding_idx is not None and with_few_rows:
        kept = ids != padding_idx
        before = F.pad(kept.cumsum(0), (1, 0))  # how many are kept in front of each
        places = kept.nonzero().squeeze(1)
        ids, starts, padding_idx = ids.index_select(0, places), before[starts], None
        weights = None if weights is None else weights.index_select(0, places)
    if with_few_rows:
        rows, where = distinct_rows(ids, table, sparse=sparse)
        rows = rows.to(wide)
    elif wide != table.dtype:
        rows, where, padding_idx = _wide_rows(ids, table, padding_idx)
    else:
        rows, where = table, ids
    with torch._C.DisableTorchFunctionSubclass():
        return F.embedding_bag(
            where,
            rows,
            starts.to(where.dtype),
            mode=mode,
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
            padding_idx=padding_idx,
        )


def _wide_rows(ids: Tensor, table: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Rows in the dtype of ``table.grad``, of each id its place among them, and the place that belongs to no bag.

    On the CPU they are those of the distinct ids. How many these are, the host would have to wait for on an
    accelerator: there is a row for each id.
    """
    if ids.device.type == "cpu":
        distinct, where = torch.unique(ids, return_inverse=True)
        padding = [] if padding_idx is None else (distinct == padding_idx).nonzero().flatten().tolist()
        return look_up(distinct, table, wide=True), where, padding[0] if padding else None
    count = len(ids)
    where = torch.arange(count, device=ids.device)
    if padding_idx is None:
        return look_up(ids, table, wide=True), where, None
    rows = look_up(F.pad(ids, (0, 1), value=padding_idx), table, wide=True)
    return rows, where.masked_fill(ids == padding_idx, count), count


def _flat_weights(ids: Tensor, weights: Tensor | None, mode: str, title: str) -> Tensor | None:
    if weights is None:
        return None
    if mode != "sum":
        raise located_error(f"{title}: per_sample_weights are there with mode 'sum' only, not {mode!r}")
    if weights.shape != ids.shape:
        raise located_error(
            f"{title}: per_sample_weights have shape {tuple(weights.shape)}, the ids {tuple(ids.shape)}: one for each"
        )
    return weights.reshape(-1)
