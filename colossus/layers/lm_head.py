"""Linear heads, from features to a vocabulary or to classes. Losses take their logits as tensor ranks split them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from colossus.error_place import located_error
from colossus.layers.chunked_head import HeadProduct, values_in_chunks
from colossus.layers.embedding import Embedding
from colossus.layers.linear import MatmulLayer
from colossus.layers.token_values import ChunkedLogits, InChunks, Logits, LogitsLayout, TokenFunction, split_logits
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.sharded_tensor.regions import to_whole, unwrap
from colossus.sharded_tensor.tensor import wrap
from colossus.tensor_parallel.dtypes import to_product_dtype


class LMHead(MatmulLayer):
    """Logits over the vocabulary, split over the tensor ranks where there are any.

    Args:
        hidden_size: features of the input.
        vocab_size: features of the output; where the ranks do not divide it, the last ones store padding.
        bias: add a bias.
        tied_to: an `Embedding` whose weight is shared: one parameter with one gradient.
        whole: return all logits on every rank, for code that takes only plain tensors.
        init, bias_init: initializers of the weight and the bias.
        dtype: dtype of the weight and the bias.

    Raises:
        ValueError: the embedding of ``tied_to`` has another size, or sparse gradients.

    Shape:
        input [.., hidden_size]; output [.., vocab_size]. Where the vocabulary is split, the output is a `ShardedTensor`
        with [.., ceil(vocab_size / ranks)] on each rank: `colossus.layers.cross_entropy` and `accuracy` take it, and
        ``to_whole`` gathers it.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        tied_to: Embedding | None = None,
        whole: bool = False,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size, vocab_size = operator.index(hidden_size), operator.index(vocab_size)
        self.hidden_size, self.vocab_size, self.whole = hidden_size, vocab_size, whole
        self.sharding = self.choose_sharding("column", hidden_size, {"": vocab_size}, padded=True)
        if tied_to is not None and (tied_to.num_embeddings, tied_to.embedding_dim) != (vocab_size, hidden_size):
            raise located_error(
                f"LMHead({hidden_size}, {vocab_size}) cannot be tied to an embedding of {tied_to.num_embeddings} x "
                f"{tied_to.embedding_dim}: they share one weight, so both need the same sizes"
            )
        if tied_to is not None and tied_to.sparse:
            raise located_error(
                f"{type(self).__name__}({hidden_size}, {vocab_size}) cannot be tied to an embedding with sparse=True: "
                f"the logits of all words give all rows of the table a gradient, which is dense. Leave sparse out, or "
                f"tie nothing"
            )
        # split like the rows of the weight, so that both have the same padding
        self.bias_layout = Layout(self.sharding.weight.dims[:1] if self.sharding else ((),))
        inits: dict[str, Any] = dict(init=init, bias_init=bias_init, dtype=dtype)
        tied = None if tied_to is None else tied_to.weight
        self.make_weights(hidden_size, {"": vocab_size}, bias, self.bias_layout, tied=tied, **inits)

    def forward(self, input: Tensor | InChunks | ChunkedLogits) -> Any:
        if isinstance(input, InChunks):  # here, since a strategy may gather weights around a forward
            return self._in_chunks(*input)
        if isinstance(input, ChunkedLogits):
            return self.product_of(*input.product).gathered()
        if self.sharding is None:
            return self.whole_product(input)
        local, placement = unwrap(input, self.parallel)
        self.require_batch(local)
        inner = self.parallel.regions.inner
        y = self.multiply(local, self._gathered_bias(), placement.activation, inner)
        if inner == self.parallel.regions.whole:  # every rank has all columns and the padding behind them
            return wrap(y[..., : self.vocab_size], placement.moved(inner, y.dim()))
        logits = wrap(y, placement.moved(inner, y.dim(), self.vocab_size))
        return to_whole(logits) if self.whole else logits

    def _in_chunks(
        self, function: TokenFunction, logits: ChunkedLogits, tokens: Sequence[Tensor], other: Logits | None
    ) -> Tensor:
        """Return values of tokens, see `colossus.layers.token_values.token_values`."""
        if isinstance(other, ChunkedLogits):
            if not isinstance(other.head, LMHead):
                raise no_chunks(other.head)
            with torch.no_grad():
                its_logits: Any = other.head(other)
        else:
            its_logits = None if other is None else split_logits(other)[0].detach()
        return values_in_chunks(function, self.product_of(*logits.product), tokens, its_logits)

    def product_of(self, input: Tensor, chunk: int, cap: float | None) -> HeadProduct:
        """Return the product that `forward` computes, to be computed in chunks of ``chunk`` rows."""
        if self.context.options.reproducible:
            raise located_error("train.reproducible = 'plan' has no logits in chunks: set loss_chunk=None")
        local, placement = unwrap(input, self.parallel)
        sharding, inner, ndim = self.sharding, self.parallel.regions.inner, local.dim()
        if sharding is None:
            layout = LogitsLayout.whole(self.vocab_size)
            return HeadProduct(to_product_dtype(local), self.weight, self.bias, self.whole_plans(), layout, cap, chunk)
        self.require_batch(local)
        x = move(to_product_dtype(local), placement.activation, sharding.x, self.context)
        plans = self.plans_of(sharding.x, inner, ndim)
        stored, gathered = (self.context.size(w.dims[0]) for w in (sharding.weight, sharding.gathered_weight))
        width = -(-self.vocab_size // stored) * stored // gathered
        layout = LogitsLayout.of(inner, self.parallel, ndim, width, self.vocab_size)
        return HeadProduct(x, self.weight, self._gathered_bias(), plans, layout, cap, chunk)

    def _gathered_bias(self) -> Tensor | None:
        if self.bias is None or self.sharding is None:
            return self.bias
        target = Layout(self.sharding.gathered_weight.dims[:1])
        gathered = tuple(axis for axis in self.bias_layout.shard_axes if axis not in target.shard_axes)
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            return move(self.bias, self.bias_layout, replace(target, grad_partial=gathered), self.context)

    def extra_repr(self) -> str:
        where = f", weight {self.sharding.weight}" if self.sharding else ""
        return f"{self.hidden_size}, {self.vocab_size}, bias={self.bias is not None}{where}"


def no_chunks(head: Any) -> ValueError:
    """Return the error for logits in chunks of a module that is no `LMHead`."""
    return located_error(
        f"loss_chunk makes the logits in chunks of tokens, which needs a colossus.layers.LMHead whose forward is its "
        f"own, but the head is a {type(head).__name__}: leave loss_chunk out"
    )


class Classifier(LMHead):
    """Logits over classes: `LMHead` with a bias, for a pooled [batch, hidden_size] or any other number of dims.

    Args:
        hidden_size: features of the input.
        num_classes: features of the output, in any number, as the vocabulary of `LMHead`.
        options: further arguments of `LMHead`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        bias: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_classes, bias, **options)
