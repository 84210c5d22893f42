"""A learned token in front of the tokens of each sample."""

from __future__ import annotations

import torch
from torch import Tensor

from colossus.construct.init import Normal
from colossus.context.precision import LOW
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import redistribute
from colossus.sharded_tensor.regions import require_sequences
from colossus.sharded_tensor.tensor import unwrap, wrap


class ClassToken(Layer):
    """A learned vector as the first token of each sample (BERT, ViT 2010.11929): what is classified in the end.

    The vector is split by features as activations between blocks are, or replicated where it does not divide.

    Shape:
        x [batch, tokens, hidden_size]; output [batch, 1 + tokens, hidden_size], laid out like x.

    Raises:
        ValueError: where tokens are split over ranks: one of them alone has the first.
    """

    def __init__(self, hidden_size: int, *, init: Initializer | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        features = self.parallel.regions.residual.features
        if features and hidden_size % self.context.size(features):
            features = ()
        self.layout = Layout((features,))
        self.weight = self.make_parameter({"": (hidden_size,)}, self.layout, init or Normal(0.02), dtype=dtype)
        self._seen: set[Activation] = set()

    def forward(self, x: Tensor) -> Tensor:
        require_sequences(x)
        x, placement = unwrap(x, self.parallel)
        activation = placement.activation
        if activation not in self._seen:
            self._check_and_record(x, activation)
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is here what it is
            token = self.weight.to(x.dtype) if x.dtype in LOW else self.weight
            token = redistribute(token, self.layout, Layout((activation.features,)), self.context)
            y = torch.cat((token.expand(x.shape[0], 1, -1), x), dim=1)
        return wrap(y, placement)

    def _check_and_record(self, x: Tensor, activation: Activation) -> None:
        if x.dim() != 3:
            raise located_error(f"{self.title}: x has shape {tuple(x.shape)}; it takes [batch, tokens, hidden_size]")
        if activation.tokens:
            raise located_error(
                f"{self.title}: tokens are split over {','.join(activation.tokens)}, of which one rank alone has the "
                f"first; put it where they are whole: behind colossus.layers.to_whole, or before to_residual"
            )
        if activation.features not in ((), *self.layout.dims):
            raise located_error(
                f"{self.title}: features are split over {','.join(activation.features)} (local shape "
                f"{tuple(x.shape)}), inside of a column/row pair: put it before the pair, or behind it"
            )
        self.record_uses(activation)
        self._seen.add(activation)
