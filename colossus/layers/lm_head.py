"""Heads: from hidden to a vocabulary or to classes, split over the tensor ranks, never gathered for the loss."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import Tensor

from colossus.construct.initial_values import torch_linear
from colossus.error_place import located_error
from colossus.layers.embedding import Embedding, vocabulary_sharding
from colossus.layers.layer import Layer
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import redistribute
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import wrap
from colossus.tensor_parallel.matmul import MatmulPlans, matmul, matmul_plans, product


class LMHead(Layer):
    """Logits over the vocabulary, split over the tensor ranks where there are any.

    Args:
        hidden_size: of the input.
        vocab_size: of the output; need not divide, the last ranks are padded.
        bias: whether to add one.
        tied_to: an `Embedding` whose weight is shared: one parameter with one gradient.

    Shape:
        input [.., hidden_size]; output [.., vocab_size], a `ShardedTensor` of [.., ceil(vocab_size / ranks)] where
        the vocabulary is split. `colossus.layers.cross_entropy` and `accuracy` take it so; ``to_whole`` gathers it.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        bias: bool = False,
        *,
        tied_to: Embedding | None = None,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        hidden_size, vocab_size = operator.index(hidden_size), operator.index(vocab_size)
        self.hidden_size, self.vocab_size = hidden_size, vocab_size
        self.sharding = vocabulary_sharding(self, hidden_size, vocab_size)
        if tied_to is None:
            layout = self.sharding.weight if self.sharding else Layout.whole(2)
            shape = {"": (vocab_size, hidden_size)}
            self.weight = self.make_parameter(shape, layout, init or torch_linear(hidden_size), dtype=dtype)
        elif (tied_to.num_embeddings, tied_to.embedding_dim) != (vocab_size, hidden_size):
            raise located_error(
                f"LMHead({hidden_size}, {vocab_size}) cannot be tied to an embedding of {tied_to.num_embeddings} x "
                f"{tied_to.embedding_dim}: they share one weight, so give both the same sizes"
            )
        elif tied_to.sparse:
            raise located_error(
                f"{type(self).__name__}({hidden_size}, {vocab_size}) cannot be tied to an embedding with sparse=True: "
                f"the logits of all words give all rows of the table a gradient, which is dense. Leave sparse out, or "
                f"tie nothing"
            )
        else:
            self.weight = tied_to.weight
        # split as the rows of the weight are, so that both are padded alike
        self.bias_layout = Layout(self.sharding.weight.dims[:1] if self.sharding else ((),))
        bias_init = bias_init or torch_linear(hidden_size)
        self.bias = self.make_parameter({"": (vocab_size,)}, self.bias_layout, bias_init, dtype=dtype) if bias else None
        self._move_plans: dict[tuple[Activation, int], MatmulPlans] = {}
        x, y = (self.sharding.x, self.sharding.y) if self.sharding else (self.parallel.regions.whole,) * 2
        if tied_to is None:
            self.decide_gradients(self.weight, x, y)
        self.decide_gradients(self.bias, y)

    def forward(self, x: Tensor) -> Tensor:
        if self.sharding is None:
            return product(x, self.weight, self.bias)
        local, at = unwrap(x, self.parallel)
        self.require_batch(local)
        source, inner = at.activation, self.parallel.regions.inner
        plans = self._move_plans.get((source, local.dim()))
        if plans is None:
            plans = self._move_plans[source, local.dim()] = self._make_plans(source, local.dim())
        try:
            y = matmul(local, self.weight, self._gathered_bias(), plans)
        except (ValueError, RuntimeError) as error:
            self.name_error(error, local, source, self.hidden_size)
            raise
        if inner == self.parallel.regions.whole:  # every rank has all columns, and the padding
            return wrap(y[..., : self.vocab_size], at.moved(inner, y.dim()))
        return wrap(y, at.moved(inner, y.dim(), self.vocab_size))

    def _make_plans(self, source: Activation, ndim: int) -> MatmulPlans:
        assert self.sharding is not None
        self.check_stored(self.weight, self.sharding.weight)
        inner = self.parallel.regions.inner
        return matmul_plans(self.sharding, source, inner, ndim, self.context, self.parallel.weights)

    def _gathered_bias(self) -> Tensor | None:
        if self.bias is None or self.sharding is None:
            return self.bias
        target = Layout(self.sharding.gathered_weight.dims[:1])
        gathered = tuple(axis for axis in self.bias_layout.shard_axes if axis not in target.shard_axes)
        return redistribute(self.bias, self.bias_layout, replace(target, grad_partial=gathered), self.context)

    def extra_repr(self) -> str:
        where = f", weight {self.sharding.weight}" if self.sharding else ""
        return f"{self.hidden_size}, {self.vocab_size}, bias={self.bias is not None}{where}"


class Classifier(LMHead):
    """Logits over classes: `LMHead` with a bias, for a pooled [batch, hidden_size] or any other number of dims.

    Args:
        hidden_size: of the input.
        num_classes: of the output; need not divide.
    """

    def __init__(
        self,
        hidden_size: int,
        num_classes: int,
        bias: bool = True,
        *,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(hidden_size, num_classes, bias, init=init, bias_init=bias_init, dtype=dtype)
