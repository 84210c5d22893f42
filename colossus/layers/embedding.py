"""Embeddings. A lookup is a matmul with one-hot rows; the table is stored as the weight of a column linear is."""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm.autograd import first_order, save_for_backward, saved_tensors
from colossus.comm.conjugate import not_a_view
from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Normal, ZeroRow
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layers.lookup import look_up, sparse_embedding
from colossus.layers.model_parallel import ModelParallel
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.moves import moves
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.sharded_tensor.placement import Placement
from colossus.sharded_tensor.regions import local, require_sequences, sequence_place, unwrap
from colossus.sharded_tensor.tensor import wrap
from colossus.tensor_parallel.dtypes import activation_dtype, gradient_dtype
from colossus.tensor_parallel.mode import MatmulSharding
from colossus.tensor_parallel.move_plan import BoundMove, MovePlan, groups_of, note_weight, run


class Embedding(Layer):
    """``torch.nn.Embedding`` with the table split over the tensor ranks.

    A lookup is the dgrad of a column linear whose dy are one-hot rows. So the table is stored as the weight of `LMHead`
    is, and the two can be tied in every mode.

    A vocabulary that does not divide is padded on the last ranks; the padding is never looked up, gets no gradient and
    does not belong to the logical parameter.

    Args:
        max_norm, scale_grad_by_freq: refused: lookups would change rows, or gradients would depend on how often a rank
            has seen an id, which no other plan repeats.
        device: accepted as torch does, and ignored: the table is made on the device of the context.
        sparse: the gradient has only the rows that were looked up, as sparse COO, or as an engine's strategy stores it.
            The table is then split by features like activations between blocks, or replicated where they do not divide,
            and cannot be tied to a head, which needs all rows.
        return_layout: layout of the output, by default whole. The layout between blocks equals ``to_residual`` of a
            whole output, with less traffic.

    Shape:
        ids [..] in the whole layout, output [.., embedding_dim].

    Raises:
        ValueError: embedding_dim does not divide, or ids are outside the vocabulary (checked on CPU; a split table
            would silently return zeros).
    """

    is_reproducible = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        init: Initializer | None = None,
        return_layout: Activation | None = None,
    ) -> None:
        super().__init__()
        if max_norm is not None or scale_grad_by_freq:
            raise located_error("Embedding: max_norm and scale_grad_by_freq are not supported; leave them out")
        self.sparse, self.return_layout = sparse, return_layout or self.parallel.regions.whole
        num_embeddings, embedding_dim = operator.index(num_embeddings), operator.index(embedding_dim)
        if padding_idx is not None and padding_idx < 0:
            padding_idx += num_embeddings
        self.num_embeddings, self.embedding_dim, self.padding_idx = num_embeddings, embedding_dim, padding_idx
        self.sharding = (
            None if sparse else self.choose_sharding("column", embedding_dim, {"": num_embeddings}, padded=True)
        )
        init = init or (Normal(1.0) if padding_idx is None else ZeroRow(Normal(1.0), padding_idx))
        looked_up = self._lookup_layout(self.sharding) if self.sharding else self.split_between_blocks(embedding_dim)
        layout = self.sharding.weight if self.sharding else Layout(((), looked_up.features))
        self.weight = self.make_parameter({"": (num_embeddings, embedding_dim)}, layout, init, dtype=dtype)
        self._move_plans: dict[tuple[Activation, int], _LookupPlans] = {}
        self._looked_up = looked_up
        self.decide_gradients(self.weight, looked_up)

    def forward(self, input: Tensor) -> Tensor:
        if self.sharding is not None:
            self.require_batch(input)
        target, place = self.return_layout, sequence_place(input)
        y = self._rows(local(input), target)
        return wrap(y, Placement.standard(self.parallel, target, target, y.dim(), place))

    def _rows(self, ids: Tensor, target: Activation) -> Tensor:
        """Return the rows of ``ids`` as a plain local tensor in the layout ``target``."""
        if self.sharding is None:
            find = sparse_embedding if self.sparse else look_up
            with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
                rows = find(ids, self.weight, self.padding_idx)
            rows = rows.to(activation_dtype(self.weight, self.context.precision))
            return move(rows, self._looked_up, target, self.context)
        check_range(ids, self.num_embeddings, f"{self.title}: ids")
        ndim = ids.dim() + 1
        plans = self._move_plans.get((target, ndim))
        if plans is None:
            plans = self._move_plans[target, ndim] = self._make_plans(self.sharding, target, ndim)
        local_ids = run(plans.ids, ids).wait()
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            return _Lookup.apply(local_ids, self.weight, self.padding_idx, plans, self.parallel)

    @staticmethod
    def _lookup_layout(sharding: MatmulSharding) -> Activation:
        """Return the layout of the looked-up rows, before they are reduced."""
        return replace(sharding.y.rows(), features=sharding.x.features, partial=sharding.y.features)

    def _make_plans(self, sharding: MatmulSharding, target: Activation, ndim: int) -> _LookupPlans:
        self.check_stored(self.weight, sharding.weight)
        looked_up, rows = self._lookup_layout(sharding), sharding.y.rows()
        user = self.parallel.regions.whole.rows()
        w = MovePlan.of(moves(sharding.weight, sharding.gathered_weight), self.context)
        y = MovePlan.of(moves(looked_up.at(ndim), target.at(ndim)), self.context)
        stored, gathered = (self.context.size(layout.dims[0]) for layout in (sharding.weight, sharding.gathered_weight))
        (num_stored, _) = sharding.weight.chunk((self.num_embeddings, self.embedding_dim), self.context.grid.sizes)
        return _LookupPlans(
            ids=MovePlan.of(moves(_without_features(user, ndim), _without_features(rows, ndim)), self.context).forward,
            w=w,
            y=y,
            groups=groups_of(w, y),
            num_rows=num_stored * stored // gathered,
            vocabulary_shard=self.context.index(sharding.y.features) if sharding.y.features else 0,
        )

    def extra_repr(self) -> str:
        where = f", weight {self.sharding.weight}" if self.sharding else ""
        where += ", sparse=True" if self.sparse else ""
        return f"{self.num_embeddings}, {self.embedding_dim}{where}"


