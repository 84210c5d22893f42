"""Which gradients are summed together, and in which order the sums start."""

from __future__ import annotations

import torch

from colossus.context.precision import Precision
from colossus.gradients.buckets import GradientForm, cut_into_buckets


def test_a_bucket_starts_when_backward_has_made_its_last_gradient() -> None:
    data, both = ("data",), ("data", "tensor")
    axes = [data, both, data, (), data, both]
    gradients = [GradientForm(over, torch.float32, 100) for over in axes]
    precision = Precision()
    assert cut_into_buckets(gradients, precision, 800, None) == [[0, 2], [4], [1, 5]]
    assert cut_into_buckets(gradients, precision, 4000, None) == [[0, 2, 4], [1, 5]]
    assert cut_into_buckets(gradients, precision, 4000, 4096 * 4 + 400) == [[0], [1], [2], [4], [5]]
