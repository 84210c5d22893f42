"""What is computed by hand of a parameter of which a rank has a part: as of the whole, or refused by its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.modes import MODES
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, vector_to_parameters

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict

IN, OUT = 12, 24


def net_of(linear: Any) -> nn.Module:
    return nn.Sequential(linear(IN, OUT), nn.Tanh(), linear(OUT, IN))


def gradients(net: nn.Module) -> list[Tensor]:
    x = torch.linspace(-1, 1, 2 * IN, dtype=torch.float64).view(2, IN)
    return list(torch.autograd.grad(net(x).square().sum(), [*net.parameters()]))


def averaged(net: Any) -> Tensor:
    average = torch.zeros_like(net[0].weight)
    average.lerp_(net[0].weight, 0.5)
    return average.norm()


def written(net: Any) -> None:
    vector_to_parameters(torch.zeros(sum(p.numel() for p in net.parameters())), net.parameters())


#: refused under every mode
REFUSED: dict[str, Callable[[Any], Any]] = {
    "all dims": lambda net: net[0].weight.norm(),
    "a mean": lambda net: net[0].weight.mean(),
    "a bias": lambda net: F.normalize(net[0].bias, dim=0),
    "a number": lambda net: net[0].bias.max().item(),
    "data": lambda net: net[0].weight.data.norm(),
    "detached": lambda net: net[0].weight.detach().abs().max(),
    "a copy": lambda net: net[0].weight.clone().sum(),
    "computed of it": lambda net: (2 * net[0].weight.detach() + 1).std(),
    "in double": lambda net: net[0].weight.detach().to(torch.float32).sum(),
    "an average of it": averaged,
    "the state dict": lambda net: net.state_dict()["0.weight"].norm(),
    "a product": lambda net: torch.ones(3, IN, dtype=torch.float64) @ net[0].weight.detach().t(),
    "a linear": lambda net: F.linear(torch.ones(3, IN, dtype=torch.float64), net[0].weight.detach()),
    "rows": lambda net: net[0].weight[:3],
    "singular values": lambda net: torch.linalg.svdvals(net[0].weight),
    "random": lambda net: net[0].weight.normal_(),
    "orthogonal": lambda net: nn.init.orthogonal_(net[0].weight),
    "a mask of the whole": lambda net: net[0].weight.mul_(torch.ones(OUT, IN, dtype=torch.float64)),
    "values": lambda net: net[0].weight.detach().numpy(),
    "gradients": lambda net: gradients(net)[0].norm(),
    "of the loss": lambda net: net[0].weight.grad.norm(),
    "clipped": lambda net: clip_grad_norm_(net.parameters(), 1.0),
    "clipped one by one": lambda net: clip_grad_norm_(net.parameters(), 1.0, foreach=False),
    "a vector": lambda net: parameters_to_vector(net.parameters()),
    "from a vector": written,
}


def normalized(net: Any) -> None:
    with torch.no_grad():
        net[0].weight.copy_(F.normalize(net[0].weight, dim=-1))


def by_rows(net: Any) -> None:
    weight = net[0].weight.data
    weight.div_(weight.norm(dim=1, keepdim=True)).sub_(weight.softmax(1)).mul_(weight.amax((1,), keepdim=True))


#: along dim 1, which 1D leaves whole in a column linear, and 2D splits
ALONG: dict[str, Callable[[Any], None]] = {"normalized": normalized, "by rows": by_rows}


def elementwise(net: Any) -> None:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.clamp_(-0.2, 0.2).mul_(0.9).addcmul_(parameter.sign(), parameter.abs().sqrt(), value=0.1)
            parameter.copy_(torch.where(parameter > 0, parameter, parameter.detach() * 0.5))


def own_optimizer(net: Any) -> None:
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for parameter, gradient in zip(net.parameters(), gradients(net), strict=True):
        parameter.grad = gradient.clamp(-1, 1) + 0.1 * parameter.detach()
    optimizer.step()


RIGHT: dict[str, Callable[[Any], None]] = {"elementwise": elementwise}
#: gradients are complete
OWN_LOOP: dict[str, Callable[[Any], None]] = {"own optimizer": own_optimizer}


@pytest.mark.parametrize("mode", ["1d", "2d", "3d_2x1x2"])
@pytest.mark.rest("3d_2x1x2")
def test_of_parts_of_parameters(mode: str) -> None:
    right = RIGHT | (OWN_LOOP | ALONG if mode == "1d" else {})
    refused: dict[str, Any] = REFUSED | (ALONG if mode == "2d" else {})

    def body(context: ParallelContext) -> Any:
        with context:
            net = colossus.build(lambda: net_of(layers.Linear), context, dtype=torch.float64)
            start = full_state_dict(net, context)
            states = {}
            for name, act in right.items():
                act(net)
                states[name] = full_state_dict(net, context)
            net(torch.ones(2, IN, dtype=torch.float64)).sum().backward()
            messages = {}
            for name, act in refused.items():
                try:
                    with torch.no_grad() if name not in ("gradients", "a vector") else torch.enable_grad():
                        messages[name] = f"nothing: {act(net)!r}"
                except ValueError as error:
                    messages[name] = str(error)
            return start, states, messages

    ranks = MODES[mode].run(body)
    twin = net_of(nn.Linear).double()
    twin.load_state_dict(ranks[0][0])
    for name, act in right.items():
        act(twin)
        for _, states, _ in ranks:
            for key, value in twin.state_dict().items():
                torch.testing.assert_close(states[name][key], value, rtol=1e-10, atol=1e-12, msg=f"{name}: {key}")
    for *_, messages in ranks:
        for name, words in messages.items():
            assert "was called with the parameter itself" in words or "orthogonal" in words, (name, words)
            assert "this rank holds" in words or "orthogonal" in words, (name, words)
        assert "colossus.checkpoint.full_state_dict" in messages["all dims"]
        assert "test_parameter_parts.py" in messages["all dims"]
