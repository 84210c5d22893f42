"""Lookups of rows of a table, with a gradient wider than the table, or with only the looked-up rows."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.autograd import first_order
from colossus.rows.row_gradient import row_source
from colossus.tensor_parallel.dtypes import gradient_dtype


def look_up(ids: Tensor, table: Tensor, padding_idx: int | None = None, *, wide: bool = False) -> Tensor:
    """Return ``F.embedding(ids, table, padding_idx)``: ids [..], table [words, dim], result [.., dim].

    torch sums the gradients of a word in the dtype of the table. In bfloat16 that loses those of a frequent word, so
    they are summed in the dtype of ``table.grad``.

    Args:
        wide: the result has that dtype, too.
    """
    summed = gradient_dtype(table)
    if summed == table.dtype:
        return F.embedding(ids, table, padding_idx)
    dtype = summed if wide else table.dtype
    rows: Tensor = _WideGradient.apply(ids, table, -1 if padding_idx is None else padding_idx, dtype)
    return rows


class _WideGradient(torch.autograd.Function):
    """A lookup of rows of a table [words, dim], whose gradient is summed in the dtype of ``table.grad``; no dgrad."""

    @staticmethod
    def forward(ctx: Any, ids: Tensor, table: Tensor, padding_idx: int, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_words, ctx.padding_idx, ctx.dtype = table.shape[0], padding_idx, gradient_dtype(table)
        return F.embedding(ids, table).to(dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        dy = dy.to(ctx.dtype)
        return None, torch.ops.aten.embedding_dense_backward(dy, ids, ctx.num_words, ctx.padding_idx, False), None, None


def distinct_rows(
    ids: Tensor, table: Tensor, padding_idx: int | None = None, *, sparse: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the rows of some ids, each once, from the source of the table's rows or from the table itself.

    Args:
        ids: integers, any shape.
        table: [rows, dim]; a rank may store some of the rows only if there is a source.
        padding_idx: an id whose row gets no gradient.
        sparse: without a source, ``table.grad`` is sparse COO.

    Returns:
        rows [distinct ids, dim], and the place of each id among them, in the shape of ``ids``.
    """
    source = row_source(table)
    if source is not None:
        return source.look_up(ids, padding_idx)
    distinct, where = torch.unique(ids, return_inverse=True)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += table.shape[0]
    with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
        return F.embedding(distinct, table, padding_idx, sparse=sparse), where


def row_of_each(ids: Tensor, table: Tensor, *, sparse: bool) -> Tensor:
    """Return the rows of some ids [n], [n, dim], in the dtype in which the table's gradients are summed.

    Args:
        sparse: see `distinct_rows`. A gradient of all rows needs no distinct ids, for whose number the host would have
            to wait for the device.
    """
    if not sparse and row_source(table) is None:
        with torch._C.DisableTorchFunctionSubclass():
            return look_up(ids, table, wide=True)
    rows, where = distinct_rows(ids, table, sparse=sparse)
    return F.embedding(where, rows)


def sparse_embedding(ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    """Return ``F.embedding(ids, table, padding_idx, sparse=True)``: ids [..], table [rows, dim], result [.., dim].

    With a source of rows the result has the dtype in which gradients are summed.
    """
    if row_source(table) is None:
        with torch._C.DisableTorchFunctionSubclass():
            return F.embedding(ids, table, padding_idx, sparse=True)
    rows, where = distinct_rows(ids, table, padding_idx)
    return F.embedding(where, rows)


@torch.no_grad()
def read_rows(start: int, stop: int, table: Tensor) -> Tensor:
    """Return rows ``start..stop`` of a table, without a gradient or a cache. Collective if ranks have parts of it."""
    source = row_source(table)
    if source is None:
        with torch._C.DisableTorchFunctionSubclass():
            return table.detach()[start:stop]
    return source.read(torch.arange(start, stop, device=table.device))
