"""Weights that stay for a step: each is cast once, and the gradients of its microbatches are summed in a wide dtype."""

from __future__ import annotations

import torch
from torch import nn

from colossus.context.precision import Precision
from colossus.tensor_parallel.gathered_weights import GatheredWeights
from colossus.tensor_parallel.move_plan import MovePlan


def test_a_weight_is_cast_once_and_its_gradients_are_summed_to_the_bit() -> None:
    weights = GatheredWeights("step", precision=Precision(compute=torch.bfloat16))
    weight, plan = nn.Parameter(torch.randn(7, 5)), MovePlan((), ())
    gradients = [torch.randn(7, 5).bfloat16() * 10**-n for n in range(4)]
    weights.begin_step()
    cast = [weights.gather(weight, plan, torch.bfloat16).wait() for _ in range(3)]
    assert cast[0] is cast[1] is cast[2]
    assert torch.equal(cast[0], weight.bfloat16())
    assert [weights.reduce(weight, gradient.clone(), plan) for gradient in gradients] == [None] * 4
    weights.end_step()
    expected = gradients[0].float()
    for gradient in gradients[1:]:
        expected += gradient.float()
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert torch.equal(weight.grad, expected)
