"""Batch norm with statistics of a microbatch's samples on all ranks: one collective in forward, one in backward.

Means and squared deviations of the ranks' samples are combined as Chan, Golub and LeVeque (1979) do, weighted by the
number of values of each rank.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from colossus.comm import collectives
from colossus.comm.autograd import first_order, is_recomputation
from colossus.comm.kept_results import kept
from colossus.construct.initial_values import Constant
from colossus.context.groups import AxisGroup
from colossus.error_place import located_error
from colossus.layers.layer import Layer
from colossus.layers.model_parallel import ModelParallel
from colossus.layout.layout import Layout
from colossus.layout.parameter import Initializer
from colossus.sharded_tensor.regions import to_whole
from colossus.sharded_tensor.tensor import ShardedTensor
from colossus.tensor_parallel.dtypes import to_wide_dtype


class _BatchNorm(Layer):
    """Base of batch norms: parameters, running statistics and arguments are torch's.

    In training the statistics are those of a microbatch's samples on all ranks that split them: data ranks, and the
    tensor ranks of 2D, 2.5D and 3D. So plans with equally many microbatches are the same run. The choice of a
    microbatch is part of the model's arithmetic and must not depend on the number of data ranks: of M microbatches, the
    m-th has every M-th sample of a batch, from m on (`colossus.data.batch.split_microbatches`). Replicas that train
    parameters of their own (gossip, local SGD) have their own statistics.

    Evaluation communicates nothing if there are running statistics. Without them the statistics are those of the
    samples of one data rank, since other data ranks may have another number of batches. Running statistics are the same
    on all ranks, and a recomputation of a forward for backward does not update them.

    Each of n ranks sends for C channels (n - 1) (2 C + 1) numbers in forward and 2 (n - 1) / n 2 C in backward, in
    float32 where activations are of low precision. The forward of a recomputation sends again.

    Shape:
        [samples, C, ..] -> the same, of the rank's samples; split features are made whole first.

    Raises:
        ValueError: another number of dims or channels, or an input whose tokens are split.
    """

    #: `colossus.build` stores its parameters in the wide dtype, as those of torch's norms
    is_norm = True
    #: names of the buffers
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    #: allowed numbers of dims of an input; empty: any
    dims: ClassVar[tuple[int, ...]] = ()

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        bias: bool = True,
        init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = operator.index(num_features), eps, momentum
        self.affine, self.track_running_stats = affine, track_running_stats
        shapes, layout = {"": (self.num_features,)}, Layout.whole(1)
        self.weight = self.make_parameter(shapes, layout, init or Constant(1.0), dtype=dtype) if affine else None
        has_bias = affine and bias
        self.bias = self.make_parameter(shapes, layout, bias_init or Constant(0.0), dtype=dtype) if has_bias else None
        self.running_mean: Tensor | None
        self.running_var: Tensor | None
        self.num_batches_tracked: Tensor | None
        tracked = track_running_stats
        self.register_buffer("running_mean", torch.zeros(self.num_features, dtype=dtype) if tracked else None)
        self.register_buffer("running_var", torch.ones(self.num_features, dtype=dtype) if tracked else None)
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long) if tracked else None)
        self.parallel.interleaves_microbatches = True

    def forward(self, input: Tensor) -> Tensor:
        x = self._checked(to_whole(input))
        self.record_uses(self.parallel.regions.whole)
        of_batch = self.training or self.running_mean is None
        is_updated = self.training and self.running_mean is not None and not is_recomputation()
        momentum = self._count() if is_updated else 0.0
        used = (self.running_mean, self.running_var) if is_updated or not of_batch else (None, None)
        if not of_batch:
            return F.batch_norm(x, *used, self.weight, self.bias, eps=self.eps)
        group = statistics_group(self.parallel, is_training=self.training)
        if group.size > 1:
            self.note_collectives(group)
        return norm_of_batch(x, *used, self.weight, self.bias, momentum, self.eps, group)

    def _checked(self, x: Tensor) -> Tensor:
        if isinstance(x, ShardedTensor):
            raise located_error(f"{self.title}: its statistics need all tokens, but a rank has a part of them: {x!r}")
        if x.dim() < 2 or (self.dims and x.dim() not in self.dims) or x.shape[1] != self.num_features:
            wanted = " or ".join(map(str, self.dims)) or "at least 2"
            raise located_error(
                f"{self.title}: it takes {wanted} dims, with {self.num_features} channels in dim 1, but its input has "
                f"shape {tuple(x.shape)}"
            )
        return x

    def _count(self) -> float:
        """Count a batch and return the weight of its statistics in the running ones.

        Without a momentum it is one over the count.
        """
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        return 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum

    def extra_repr(self) -> str:
        names = ("eps", "momentum", "affine", "track_running_stats")
        return ", ".join([str(self.num_features), *(f"{name}={getattr(self, name)}" for name in names)])


class BatchNorm1d(_BatchNorm):
    """``torch.nn.BatchNorm1d``. Input and output [samples, C] or [samples, C, length]."""

    dims = (2, 3)


class BatchNorm2d(_BatchNorm):
    """``torch.nn.BatchNorm2d``. Input and output [samples, C, height, width]."""

    dims = (4,)


class BatchNorm3d(_BatchNorm):
    """``torch.nn.BatchNorm3d``. Input and output [samples, C, depth, height, width]."""

    dims = (5,)


class SyncBatchNorm(_BatchNorm):
    """``torch.nn.SyncBatchNorm``, also on CPU. Input and output [samples, C, ..].

    Args:
        process_group: must be None: the plan determines whose samples the statistics cover.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: None = None,
        **options: Any,
    ) -> None:
        if process_group is not None:
            raise located_error("SyncBatchNorm: its statistics cover all ranks' samples; leave process_group out")
        super().__init__(num_features, eps, momentum, affine, track_running_stats, **options)


