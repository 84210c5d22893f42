"""LayerNorm and RMSNorm over features that may be split over ranks: one collective in forward, one in backward.

Means and mean squared deviations of the shards are combined as by Chan, Golub and LeVeque (1979), since E[x^2] - E[x]^2
loses digits by cancellation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from colossus.comm import collectives
from colossus.comm.autograd import first_order
from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Constant
from colossus.context.groups import AxisGroup
from colossus.context.precision import LOW
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.sharded_tensor.regions import unwrap
from colossus.sharded_tensor.tensor import ShardedTensor, plain, wrap
from colossus.tensor_parallel.dtypes import to_wide_dtype


class _Norm(Layer):
    """Base of both norms: parameters of the normalized shape, replicated on all tensor ranks."""

    is_reproducible = True

    #: `colossus.build` stores its parameters in the wide dtype, as those of torch's norms
    is_norm = True

    def __init__(self, normalized_shape: int | Sequence[int], eps: float | None) -> None:
        super().__init__()
        shape = tuple(normalized_shape) if isinstance(normalized_shape, Sequence) else (normalized_shape,)
        self.normalized_shape = tuple(map(operator.index, shape))
        self.eps = eps

    def _parameter(self, value: float, init: Initializer | None, dtype: torch.dtype | None) -> nn.Parameter:
        shape = self.normalized_shape
        return self.make_parameter({"": shape}, Layout.whole(len(shape)), init or Constant(value), dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor) and not x.placement.is_standard(x.dim()):  # for example one rank's heads
            return self._normalize_parts(x)
        x, placement = unwrap(x, self.parallel, len(self.normalized_shape))
        activation = placement.activation
        if activation.tokens and len(self.normalized_shape) > 1:
            raise located_error(
                f"{self.title}: it normalizes over the tokens too, which are split over "
                f"{','.join(activation.tokens)}: call colossus.layers.to_whole(x) before it"
            )
        self.record_uses(activation)
        if not activation.features:
            return wrap(self._normalize(x), placement)
        group = self.context.group(activation.features)
        shape = list(x.shape[-len(self.normalized_shape) :])
        shape[-1] *= group.size
        if tuple(shape) != self.normalized_shape:
            own, other = (" x ".join(map(str, sizes)) for sizes in (self.normalized_shape, shape))
            raise located_error(f"{self.title}: it normalizes {own} features, but its input has {other}")
        return wrap(self._normalize_split(x, group), placement)

    def _normalize_parts(self, x: ShardedTensor) -> Tensor:
        """Return the norm over dims that are not split; other dims may be."""
        first = x.dim() - len(self.normalized_shape)
        if any(place.dim >= first for _, place in x.placement.places):
            return self._normalize(x)  # raises an error for the split dims
        self.record_uses(x.placement.activation)
        return wrap(self._normalize(plain(x)), x.placement)

    def _normalize(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        """Return the norm of x, whose last dim is split over ``group``, with this rank's shard of the parameters."""
        raise NotImplementedError

    def _shard(self, parameter: Tensor | None, group: AxisGroup) -> Tensor | None:
        width = self.normalized_shape[-1] // group.size
        return None if parameter is None else parameter.narrow(-1, group.index * width, width)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape}, eps={self.eps}"


class LayerNorm(_Norm):
    """``torch.nn.LayerNorm``, also of features that ranks split; ``init`` and ``bias_init`` set the initial values.

    Shape:
        input and output ``[.., *normalized_shape]``; a `ShardedTensor` where features are split.
    """

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

    def forward(self, input: Tensor) -> Tensor:  # torch's name of the argument
        return super().forward(input)

    def _normalize(self, x: Tensor) -> Tensor:
        # the kernel computes in float32, and under autocast on an accelerator returns float32, too
        weight, bias = _as_wide_as(x, self.weight), _as_wide_as(x, self.bias)
        y = F.layer_norm(x, self.normalized_shape, weight, bias, self.eps or 0.0)
        return y.to(x.dtype) if x.dtype in LOW else y

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        weight, bias = self._shard(self.weight, group), self._shard(self.bias, group)
        return _split_norm(x, weight, bias, group, len(self.normalized_shape), self.eps or 0.0, True)


class RMSNorm(_Norm):
    """``torch.nn.RMSNorm``, also of features that ranks split; ``init`` sets the initial values of the weight.

    Shape:
        input and output ``[.., *normalized_shape]``; a `ShardedTensor` where features are split.
    """

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

    def _factors(self) -> Tensor | None:
        """Return what the normalized features are multiplied by."""
        return self.weight

    def _normalize(self, x: Tensor) -> Tensor:
        weight = self._factors()
        if x.dtype in LOW:  # torch's own kernel needs one dtype, and rounds to it before the weight
            weight = None if weight is None else weight.float()
            return F.rms_norm(x.float(), self.normalized_shape, weight, self.eps).to(x.dtype)
        return F.rms_norm(x, self.normalized_shape, weight, self.eps)

    def _normalize_split(self, x: Tensor, group: AxisGroup) -> Tensor:
        # torch's own norm takes the epsilon of the dtype in which it computes
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        weight = self._shard(self._factors(), group)
        return _split_norm(x, weight, None, group, len(self.normalized_shape), eps, False)


