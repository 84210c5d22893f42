"""Fingerprints: few numbers for many, so that whole activations need neither be kept nor moved."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor

from colossus.nest import tensors


def row_prints(x: Tensor) -> Tensor:
    """For each row of dim 0 its norm and its projection on a fixed pattern, [rows, 2] float64.

    A change of any element changes the projection by as much as it changes the norm of the row, but for directions
    that are orthogonal to the pattern, which no mistake is by chance.
    """
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    rows = x.shape[0]
    last = x.shape[-1] if x.dim() > 1 else 1
    flat = x.double().reshape(rows, -1, last) if x.numel() else x.new_zeros((rows, 1, 1), dtype=torch.float64)
    projected = (flat @ _pattern(flat.shape[2], 1.7, x.device)) @ _pattern(flat.shape[1], 2.3, x.device)
    return torch.stack((torch.linalg.vector_norm(flat, dim=(1, 2)), projected), dim=1).cpu()


def whole_print(x: Tensor) -> Tensor:
    """The print of one tensor as a single row, [2]."""
    return row_prints(x.unsqueeze(0))[0]


def sample_keys(batch: Any) -> tuple[int, list[str], list[tuple[str, ...]]]:
    """Who is in a batch: number of samples, the path of each of its tensors, and one hash per tensor for each sample.

    Equal keys mean equal bits, whatever part of whichever batch the sample stands in.
    """
    leaves = [(path, leaf) for path, leaf in tensors(batch) if leaf.dim()]
    rows = leaves[0][1].shape[0] if leaves else 0
    leaves = [(path, leaf.detach().cpu()) for path, leaf in leaves if leaf.shape[0] == rows]
    keys = [tuple(_hash(leaf[row]) for _, leaf in leaves) for row in range(rows)]
    return rows, [path for path, _ in leaves], keys


def _pattern(size: int, frequency: float, device: torch.device) -> Tensor:
    return torch.cos(frequency * torch.arange(1, size + 1, dtype=torch.float64, device=device))


def _hash(sample: Tensor) -> str:
    data = sample.contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(data.tobytes(), digest_size=12).hexdigest()