def _without_features(activation: Activation, ndim: int) -> Layout:
    return Layout(activation.at(ndim).dims[:-1])


class _LookupPlans(NamedTuple):
    """The moves of ids, table and rows, the groups of the last two, the rows and index of a rank's vocabulary shard."""

    ids: tuple[BoundMove, ...]
    w: MovePlan
    y: MovePlan
    groups: tuple[AxisGroup, ...]
    num_rows: int
    vocabulary_shard: int


class _Lookup(torch.autograd.Function):
    """weight[ids] on one rank, for a split vocabulary. Shapes are per rank, for V words and H features.

        ids      [t]          moved by the caller to the rows that this rank looks up
        weight   [v_w, h_w]   stored   -gather_b->   [v, h], words v * shard .. v * (shard + 1) of V
        rows     [t, h]                -reduce->     y [t_y, h_y]

        forward  y  [t_y, h_y] = reduce(one_hot(ids) [t, v] @ weight [v, h])     as a lookup; ids of other shards give 0
        wgrad    dw [v_w, h_w] = reduce_b(one_hot(ids).T [v, t] @ dy [t, h])     as a scatter-add; the dual of gather_b
                 with dy [t, h] = gather(dy [t_y, h_y]), the dual of reduce

    There is no dgrad: ids have no gradient. 1D: weight [V/p, H] is not moved, and y [T, H] is all-reduced. 3D: weight
    [V/ji, H/k] is gathered to [V/j, H/k], y is scattered over j.
    """

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, weight: Tensor, padding_idx: int | None, plans: _LookupPlans, parallel: ModelParallel
    ) -> Tensor:
        note_weight(plans.groups, weight)
        local = ids - plans.vocabulary_shard * plans.num_rows
        elsewhere = (local < 0) | (local >= plans.num_rows)
        local.masked_fill_(elsewhere, 0)
        # the row of padding is looked up, but gets no gradient
        save_for_backward(ctx, local, elsewhere if padding_idx is None else elsewhere | (ids == padding_idx))
        ctx.plans, ctx.weights, ctx.parameter = plans, parallel.weights, weight
        dtype = activation_dtype(weight, parallel.context.precision)

        def compute() -> Tensor:
            gathered = parallel.weights.gather(weight, plans.w, dtype).wait()
            rows = F.embedding(local, gathered).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
            return not_a_view(run(plans.y.forward, rows, owned=True).wait())

        return kept("a lookup", compute)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        local, elsewhere = saved_tensors(ctx)
        plans: _LookupPlans = ctx.plans
        weight: Tensor = ctx.parameter
        note_weight(plans.groups, weight)
        # a word's gradients are summed in the dtype of weight.grad
        dy = run(plans.y.backward, dy).wait().to(gradient_dtype(weight)).masked_fill(elsewhere.unsqueeze(-1), 0.0)
        gradient = torch.ops.aten.embedding_dense_backward(dy, local, plans.num_rows, -1, False)
        dw = ctx.weights.reduce(weight, gradient, plans.w)
        return None, dw.wait() if dw else None, None, None, None