class ZeroCenteredRMSNorm(RMSNorm):
    """`RMSNorm` that multiplies by 1 + weight, as Gemma's: the initial weight is 0, and weight decay draws it there."""

    def __init__(self, *args: Any, init: Initializer | None = None, **options: Any) -> None:
        super().__init__(*args, init=init or Constant(0.0), **options)

    def _factors(self) -> Tensor | None:
        return None if self.weight is None else 1.0 + self.weight


def _as_wide_as(x: Tensor, parameter: Tensor | None) -> Tensor | None:
    """Cast a parameter of low precision to the dtype of a wider x, since torch's kernel needs one dtype for both."""
    is_narrow = parameter is not None and parameter.dtype in LOW and x.dtype not in LOW
    return parameter.to(x.dtype) if is_narrow else parameter  # type: ignore[union-attr]


def _split_norm(x: Tensor, *arguments: Any) -> Tensor:
    y: Tensor = _SplitNorm.apply(x, *arguments)
    return y


def _mean_square(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    count = math.prod([x.shape[dim] for dim in dims])
    return torch.linalg.vector_norm(x, dim=dims, keepdim=True).square_().div_(count)


class _SplitNorm(torch.autograd.Function):
    """The norm of x whose last dim is split over n ranks. Shapes are per rank: r rows of h = features / n.

        x, y, dy, dx  [r, h]        (for several normalized dims read [r, .., h])
        weight, bias  [h]           the rank's shard, as are dweight and dbias
        mean, scale   [r, 1]        the same on all ranks

        forward  y  = normal * weight + bias, with normal = (x - mean) * scale
                 mean and scale come from each rank's mean and mean squared deviation, all-gathered, 2 [r, 1]
        dgrad    dx = (dn - mean(dn) - normal * mean(dn * normal)) * scale, with dn = dy * weight
                 the means are over all features, as in forward: all-reduced, 2 [r, 1]
        wgrad    dweight = (dy * normal).sum(0), dbias = dy.sum(0), while the all-reduce is on its way
                 no communication: a rank's shard meets the features of that rank only

    RMSNorm has no mean: forward all-reduces the mean square, dgrad mean(dn * normal), 1 [r, 1] each.

    If x is of low precision, so are y, dy and dx, and everything in between is float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        group: AxisGroup,
        num_dims: int,
        eps: float,
        centred: bool,
    ) -> Tensor:
        dims = tuple(range(-num_dims, 0))
        narrow, x = x, to_wide_dtype(x)
        if centred:
            own_mean = x.mean(dims, keepdim=True)
            y = x - own_mean  # torch.var_mean takes ten times as long
            own = torch.stack((own_mean, _mean_square(y, dims))).unsqueeze(0)
            gathered = kept("the means of a norm", lambda: collectives.all_gather(own, group).wait())
            means, squares = gathered[:, 0], gathered[:, 1]
            mean = means.mean(0)
            variance = squares.mean(0) + (means - mean).square_().mean(0)
            scale = (variance + eps).rsqrt_()
            y.add_(own_mean - mean).mul_(scale)
        else:
            mean = None
            own = _mean_square(x, dims)
            total = kept("the mean square of a norm", lambda: collectives.all_reduce(own, group, owned=True).wait())
            square = total / group.size
            scale = (square + eps).rsqrt_()
            y = x * scale
        if weight is not None:
            y.mul_(weight)
        if bias is not None:
            y.add_(bias)
        ctx.save_for_backward(narrow, mean, scale, weight)
        ctx.group, ctx.dims, ctx.has_bias = group, dims, bias is not None
        return y.to(narrow.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        narrow, mean, scale, weight = ctx.saved_tensors
        x, dy = to_wide_dtype(narrow), to_wide_dtype(dy)
        normal = (x if mean is None else x - mean) * scale
        dnormal = dy if weight is None else dy * weight
        inner = (dnormal * normal).mean(ctx.dims, keepdim=True)
        sums = inner if mean is None else torch.stack((inner, dnormal.mean(ctx.dims, keepdim=True)))
        pending = collectives.all_reduce(sums, ctx.group, owned=True)
        lead = tuple(range(dy.dim() - len(ctx.dims)))
        dweight = dbias = None
        if weight is not None and ctx.needs_input_grad[1]:
            dweight = (dy * normal).sum(lead)
        if ctx.has_bias and ctx.needs_input_grad[2]:
            dbias = dy.sum(lead)
        sums = pending.wait() / ctx.group.size
        if mean is None:
            dx = (dnormal - normal * sums).mul_(scale)
        else:
            dx = (dnormal - sums[1]).sub_(normal.mul_(sums[0])).mul_(scale)
        return dx.to(narrow.dtype), dweight, dbias, None, None, None, None
