"""The mask of an attention whose samples or heads are split."""

from __future__ import annotations

from torch import Tensor

from colossus.layout.activation import Activation
from colossus.layout.layout import Layout
from colossus.layout.redistribute import redistribute
from colossus.sharded_tensor.placement import HasRegions


def local_mask(mask: Tensor, batch: int, activation: Activation, parallel: HasRegions) -> Tensor:
    """The mask [batch, heads, tokens, tokens] of the samples and heads that this rank computes.

    Where it is broadcast over samples or heads, its gradient, if any, is summed over the ranks that split them.

    Args:
        mask: its batch in the whole layout, with all heads and tokens.
        batch: samples in the whole layout.
        activation: how samples and heads are split here.
    """
    whole = parallel.regions.whole
    dims = mask.dim()
    by_sample = dims > 3 and mask.shape[0] == batch
    by_head = dims > 2 and mask.shape[-3] > 1
    whole_dims: list[tuple[str, ...]] = [()] * dims
    inner_dims: list[tuple[str, ...]] = [()] * dims
    whole_partial, inner_partial = whole.batch, activation.batch
    if by_sample:
        whole_dims[0], inner_dims[0], whole_partial, inner_partial = whole.batch, activation.batch, (), ()
    if by_head:
        inner_dims[-3] = activation.features
    else:
        inner_partial += activation.features
    source, target = Layout(tuple(whole_dims), (), whole_partial), Layout(tuple(inner_dims), (), inner_partial)
    return redistribute(mask, source, target, parallel.context)
