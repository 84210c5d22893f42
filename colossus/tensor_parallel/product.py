"""The one product of layers on a rank: what takes it in another precision belongs here."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ w.T + bias``: every forward, dgrad and wgrad of a linear layer on one rank.

    | | x | w | product |
    |---|---|---|---|
    | forward | x [.., in] | weight [out, in] | y [.., out] |
    | dgrad | dy [.., out] | weight.T [in, out] | dx [.., in] |
    | wgrad | dy.T [out, rows] | x.T [in, rows] | dweight [out, in], see `wgrad_product` |

    Args:
        bias: [out], or None.
    """
    return F.linear(x, w, bias)


def wgrad_product(dy: Tensor, x: Tensor) -> Tensor:
    """``dy.T @ x``, summed over all dims but the last: dy [.., out] and x [.., in] to [out, in]."""
    return product(flat(dy).t(), flat(x).t())


def bias_gradient(dy: Tensor) -> Tensor:
    """dy [.., out] summed over all dims but the last: [out]."""
    return flat(dy).sum(0)


def flat(x: Tensor) -> Tensor:
    """[.., f] as a matrix."""
    return x.reshape(-1, x.shape[-1])