def statistics_group(parallel: ModelParallel, *, is_training: bool) -> AxisGroup:
    """Return the ranks whose samples together make the statistics of a batch."""
    data = () if is_training else parallel.context.grid.axes("data")
    return parallel.context.group(tuple(axis for axis in parallel.sample_axes if axis not in data))


def norm_of_batch(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    momentum: float,
    eps: float,
    group: AxisGroup,
) -> Tensor:
    """Return x [samples, C, ..] normalised by the statistics of the samples of all ranks of a group.

    Running statistics, unless None, are updated with the weight ``momentum``.
    """
    if group.size == 1:
        return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)
    mean, variance, count = _statistics(x, group)
    with torch.no_grad():
        for running, of_batch in ((running_mean, mean), (running_var, variance * (count / (count - 1)))):
            if running is not None:
                running.mul_(1.0 - momentum).add_(of_batch, alpha=momentum)
    y: Tensor = _NormOfAll.apply(x, weight, bias, mean, variance, count, group, eps)
    return y


def _channels(x: Tensor, ndim: int) -> Tensor:
    """Return [C] as [C, 1, ..], to broadcast to a tensor [samples, C, ..] of ``ndim`` dims."""
    return x.view(-1, *(1,) * (ndim - 2))


def _other_dims(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


@torch.no_grad()
def _statistics(x: Tensor, group: AxisGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Return mean [C], population variance [C] and number of values [1] of each channel over all ranks.

    A rank has x [samples, C, ..]; the results are the same to the bit on all ranks.
    """
    x, dims = to_wide_dtype(x), _other_dims(x)
    own_mean = x.mean(dims)
    own_square = (x - _channels(own_mean, x.dim())).square_().sum(dims)  # torch.var_mean takes many times as long
    own_count = own_mean.new_full((1,), x.numel() // x.shape[1])
    own = torch.cat((own_mean, own_square, own_count))[None]
    gathered = kept("the statistics of a batch", lambda: collectives.all_gather(own, group).wait())
    means, squares, counts = gathered.split((len(own_mean), len(own_mean), 1), dim=1)
    count = counts.sum(0)
    mean = (means * counts).sum(0) / count
    variance = (squares + (means - mean).square_() * counts).sum(0) / count
    return mean, variance, count


class _NormOfAll(torch.autograd.Function):
    """The batch norm of x, whose samples are split over ranks, by statistics of all.

    Shapes are per rank, for r values in each of C channels.

        x, y, dy, dx     [r, C]      (for [samples, C, ..] read r as samples x ..)
        weight, bias     [C]         the same on all ranks; dweight and dbias are of the rank's samples
        mean, variance   [C]         of all ranks; scale = (variance + eps) ** -0.5
        count            [1]         values of a channel on all ranks

        forward  y  = normal * weight + bias, with normal = (x - mean) * scale
        wgrad    dweight = (dy * normal).sum(0), dbias = dy.sum(0)
        dgrad    dx = (dy - sum(dbias) / count - normal * sum(dweight) / count) * scale * weight
                 the sums are over all ranks: all-reduced, 2 [C]

    mean and variance depend on x as well: dgrad contains their part, and they get no gradient of their own. If x is of
    low precision, so are y, dy and dx, and everything in between is float32.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        count: Tensor,
        group: AxisGroup,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance, count)
        ctx.group, ctx.eps = group, eps
        return F.batch_norm(to_wide_dtype(x), mean, variance, weight, bias, eps=eps).to(x.dtype)

    @staticmethod
    @first_order
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        narrow, weight, mean, variance, count = ctx.saved_tensors
        x, dy, eps = to_wide_dtype(narrow), to_wide_dtype(dy), ctx.eps
        normal, dims = F.batch_norm(x, mean, variance, eps=eps), _other_dims(x)
        dweight, dbias, dx = normal.mul_(dy).sum(dims), dy.sum(dims), None
        if ctx.needs_input_grad[0]:
            scale = (variance + eps).rsqrt_() if weight is None else (variance + eps).rsqrt_() * weight
            sums = collectives.all_reduce(torch.stack((dweight, dbias)), ctx.group, owned=True).wait()
            slope, shift = sums.mul_(scale / -count)
            dx = F.batch_norm(x, mean, variance, slope, shift, eps=eps).addcmul_(dy, _channels(scale, x.dim()))
            dx = dx.to(narrow.dtype)
        needs_weight, needs_bias = ctx.needs_input_grad[1:3]
        return dx, dweight if needs_weight else None, dbias if needs_bias else None, None, None, None, None, None
