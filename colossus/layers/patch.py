"""The first layers of a vision transformer: patches of images, and a class token before them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from colossus.arithmetic import either, nearest_multiples
from colossus.construct.initial_values import Normal
from colossus.context.precision import LOW
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layers.linear import Linear
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.layout.redistribute import move
from colossus.sharded_tensor.placement import Placement
from colossus.sharded_tensor.regions import require_sequences, unwrap
from colossus.sharded_tensor.tensor import mark, wrap


class PatchEmbedding(Linear):
    """``Conv2d(in_channels, hidden_size, patch_size, stride=patch_size)``, its weight split over the tensor ranks.

    Patches do not overlap, so the convolution is one matmul of the flattened patches: a `Linear` outside a pair.
    ``weight`` is [hidden_size, in_channels * patch height * patch width], the convolution's ``weight.flatten(1)``, and
    ``bias`` is the convolution's. Both start as Conv2d's do, uniform within 1/sqrt(fan-in).

    Args:
        in_channels: channels of the images.
        hidden_size: features of each patch.
        patch_size: side of a square patch, or (height, width).
        bias: add a bias.
        return_layout: layout of the output, by default whole.
        init, bias_init: see `colossus.layers.init`.

    Shape:
        images [batch, in_channels, height, width]; output [batch, patches, hidden_size], patches row by row: the result
        of ``conv(images).flatten(2).transpose(1, 2)``.

    Raises:
        ValueError: images have another number of dims or channels, or do not divide into patches.
    """

    def __init__(
        self,
        in_channels: int,
        hidden_size: int,
        patch_size: int | tuple[int, int],
        bias: bool = True,
        *,
        return_layout: Activation | None = None,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        high, wide = patch_size if isinstance(patch_size, tuple) else (patch_size, patch_size)
        # Linear's own values are Conv2d's: both draw within 1/sqrt(fan-in), weight and bias
        super().__init__(in_channels * high * wide, hidden_size, bias, dtype=dtype, init=init, bias_init=bias_init)
        self.in_channels, self.hidden_size, self.patch_size = in_channels, hidden_size, (high, wide)
        self.return_layout = return_layout or self.parallel.regions.whole

    def forward(self, images: Tensor) -> Any:
        x, whole = self.patches(images), self.parallel.regions.whole
        if self.return_layout != whole:
            x = mark(x, Placement(self.parallel, whole, self.return_layout))
        return super().forward(x)

    def patches(self, images: Tensor) -> Tensor:
        """Return [batch, channels, height, width] as [batch, patches, channels * patch height * patch width]."""
        if images.dim() != 4 or images.shape[1] != self.in_channels:
            raise located_error(
                f"{self.title}: images have shape {tuple(images.shape)}; it takes [batch, channels, height, width] "
                f"with {self.in_channels} channels"
            )
        high, wide = self.patch_size
        for name, size, side in (("height", images.shape[2], high), ("width", images.shape[3], wide)):
            if size % side or not size:
                near = either(nearest_multiples(size, side))
                raise located_error(f"{self.title}: {name} {size} does not divide into patches of {side}; use {near}")
        patches = images.unflatten(3, (-1, wide)).unflatten(2, (-1, high))  # [b, c, rows, high, columns, wide]
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"{self.in_channels} channels, patch {self.patch_size[0]} x {self.patch_size[1]}; {super().extra_repr()}"


class ClassToken(Layer):
    """A learned vector as the first token of each sample (BERT, ViT 2010.11929), which the head classifies.

    The vector is split by features like activations between blocks, or replicated where it does not divide.

    Shape:
        x [batch, tokens, hidden_size]; output [batch, 1 + tokens, hidden_size], in the layout of x.

    Raises:
        ValueError: tokens are split over ranks, so that only one of them has the first.
    """

    is_reproducible = True

    def __init__(self, hidden_size: int, *, init: Initializer | None = None, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.layout = Layout((self.split_between_blocks(hidden_size).features,))
        self.weight = self.make_parameter({"": (hidden_size,)}, self.layout, init or Normal(0.02), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        require_sequences(x)
        x, placement = unwrap(x, self.parallel)
        activation = placement.activation
        if activation.tokens:
            raise located_error(
                f"{self.title}: tokens are split over {','.join(activation.tokens)}, so that only one rank has the "
                f"first; call it where they are whole: behind colossus.layers.to_whole, or before to_residual"
            )
        self.record_use_between_blocks(x, activation, self.layout.dims[0])
        with torch._C.DisableTorchFunctionSubclass():  # a `SplitParameter` is its local shard here
            token = self.weight.to(x.dtype) if x.dtype in LOW else self.weight
            token = move(token, self.layout, Layout((activation.features,)), self.context)
            y = torch.cat((token.expand(x.shape[0], 1, -1), x), dim=1)
        return wrap(y, placement)
