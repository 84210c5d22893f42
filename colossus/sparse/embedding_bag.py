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
from colossus.layout.redistribute import move
from colossus.rows.row_gradient import row_source
from colossus.sharded_tensor.placement import Place
from colossus.sharded_tensor.regions import local, sequence_place, with_sequence
from colossus.tensor_parallel.dtypes import activation_dtype, gradient_dtype

BagMode = Literal["sum", "mean", "max"]


class EmbeddingBag(Layer):
    """``torch.nn.EmbeddingBag``: the sum, the mean or the maximum of the rows of each bag.

    Under tensor parallelism the table is split by features like activations between blocks, or replicated where its
    features do not divide. With ``sparse`` its gradient is of the rows that were looked up, in every mode.

    Args:
        num_embeddings: the rows of the table.
        embedding_dim: the features of a row.
        max_norm: refused, since a lookup would change rows, which no other plan could repeat.
        norm_type: ignored without ``max_norm``.
        scale_grad_by_freq: refused, since gradients would depend on how often one rank has seen an id.
        mode: ``sum``, ``mean`` or ``max``.
        sparse: whether the gradient is of the rows that were looked up.
        include_last_offset: refused, as offsets are.
        padding_idx: an id that belongs to no bag.
        device: ignored; the table is made on the device of the context.
        dtype: the dtype of the table.
        init: the initial values, by default normal, with zeros in the row of ``padding_idx``.

    Shape:
        ids [bags, n] in the whole layout -> [bags, embedding_dim]. Pad bags of different lengths with ``padding_idx``.
        torch's offsets are not supported, since a batch is split into microbatches and over ranks along dim 0.

    Raises:
        ValueError: an id is outside the table (checked on CPU), or `embedding_bag` refuses the arguments.
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
            raise located_error("EmbeddingBag: max_norm and scale_grad_by_freq are not supported; leave them out")
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
            per_sample_weights = move(per_sample_weights, source, partial, self.context)
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
        y = move(y, self.looked_up, user, self.context)
        return with_sequence(y, place, self.parallel)

    def extra_repr(self) -> str:
        sparse = ", sparse=True" if self.sparse else ""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}{sparse}"


def require_whole_bags(ids: Tensor, offsets: Tensor | None, title: str) -> Place | None:
    """Return the `sequence_place` of the bags.

    Raises:
        ValueError: bags are given by offsets, or the tokens of a bag are split over sequence ranks.
    """
    if offsets is not None:
        raise located_error(
            f"{title}: it takes ids [bags, n], padded with padding_idx, and no offsets: a batch cannot be cut along "
            f"these"
        )
    place = sequence_place(ids)
    if place is not None and (ids.dim() != 2 or place.dim != 0):
        raise located_error(
            f"{title}: under parallel.sequence a rank has a part of the tokens, and so would have a part of each bag. "
            f"A bag may contain ids of one token, as ids [tokens, n], but not the tokens of a sequence"
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
    """Apply ``F.embedding_bag`` to the rows of the ids, each of which is looked up once.

    An id that is ``padding_idx`` belongs to no bag, and its row is not looked up. The result of an empty bag is zeros.
    Under ``max``, the gradient of a feature goes to the row with its largest value.

    Args:
        ids: [bags, n].
        table: [rows, dim].
        mode: ``sum``, ``mean`` or ``max``.
        sparse: whether the table's gradient is of the rows that were looked up.
        per_sample_weights: of the shape of ids, with mode ``sum``; may require a gradient.
        padding_idx: an id that belongs to no bag.
        title: the layer's name in errors.

    Returns:
        [bags, dim], in the dtype of the table or, with a row source, in that of the sum of its gradients.

    Raises:
        ValueError: the shapes or the mode do not fit.
    """
    if ids.dim() != 2:
        raise located_error(
            f"{title}: ids have shape {tuple(ids.shape)}, not [bags, n]. Pad bags of different lengths with "
            f"padding_idx; offsets are not supported, since a batch cannot be cut along them"
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
        in_bag = ids != padding_idx
        num_before = F.pad(in_bag.cumsum(0), (1, 0))  # the number of ids in bags before each
        places = in_bag.nonzero().squeeze(1)
        ids, starts, padding_idx = ids.index_select(0, places), num_before[starts], None
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
    """Return rows in the dtype of ``table.grad``, the index of each id's row, and the index that belongs to no bag.

    On the CPU these are the rows of the distinct ids. On an accelerator the host would have to wait for the number of
    distinct ids, so there is one row for each id.
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
