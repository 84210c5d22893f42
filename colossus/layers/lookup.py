"""Rows of a table whose gradient is wider than the table."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.autograd import first_order
from colossus.tensor_parallel.dtypes import gradient_dtype


def look_up(ids: Tensor, table: Tensor, padding_idx: int | None) -> Tensor:
    """``F.embedding(ids, table, padding_idx)``: ids [..], table [words, dim], result [.., dim].

    torch adds up the gradients of a word in the dtype of the table. Of bfloat16 that loses those of a frequent word:
    they are added up in the dtype of ``table.grad``.
    """
    if gradient_dtype(table) == table.dtype:
        return F.embedding(ids, table, padding_idx)
    rows: Tensor = _WideGradient.apply(ids, table, -1 if padding_idx is None else padding_idx, table.dtype)
    return rows


def look_up_wide(ids: Tensor, table: Tensor) -> Tensor:
    """``F.embedding(ids, table)`` in the dtype of ``table.grad``, in which the gradients of a word are added up."""
    if gradient_dtype(table) == table.dtype:
        return F.embedding(ids, table)
    rows: Tensor = _WideGradient.apply(ids, table, -1, gradient_dtype(table))
    return rows


class _WideGradient(torch.autograd.Function):
    """table [words, dim] [ids], the gradient summed in the dtype of ``table.grad``; there is no dgrad."""

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
