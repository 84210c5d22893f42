"""Bags of rows of a table, reduced to one row each."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.error_place import located_error
from colossus.layers.lookup import look_up_wide
from colossus.layers.row_source import row_source
from colossus.layers.sparse_lookup import distinct_rows
from colossus.tensor_parallel.dtypes import gradient_dtype

BagMode = Literal["sum", "mean", "max"]


def embedding_bag(
    ids: Tensor,
    table: Tensor,
    offsets: Tensor | None = None,
    *,
    mode: str,
    sparse: bool,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
    title: str = "embedding_bag",
) -> Tensor:
    """``F.embedding_bag`` on the rows that are looked up, each of them once.

    An id that is ``padding_idx`` belongs to no bag, and its row is not looked up. An empty bag gives zeros. Of ``max``
    each feature's gradient goes to the row that has the largest value of it.

    Args:
        ids: [bags, n], or [t] with ``offsets``.
        table: [rows, dim].
        offsets: [bags] where each bag begins in ids, ascending from 0; with ``include_last_offset`` [bags + 1], the
            last is where the last bag ends.
        per_sample_weights: of the shape of ids, with mode ``sum``; may want a gradient.
        title: how an error names it.

    Returns:
        [bags, dim], in the dtype of the table or, with a source of rows, that in which its gradients are summed.

    Raises:
        ValueError: for shapes, offsets and modes that do not fit.
    """
    starts = _starts(ids, offsets, include_last_offset, title)
    weights = _flat_weights(ids, per_sample_weights, mode, title)
    ids = ids.reshape(-1)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[0]
    wide = gradient_dtype(table)
    with_few_rows = sparse or row_source(table) is not None
    has_end = include_last_offset and offsets is not None
    if has_end and with_few_rows:  # what lies behind the last bag is not looked up
        ids, weights = ids[: starts[-1]], None if weights is None else weights[: starts[-1]]
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
        bags = F.embedding_bag(
            where,
            rows,
            starts.to(where.dtype),
            mode=mode,
            per_sample_weights=None if weights is None else weights.to(rows.dtype),
            padding_idx=padding_idx,
        )
    # torch's own include_last_offset takes what lies behind the last bag for a part of it
    return bags[:-1] if has_end else bags


def _wide_rows(ids: Tensor, table: Tensor, padding_idx: int | None) -> tuple[Tensor, Tensor, int | None]:
    """Rows in the dtype of ``table.grad``, of each id its place among them, and the place that belongs to no bag.

    On the CPU they are those of the distinct ids. How many these are, the host would have to wait for on an
    accelerator: there is a row for each id.
    """
    if ids.device.type == "cpu":
        distinct, where = torch.unique(ids, return_inverse=True)
        padding = [] if padding_idx is None else (distinct == padding_idx).nonzero().flatten().tolist()
        return look_up_wide(distinct, table), where, padding[0] if padding else None
    count = len(ids)
    where = torch.arange(count, device=ids.device)
    if padding_idx is None:
        return look_up_wide(ids, table), where, None
    rows = look_up_wide(F.pad(ids, (0, 1), value=padding_idx), table)
    return rows, where.masked_fill(ids == padding_idx, count), count


def _starts(ids: Tensor, offsets: Tensor | None, include_last_offset: bool, title: str) -> Tensor:
    """The offsets of ids that are flattened."""
    if ids.dim() == 2:
        if offsets is not None:
            raise located_error(f"{title}: ids [bags, n] = {tuple(ids.shape)} are bags already, so leave offsets out")
        return torch.arange(ids.shape[0], device=ids.device) * ids.shape[1]
    if ids.dim() != 1:
        raise located_error(f"{title}: ids have shape {tuple(ids.shape)}, not [bags, n], nor [t] with offsets")
    if offsets is None or offsets.dim() != 1:
        given = "none" if offsets is None else f"of shape {tuple(offsets.shape)}"
        raise located_error(f"{title}: ids [t] = [{len(ids)}] need offsets [bags], but there are {given}")
    if offsets.is_floating_point() or offsets.dtype == torch.bool:
        raise located_error(f"{title}: offsets are {offsets.dtype}, not integers")
    if include_last_offset and not len(offsets):
        raise located_error(f"{title}: include_last_offset wants offsets [bags + 1], but they are empty")
    if offsets.device.type == "cpu" and len(offsets):
        first, last = int(offsets[0]), int(offsets[-1])
        if first or last > len(ids) or bool((offsets.diff() < 0).any()):
            raise located_error(
                f"{title}: offsets say where bags begin in ids, ascending from 0, at most {len(ids)}; they are "
                f"{_shown(offsets)}. Microbatches and tensor ranks take samples along dim 0, which cannot be done with "
                f"offsets: give ids [bags, n], filled up with padding_idx"
            )
    return offsets


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


def _shown(offsets: Tensor, most: int = 6) -> str:
    numbers = ", ".join(map(str, offsets[:most].tolist()))
    return f"[{numbers}, ..]" if len(offsets) > most else f"[{numbers}]"