class PositionEmbedding(Layer):
    """Learned positions, added to an activation: x [batch, tokens, dim] + weight[positions], output like x.

    The table is split by features like activations between blocks, or replicated where they do not divide.
    ``positions`` [batch, tokens] in the whole layout are those in packed documents; by default they are 0, 1, 2, ...

    Raises:
        ValueError: there are more tokens than positions.
    """

    is_reproducible = True

    def __init__(
        self,
        num_positions: int,
        embedding_dim: int,
        *,
        init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_positions, self.embedding_dim = num_positions, embedding_dim
        shape = (num_positions, embedding_dim)
        self.layout = Layout(((), self.split_between_blocks(embedding_dim).features))
        self.weight = self.make_parameter({"": shape}, self.layout, init or Normal(0.02), dtype=dtype)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        require_sequences(x)
        x, placement = unwrap(x, self.parallel)
        activation = placement.activation
        self.record_use_between_blocks(x, activation, self.layout.dims[1])
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            rows = self.weight if positions is not None else self._rows(x.shape[-2], activation, x.device)
            rows = rows.to(x.dtype) if x.dtype in LOW else rows
        if self.layout.dims[1] != activation.features:
            rows = move(rows, self.layout, Layout(((), activation.features)), self.context)
        if positions is not None:
            plan = MovePlan.of_tokens(self.parallel.regions.whole, activation, 3, self.context)
            own = run(plan.forward, local(positions)).wait()
            with torch._C.DisableTorchFunctionSubclass():
                rows = F.embedding(own, rows)
        return wrap(x + rows, placement)

    def _rows(self, count: int, activation: Activation, device: torch.device) -> Tensor:
        """Return the rows of this rank's tokens, [count, ..]."""
        index, num_shards = self.context.index(activation.tokens), self.context.size(activation.tokens)
        sequence, info = self.parallel.sequence, self.parallel.batch_info
        first = info.cache.num_tokens if info.cache is not None else 0
        total = first + (info.num_tokens or count * num_shards)
        if total > self.num_positions:
            raise located_error(
                f"{self.title}: a sequence has {total} tokens, but there are only {self.num_positions} positions: cut "
                f"the sequences, or allow {total} or more (seq_len of the model, num_positions of the layer)"
            )
        if sequence is None:
            return self.weight[first + index * count : first + (index + 1) * count]
        # padding may lie behind the last position; no other token attends to it
        positions = sequence.positions(count, index, num_shards, device).clamp(max=self.num_positions - 1)
        return self.weight.index_select(0, positions)


def check_range(ids: Tensor, size: int, what: str) -> None:
    """Raise ValueError unless all ids are in 0..size-1.

    On an accelerator the host does not wait, and a later call of CUDA raises instead (``device-side assert``).
    """
    if not ids.numel():
        return
    low, high = torch.aminmax(ids)
    if ids.device.type != "cpu":
        torch._assert_async((low >= 0) & (high < size), f"{what} are outside the vocabulary 0..{size - 1}")
    elif int(low) < 0 or int(high) >= size:
        raise located_error(
            f"{what} range over {int(low)}..{int(high)}, outside the vocabulary 0..{size - 1}: the model's "
            f"vocab_size must be that of the tokenizer that made them (padding is an id in it, or -100 in labels)"
        )
