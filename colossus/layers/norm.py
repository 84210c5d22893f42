"""LayerNorm and RMSNorm over features that may be split."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.construct.init import Constant
from colossus.context.groups import AxisGroup
from colossus.layers.layer import Layer
from colossus.layers.sharded import unwrap, wrap
from colossus.layers.split_norm import split_norm
from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer


class _Norm(Layer):
    """Parameters of the normalized shape, the same on all ranks."""

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        self.normalized_shape = shape
        self.eps = eps
        self._seen: set[Activation] = set()

    def _parameter(self, value: float, init: Initializer | None, dtype: torch.dtype | None) -> nn.Parameter:
        shape = self.normalized_shape
        return self.make_parameter({"": shape}, Layout.whole(len(shape)), init or Constant(value), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        local, activation, output_layout = unwrap(x, self.parallel)
        return wrap(self.apply_local(local, activation), activation, output_layout, self.parallel)

    def apply_local(self, x: Tensor, activation: Activation) -> Tensor:
        """The norm of a plain local tensor laid out as ``activation``."""
        if activation not in self._seen:
            self._see(x, activation)
        if activation.features:
            return self._normalize_split(x, self.context.group(activation.features))
        return self._normalize(x)

    def _see(self, x: Tensor, activation: Activation) -> None:
        if activation.tokens and len(self.normalized_shape) > 1:
            raise ValueError(
                f"{self.title}: it normalizes over the tokens too, which are split over "
                f"{','.join(activation.tokens)} (local shape {tuple(x.shape)}): call "
                f"colossus.layers.to_user(x) before it"
            )
        self.record_uses(activation)
        self._seen.add(activation)

    def _normalize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        """The last dim of x is split over ``group``; the parameters are whole, each rank uses its part."""
        raise NotImplementedError

    def _part(self, parameter: Tensor | None, group: AxisGroup) -> Tensor | None:
        if parameter is None:
            return None
        width = self.normalized_shape[-1] // group.size
        return parameter.narrow(-1, group.index * width, width)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm``. Input and output [.., *normalized_shape]."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps)
        self.weight = self._parameter(1.0, init, dtype) if elementwise_affine else None
        self.bias = self._parameter(0.0, bias_init, dtype) if elementwise_affine and bias else None

    def _normalize(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps or 0.0)

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        weight, bias = self._part(self.weight, group), self._part(self.bias, group)
        return split_norm(x, weight, bias, group, len(self.normalized_shape), self.eps or 0.0, centred=True)


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm``. Input and output [.., *normalized_shape]."""

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        init: Initializer | None = None,
    ) -> None:
        super().__init__(normalized_shape, eps)
        self.weight = self._parameter(1.0, init, dtype) if elementwise_affine else None

    def _normalize(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        eps = torch.finfo(x.dtype).eps if self.eps is None else self.eps
        weight = self._part(self.weight, group)
        return split_norm(x, weight, None, group, len(self.normalized_shape), eps, centred=False)
