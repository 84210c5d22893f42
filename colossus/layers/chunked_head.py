"""A head and a function of its logits, a chunk of tokens at a time: a rank never has the logits of more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from colossus.comm.autograd import first_order, save_for_backward, saved_tensors
from colossus.comm.conjugate import not_a_view
from colossus.error_place import located_error
from colossus.layers.token_values import (
    LogitsLayout,
    SplitLogits,
    TokenFunction,
    require_rows,
    require_same_vocabulary,
)
from colossus.sequence_parallel.kernels import soft_capped
from colossus.tensor_parallel.dtypes import gradient_dtype
from colossus.tensor_parallel.matmul import MatmulPlans, bias_gradient, product, wgrad_product
from colossus.tensor_parallel.move_plan import note_weight, run


@dataclass(frozen=True)
class HeadProduct:
    """The product of a head for one input, not computed yet.

    Attributes:
        x: [batch, tokens, in], in the layout of the product.
        weight, bias: as the rank stores the weight, and adds the bias.
        plans: moves of the weight and of the logits; x is in place.
        layout: rows and columns of the logits.
        cap: bound of the logits, or None.
        size: the most rows of a chunk.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    plans: MatmulPlans
    layout: LogitsLayout
    cap: float | None
    size: int

    def __post_init__(self) -> None:
        if self.x.dim() != 3:
            raise located_error(
                f"the logits of a head are made in chunks of tokens, but its input has local shape "
                f"{tuple(self.x.shape)}: pass [batch, tokens, features]"
            )

    def gathered(self) -> HeadProduct:
        """Return the product with the weight as it is multiplied by, and without gradients: of another model."""
        with torch._C.DisableTorchFunctionSubclass():
            return replace(self, x=self.x.detach(), weight=self.gather_weight().detach())

    def gather_weight(self) -> Tensor:
        """Return the weight as it is multiplied by, which ranks may have split."""
        weight: Tensor = self.plans.weights.gather(self.weight, self.plans.w, self.x.dtype).wait()
        return weight

    def chunks(self) -> Iterator[slice]:
        """Yield the chunks, as slices of the tokens."""
        tokens = self.x.shape[1]
        step = max(1, self.size // max(1, self.x.shape[0]))
        for start in range(0, tokens, step):
            yield slice(start, min(start + step, tokens))

    def product(self, chunk: slice, weight: Tensor) -> Tensor:
        """Return the rank's part of the product of a chunk, [rows, tokens, columns]."""
        bias = self.bias.to(self.x.dtype) if self.bias is not None and self.plans.adds_bias else None
        y = not_a_view(product(self.x[:, chunk], weight, bias))
        return run(self.plans.y.forward, y, owned=True).wait()

    def logits(self, product: Tensor) -> Tensor:
        """Return the rank's logits from its part of the product."""
        if self.layout.group is None or self.layout.group.size == 1:  # it has all columns, and padding behind them
            product = product[..., : self.layout.total]
        return product if self.cap is None else soft_capped(product, self.cap)


class _Chunks:
    """A function of the logits of each chunk, for the forward and again for the backward."""

    def __init__(
        self, head: HeadProduct, function: TokenFunction, rows: Sequence[Tensor], other: HeadProduct | Tensor | None
    ) -> None:
        self._head, self._function, self._rows, self._other = head, function, rows, other

    def values(self, chunk: slice, product: Tensor) -> Tensor:
        """Return the values of the chunk's tokens from the product of the head."""
        logits, rows = self._head.logits(product), [x[:, chunk] for x in self._rows]
        require_rows(rows, rows, logits)
        return self._function(SplitLogits(logits, self._head.layout), *self._logits_of_other(chunk), *rows)

    def _logits_of_other(self, chunk: slice) -> list[Tensor]:
        if self._other is None:
            return []
        with torch.no_grad():
            if isinstance(self._other, Tensor):
                return [self._other[:, chunk]]
            return [self._other.logits(self._other.product(chunk, self._other.weight))]


class _InChunks(torch.autograd.Function):
    """``function(x @ weight.T + bias)`` on one rank, a chunk of tokens at a time. Shapes are per rank.

        x        [b, t, k]    in the layout of the product
        weight   [n_w, k_w]   stored    -gather_b->   [n, k], once for all chunks, in forward and in backward
        logits   [b, c, n]            -reduce_c->   [b_y, c, n_y], of c tokens
        values   [b_y, t]

        forward  values of each chunk; its logits are freed
        dgrad    each chunk's logits again, dlogits = the function's gradient, dx = gather_c(dlogits) @ weight
        wgrad    dw = sum over chunks of gather_c(dlogits).T @ x, then reduce_b, once

    wgrad runs here also where a schedule defers others, since later no gradient of logits is alive. The gradient of x
    is reduced where x was moved to its layout. The product runs once more than with whole logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: HeadProduct, of_chunk: _Chunks
    ) -> Tensor:
        ctx.head, head = head, replace(head, x=x)
        weights = head.plans.weights
        note_weight(head.plans.groups, weight)
        gathered = head.gather_weight()
        save_for_backward(ctx, x, gathered if weights.keeps else None)
        ctx.of_chunk = of_chunk
        with torch.autocast(x.device.type, enabled=False):
            values = [of_chunk.values(chunk, head.product(chunk, gathered)) for chunk in head.chunks()]
        return torch.cat(values, 1)

    @staticmethod
    @first_order
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, gathered = saved_tensors(ctx)  # first: under checkpointing this runs a user's forward
        of_chunk: _Chunks = ctx.of_chunk
        head: HeadProduct = replace(ctx.head, x=x)
        plans, weight = head.plans, head.weight
        with torch._C.DisableTorchFunctionSubclass():
            note_weight(plans.groups, weight)
            needs_x, needs_w, needs_b, *_ = ctx.needs_input_grad
            w = head.gather_weight() if gathered is None else gathered
            dx = torch.empty_like(x) if needs_x else None
            dw: Tensor | None = None
            db: Tensor | None = None
            for chunk in head.chunks():
                logits = head.product(chunk, w).requires_grad_()
                with torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
                    values = of_chunk.values(chunk, logits)
                    (dlogits,) = torch.autograd.grad(values, logits, grads[0][:, chunk])
                del values, logits
                dy = run(plans.y.backward, dlogits).wait()
                if dx is not None:
                    dx[:, chunk] = product(dy, w.t())
                if needs_w:
                    dw = _sum(dw, wgrad_product(dy, x[:, chunk]), gradient_dtype(weight))
                if needs_b and head.bias is not None:
                    db = _sum(db, bias_gradient(dy), head.bias.dtype)
            pending = None if dw is None else plans.weights.reduce(weight, dw, plans.w)
        return dx, pending.wait() if pending else None, db, None, None


def _sum(total: Tensor | None, term: Tensor, dtype: torch.dtype) -> Tensor:
    return term.to(dtype) if total is None else total.add_(term)


def values_in_chunks(
    function: TokenFunction, head: HeadProduct, tokens: Sequence[Tensor], other: HeadProduct | Tensor | None = None
) -> Tensor:
    """Return ``function`` of the logits of each chunk of tokens, [batch, tokens], in the whole layout.

    Args:
        function: see `colossus.layers.token_values.TokenFunction`.
        head: the product.
        tokens: numbers of each token, [batch, tokens], in the whole layout.
        other: the head of another model for the same tokens, `HeadProduct.gathered`, or its local logits.
    """
    if isinstance(other, HeadProduct):
        require_same_vocabulary(head.layout, other.layout)
    with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
        # what lives until the backward has no x: it is saved as autograd saves, so that hooks may move or drop it
        bare = replace(head, x=head.x.new_empty(0, *head.x.shape[1:]))
        chunks = _Chunks(bare, function, [head.layout.rows_of(x) for x in tokens], other)
        values: Tensor = _InChunks.apply(head.x, head.weight, head.bias, bare, chunks)
        return head.layout.samples_of(values)
