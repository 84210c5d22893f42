"""On what a rank holds a part of: gradients are typed as the values are, and a norm of another size is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from helpers.ranks import run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict

X = torch.randn(3, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Pair(nn.Module):
    def __init__(self, linear: Any, **split: bool) -> None:
        super().__init__()
        self.up = linear(6, 12, **({"split": "column"} if split else {}))
        self.down = linear(12, 6, **({"split": "row"} if split else {}))


def told(act: Any) -> str:
    try:
        act()
    except ValueError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (lambda: layers.LayerNorm(24), "LayerNorm.* normalizes 24 features, .* 12"),
        (lambda: layers.RMSNorm((3, 12)), "RMSNorm.* normalizes 3 x 12 features, .* 4 x 12"),
    ],
)
def test_a_norm_of_another_size_on_split_features(make: Any, what: str) -> None:
    def body(context: ParallelContext) -> str:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.up, self.norm = layers.Linear(6, 12, split="column"), make()

        net: Any = colossus.build(Net, context)
        return told(lambda: net.norm(net.up(X.float())))

    for words in run_ranks(2, body):
        assert re.search(what, words), words


def test_gradients_of_split_activations_are_split_activations() -> None:
    def body(context: ParallelContext) -> Any:
        model: Any = colossus.build(lambda: Pair(layers.Linear, split=True), context, dtype=torch.float64)
        messages: list[str] = []

        def hook(grad: Tensor) -> Tensor:
            messages.append(told(lambda: grad / grad.norm()))
            return grad.clamp(-0.1, 0.1) * 2.0

        x = X.clone().requires_grad_()
        h = model.up(x)
        h.register_hook(hook)
        h.register_hook(lambda grad: None)
        other = h * 1.0
        other.retain_grad()
        model.down(other).square().sum().backward()
        messages.append(told(lambda: other.grad.norm()))
        whole = layers.to_whole(other.grad)
        return full_state_dict(model, context), messages, x.grad, whole

    ranks = run_ranks(2, body)
    twin = Pair(nn.Linear).double()
    twin.load_state_dict(ranks[0][0])
    x = X.clone().requires_grad_()
    h = twin.up(x)
    h.register_hook(lambda grad: grad.clamp(-0.1, 0.1) * 2.0)
    other = h * 1.0
    other.retain_grad()
    twin.down(other).square().sum().backward()
    for _, messages, grad, whole in ranks:
        assert len(messages) == 2
        assert all(words.startswith("norm reduces all dims at once") for words in messages), messages
        torch.testing.assert_close(grad, x.grad, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(whole, other.grad, rtol=1e-10, atol=1e-12)
