"""Bags of embeddings."""

from __future__ import annotations

import operator
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.construct.initial_values import Normal, ZeroRow
from colossus.error_place import located_error
from colossus.layers.embedding import check_range
from colossus.layers.layer import Layer
from colossus.layers.lookup import distinct_rows, look_up
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import redistribute
from colossus.rows.row_gradient import row_source
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import local, move, sequence_place, with_sequence
from colossus.tensor_parallel.dtypes import activation_dtype, gradient_dtype

BagMode = Literal["sum", "mean", "max"]


class EmbeddingBag(Layer):
    """``torch.nn.EmbeddingBag``: sum, mean or largest values of the rows of each bag.

    Under tensor parallelism the table is split by features as activations between blocks are, or replicated where they
    do not divide. With ``sparse`` its gradient is of the rows that were looked up, in every mode.

    Args:
        max_norm, scale_grad_by_freq: refused: rows change in a lookup, or gradients by how often a rank has seen an
            id, which no other plan repeats.
        include_last_offset: refused, as offsets are.
        device: accepted as torch does, and ignored: the table is made on the device of the context.

    Shape:
        ids [bags, n] in the whole layout; output [bags, embedding_dim]. Bags of unlike lengths are filled up with
        ``padding_idx``; torch's offsets are not there: a batch is split into microbatches and over ranks along dim 0.

    Raises:
        ValueError: for ids outside the table (checked on CPU), and for what `embedding_bag` refuses.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        mode: BagMode = "mean",
        sparse: bool = False,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Initializer | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None or scale_grad_by_freq:
            raise located_error("EmbeddingBag: max_norm and scale_grad_by_freq are not there; leave them out")
        if include_last_offset:
            raise located_error("EmbeddingBag: it takes no offsets; leave include_last_offset out")
        if mode not in ("sum", "mean", "max"):
            raise located_error(f"EmbeddingBag: mode = {mode!r} is none of 'sum', 'mean', 'max'")
        num_embeddings, embedding_dim = operator.index(num_embeddings), operator.index(embedding_dim)
        if padding_idx is not None:
            if not -num_embeddings <= padding_idx < num_embeddings:
                raise located_error(
                    f"EmbeddingBag: padding_idx = {padding_idx} is outside a table of {num_embeddings} rows"
                )
            padding_idx %= num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.mode, self.sparse = mode, sparse
        init = init or (Normal(1.0) if padding_idx is None else ZeroRow(Normal(1.0), padding_idx))
        self.looked_up = self.split_between_blocks(embedding_dim)
        layout = Layout(((), self.looked_up.features))
        self.weight = self.make_parameter({"": (num_embeddings, embedding_dim)}, layout, init, dtype=dtype)
        self.decide_gradients(self.weight, self.looked_up)

    def forward(self, input: Tensor, offsets: None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        place = require_whole_bags(input, offsets, self.title)
        ids, user = local(input), self.parallel.regions.whole
        if row_source(self.weight) is None:
            check_range(ids, self.num_embeddings, f"{self.title}: ids")
        if per_sample_weights is not None:
            per_sample_weights, source = local(per_sample_weights), Layout.whole(per_sample_weights.dim())
            partial = Layout(source.dims, grad_partial=self.looked_up.features)
            per_sample_weights = redistribute(per_sample_weights, source, partial, self.context)
        y = embedding_bag(
            ids,
            self.weight,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            padding_idx=self.padding_idx,
            title=self.title,
        )
        y = y.to(activation_dtype(self.weight, self.context.precision))
        y = move(y, self.looked_up, user, self.parallel)
        return with_sequence(y, place, self.parallel)

    def extra_repr(self) -> str:
        sparse = ", sparse=True" if self.sparse else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{sparse}"


def require_whole_bags(ids: Tensor, offsets: Tensor | None, title: str) -> Place | None:
    """`sequence_place` of the bags, of which a rank must have whole ones."""
    if offsets is not None:
        raise located_error(
            f"{title}: it takes ids [bags, n], filled up with padding_idx, and no offsets: along these no batch can be "
            f"cut"
        )
    place = sequence_place(ids)
    if place is not None and (ids.dim() != 2 or place.dim != 0):
        raise located_error(
            f"{title}: under parallel.sequence a rank has a part of the tokens, and so of each bag: a bag may be made "
            f"of what belongs to one token, as ids [tokens, n], but not of tokens"
        )
    return place


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
    if per_sample_weights is not None and per_sample_weights.shape != ids.shape:
        raise located_error(
            f"{title}: per_sample_weights have shape {tuple(per_sample_weights.shape)}, the ids {tuple(ids.shape)}"
        )
    weights = None if per_sample_weights is None else per_sample_weights.reshape(-1)
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
