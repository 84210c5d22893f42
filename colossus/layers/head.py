"""The language-model head: hidden -> vocabulary, its weight tied to the embedding or its own."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.layers.embedding import Embedding
from colossus.layers.init import torch_linear
from colossus.layers.layer import Layer
from colossus.layers.matmul import MatmulPlan, make_plan, matmul
from colossus.layers.sharded import unwrap, wrap
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer, spec_of


class LMHead(Layer):
    """Logits over the vocabulary, split over the tensor ranks where there are any.

    Args:
        hidden_size: of the input.
        vocab_size: of the output; need not divide, the last ranks are padded.
        tied_to: an `Embedding` whose weight is used; the parameter is then one, with one gradient.

    Shape:
        input [.., hidden_size]; output [.., vocab_size], a `ShardedActivation` of [.., ceil(vocab_size / ranks)] where
        the vocabulary is split. `colossus.layers.cross_entropy` takes it so; ``to_user`` gives whole logits.
    """

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        tied_to: Embedding | None = None,
        init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.table = self.plan.mode.linear("column", self.plan.regions) if self.is_split else None
        if tied_to is None:
            layout = self.table.weight if self.table else Layout.whole(2)
            shape = {"": (vocab_size, hidden_size)}
            self.weight = self.make_parameter(shape, layout, init or torch_linear(hidden_size), dtype=dtype)
        elif (tied_to.num_embeddings, tied_to.embedding_dim) != (vocab_size, hidden_size):
            raise ValueError(
                f"LMHead({hidden_size}, {vocab_size}) cannot be tied to an embedding of {tied_to.num_embeddings} x "
                f"{tied_to.embedding_dim}"
            )
        else:
            self.weight = tied_to.weight
        self._matmul_plans: dict[tuple[Activation, int], MatmulPlan] = {}
        if self.table is None:
            self.record_uses(self.plan.regions.user, 3)

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            return F.linear(x, self.weight)
        local, source, home = unwrap(x, self.plan)
        inner = self.plan.regions.inner
        plan = self._matmul_plans.get((source, local.dim()))
        if plan is None:
            plan = make_plan(self.table, source, inner, local.dim(), self.context)
            self._matmul_plans[source, local.dim()] = plan
            spec = spec_of(self.weight)
            assert spec is not None
            spec.record(plan.weight_axes)
        return wrap(matmul(local, self.weight, None, plan), inner, home, self.plan, self.vocab_size)
