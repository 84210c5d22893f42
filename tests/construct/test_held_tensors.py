"""What a constructor leaves behind besides parameters and buffers: tensors anywhere, hooks, weights from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch import Tensor, nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.construct.initial_values import Normal, Values
from colossus.context.parallel_context import ParallelContext
from colossus.state.model_state_dict import full_state_dict


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


@pytest.mark.parametrize(
    "hide",
    [
        lambda module: setattr(module, "slotted", Slotted(module.base * 4)),
        lambda module: setattr(module, "closure", (lambda held: lambda: held)(module.base * 2)),
        lambda module: setattr(module, "in_a_set", {module.base * 3}),
        lambda module: setattr(module, "unregistered", [nn.Linear(3, 5)]),
    ],
)
def test_tensors_in_no_attribute_are_refused(hide: Any) -> None:
    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("base", torch.arange(3.0))
            self.plain = self.base * 2
            hide(self)

    with pytest.raises(ValueError, match=r"a tensor of shape \(.*\) from the constructor is in a place where"):
        build(Hides, ParallelContext(grid(), seed=3))


class Pair(NamedTuple):
    first: Tensor
    second: int


def test_tensors_in_lists_and_dicts_have_their_values() -> None:
    """As the adapters of peft keep them; what is held twice stays one, in a tuple, too."""

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drawn = nn.Linear(2, 2), torch.rand(3)
            self.config = {"default": {"ids": torch.arange(3), "drawn": [self.drawn, None]}}
            self.pairs = (Pair(torch.arange(2.0) + 1, 7), [torch.rand(2)])
            self.known = [*self.linear.parameters()]
            self.config["self"] = self.config  # type: ignore[assignment]

    one, other = (build(Keeps, ParallelContext(grid(), seed=3)) for _ in range(2))
    assert torch.equal(one.config["default"]["ids"], torch.arange(3))
    assert one.config["default"]["drawn"][0] is one.drawn
    assert torch.equal(one.pairs[0].first, torch.tensor([1.0, 2.0]))
    assert one.pairs[0].second == 7
    assert torch.equal(one.pairs[1][0], other.pairs[1][0])
    assert one.known[0] is one.linear.weight


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.plain, self.ours = nn.Linear(3, 3), layers.Linear(3, 3)
        self.calls: list[str] = []
        weights = {"plain": self.plain.weight, "ours": self.ours.weight, "removed": self.plain.bias}
        for name, weight in weights.items():
            handle = weight.register_post_accumulate_grad_hook(lambda done, name=name: self._seen(name, done))
            if name == "removed":
                self.handle = handle

    def _seen(self, name: str, done: Tensor) -> None:
        assert done.grad is not None
        self.calls.append(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.ours(self.plain(x))


def test_hooks_after_gradients_set_in_a_constructor_hold() -> None:
    """And a handle of the constructor removes its hook."""

    def body(context: ParallelContext) -> list[list[str]]:
        model = build(Hooked, context)
        model(torch.ones(2, 3)).sum().backward()
        calls, model.calls = sorted(model.calls), []
        model.handle.remove()
        model(torch.ones(2, 3)).sum().backward()
        return [calls, sorted(model.calls)]

    wanted = [["ours", "plain", "removed"], ["ours", "plain"]]
    assert body(ParallelContext(grid())) == wanted
    assert run_ranks(3, body) == [wanted] * 3


class Loaded(nn.Module):
    """Weights from a file, in all the ways a constructor may read one."""

    def __init__(self, how: str, folder: Path) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        file = folder / "state.pt"
        if how == "module":
            self.net = torch.load(folder / "module.pt", weights_only=False)
        elif how == "arrays":
            arrays = np.load(folder / "state.npz")
            self.net.load_state_dict({name: torch.as_tensor(value) for name, value in arrays.items()})
        elif how == "data":
            for name, parameter in self.net.named_parameters():
                parameter.data = torch.load(file)[name]
            for name, buffer in self.net.named_buffers():
                buffer.copy_(torch.load(file)[name])
        else:
            self.net.load_state_dict(torch.load(file, mmap=how == "mmap"), assign=how == "assign")


@pytest.mark.parametrize("how", ["mmap", "assign", "module", "arrays", "data"])
def test_weights_are_loaded_in_a_constructor(how: str, tmp_path: Path) -> None:
    source = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    source(torch.randn(5, 3))
    torch.save(source.state_dict(), tmp_path / "state.pt")
    torch.save(source, tmp_path / "module.pt")
    np.savez(tmp_path / "state.npz", **{name: value.numpy() for name, value in source.state_dict().items()})
    model = build(lambda: Loaded(how, tmp_path), ParallelContext(grid()))
    for name, value in source.state_dict().items():
        assert torch.equal(model.net.state_dict()[name], value), name


def test_layers_of_ours_take_values_that_exist(tmp_path: Path) -> None:
    """A rank reads its box; a fused linear takes a mapping; what is refused says so."""
    state = {"weight": torch.randn(8, 6), "bias": torch.randn(8), "key": torch.randn(4, 6, dtype=torch.bfloat16)}
    torch.save(state, tmp_path / "state.pt")

    def body(context: ParallelContext) -> list[Tensor]:
        def make() -> nn.Module:
            read = torch.load(tmp_path / "state.pt", mmap=True)
            lone = layers.Linear(6, 8, init=Values(read["weight"]), bias_init=Values(read["bias"].numpy()))
            parts = {"key": Values(read["key"]), "other": Normal(0.1)}
            fused = layers.Linear(6, {"key": 4, "other": 8}, split="column", init=parts)
            return nn.ModuleDict({"lone": lone, "fused": fused})

        full = full_state_dict(build(make, context), context)
        with pytest.raises(ValueError, match=r"Values of shape \(8, 6\) for a parameter of shape \(4, 6\)"):
            build(lambda: layers.Linear(6, 4, init=Values(state["weight"])), context)
        with pytest.raises(RuntimeError, match=r"Values\(tensor\) .*load_full_state"):
            build(lambda: _load_into(layers.Linear(6, 8, split="row"), state), context)
        return [full[f"lone.{name}"] for name in ("weight", "bias")] + [full["fused.key.weight"]]

    for values in (body(ParallelContext(grid())), *run_ranks(2, body)):
        for value, wanted in zip(values, state.values(), strict=True):
            assert torch.equal(value, wanted.float())


def _load_into(linear: nn.Module, state: dict[str, Tensor]) -> nn.Module:
    own = {name: torch.zeros(value.shape) for name, value in linear.state_dict().items()}
    linear.load_state_dict(own)
    return linear
