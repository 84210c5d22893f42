"""Fingerprints of samples and of their outputs: what tells whether two runs have seen and computed the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from colossus.nest import tensors

#: columns that are cast to float64 at a time: logits of a long sequence have a billion
_COLUMNS = 1 << 20


def row_fingerprints(x: Tensor) -> Tensor:
    """Return the norm of each row of dim 0 and its projection on a fixed pattern, [rows, 2] float64.

    A change of any element changes the projection by as much as it changes the norm of the row. Only directions that
    are orthogonal to the pattern escape, which no mistake hits by chance.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    out = torch.zeros(len(x), 2, dtype=torch.float64, device=x.device)
    first = 1
    for block in x.reshape(len(x), -1).split(_COLUMNS, dim=1) if x.numel() else ():
        columns = block.double()
        number = torch.arange(first, first + columns.shape[1], dtype=torch.float64, device=x.device)
        out[:, 0] += columns.square().sum(1)
        out[:, 1] += columns @ torch.cos(1.7 * number)
        first += columns.shape[1]
    out[:, 0].sqrt_()
    return out.cpu()


def sample_keys(batch: Any) -> list[str]:
    """Return a hash for each sample of a batch. Samples with equal keys have equal bits, in any batch and row."""
    leaves = [leaf for _, leaf in tensors(batch) if leaf.dim()]
    leaves = [leaf.detach().cpu().contiguous() for leaf in leaves if len(leaf) == len(leaves[0])]
    samples = zip(*leaves, strict=True)
    return [
        hashlib.blake2b(b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in sample)).hexdigest()
        for sample in samples
    ]
