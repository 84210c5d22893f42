"""Fingerprints of samples and of their outputs: what tells whether two runs have seen and computed the same."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from colossus.nest import tensors


def row_fingerprints(x: Tensor) -> Tensor:
    """Return the norm of each row of dim 0 and its projection on a fixed pattern, [rows, 2] float64.

    A change of any element changes the projection by as much as it changes the norm of the row. Only directions that
    are orthogonal to the pattern escape, which no mistake hits by chance.
    """
    x = torch.view_as_real(x) if x.is_complex() else x
    flat = x.double().reshape(len(x), -1) if x.numel() else x.new_zeros((len(x), 1), dtype=torch.float64)
    number = torch.arange(1, flat.shape[1] + 1, dtype=torch.float64, device=x.device)
    return torch.stack((torch.linalg.vector_norm(flat, dim=1), flat @ torch.cos(1.7 * number)), dim=1).cpu()


def sample_keys(batch: Any) -> list[str]:
    """Return a hash for each sample of a batch. Samples with equal keys have equal bits, in any batch and row."""
    leaves = [leaf for _, leaf in tensors(batch) if leaf.dim()]
    leaves = [leaf.detach().cpu().contiguous() for leaf in leaves if len(leaf) == len(leaves[0])]
    samples = zip(*leaves, strict=True)
    return [
        hashlib.blake2b(b"".join(x.reshape(-1).view(torch.uint8).numpy().tobytes() for x in sample)).hexdigest()
        for sample in samples
    ]
