"""Building on meta: the same start under every plan, and whatever a constructor writes holds."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.ranks import grid, run_ranks
from torch import Tensor, nn

from colossus import layers
from colossus.construct.build_model import build
from colossus.construct.initial_values import Normal
from colossus.context.grid import RankGrid
from colossus.context.parallel_context import ParallelContext
from colossus.layout.parameter import num_parameters
from colossus.state.model_state_dict import full_state_dict

# -- the same start -------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """Things people write in constructors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(4)
        self.conv = nn.Conv2d(2, 3, 3)
        self.lstm = nn.LSTM(3, 4)
        self.table = nn.Embedding(6, 3, padding_idx=2)
        self.scale = nn.Parameter(torch.randn(4, 3) * 0.02)
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.constant = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.from_numpy = nn.Parameter(torch.from_numpy(np.random.randn(3)))
        self.from_python = nn.Parameter(torch.tensor([random.random() for _ in range(3)]))
        self.rates = torch.linspace(0, 0.3, 4).tolist()
        self.drawn = [torch.rand(()).item() for _ in range(3)]
        self.register_buffer("mask", torch.ones(4, 4).tril().bool())
        self.register_buffer("noise", torch.randn(5), persistent=False)
        self.register_buffer("steps", torch.arange(5, dtype=torch.float32) ** 2)
        self.apply(self._reset)

    def _reset(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Conv2d):
            nn.init.orthogonal_(module.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.Embedding(11, 8)  # pads on 2 and 4 ranks
        self.positions = layers.PositionEmbedding(6, 8)
        self.block = layers.TransformerBlock(8, 4)
        self.gated = layers.TransformerBlock(8, 4, mlp="swiglu", norm="rmsnorm", init=Normal(0.1), bias=False)
        self.alone = layers.Linear(8, 12)
        self.odd = layers.Linear(8, 7)
        self.wide = layers.Linear(16, 8)
        self.several = layers.Linear(8, {"first": 4, "second": 8}, split="column")
        self.plain = Plain()
        self.twin = layers.Linear(8, 12, bias=False)
        self.twin.weight = self.alone.weight
        self.early = self.plain.linear


def _state(context: ParallelContext, dtype: torch.dtype | None = None) -> dict[str, Any]:
    model = build(Net, context, dtype=dtype)
    plain = model.plain
    out = {name: value.numpy() for name, value in full_state_dict(model, context).items()}
    out["(noise)"], out["(drawn)"] = plain.noise.numpy(), np.array(plain.drawn)
    assert model.twin.weight is model.alone.weight
    return out


def _elsewhere(context: ParallelContext) -> dict[str, Any]:
    """The same after other draws from every global generator: they are not what decides."""
    torch.manual_seed(context.rank + 10)
    torch.rand(context.rank + 3)
    np.random.seed(context.rank)
    random.seed(context.rank)
    return _state(context)


PLANS: dict[str, tuple[RankGrid, bool]] = {
    "tensor 2": (grid(tensor=2), False),
    "tensor 4": (grid(tensor=4), False),
    "data 2 x tensor 2": (grid(data=2, tensor=2), False),
    "sequence sharded": (grid(tensor=2), True),
    "data 2": (grid(data=2), False),
}


@pytest.mark.rest("tensor 4")
@pytest.mark.parametrize("name", PLANS)
def test_the_same_start_under_every_plan(name: str) -> None:
    """Bit for bit, on every rank."""
    plan, sequence_sharded = PLANS[name]
    wanted = _state(ParallelContext(grid(), seed=3))
    body = _elsewhere if name == "data 2 x tensor 2" else _state
    for state in run_ranks(plan.world_size, body, plan=plan, seed=3, sequence_sharded=sequence_sharded):
        assert state.keys() == wanted.keys()
        for key, value in state.items():
            assert value.dtype == wanted[key].dtype
            np.testing.assert_array_equal(value, wanted[key], err_msg=key)


def test_names_and_seeds_decide() -> None:
    first = _state(ParallelContext(grid(), seed=0))
    again = _state(ParallelContext(grid(), seed=0))
    other = _state(ParallelContext(grid(), seed=1))
    fixed = {"constant", "mask", "steps", "running_mean", "running_var", "num_batches_tracked"}
    for key, value in first.items():
        np.testing.assert_array_equal(value, again[key])
        is_constant = key.split(".")[-1] in fixed or len(np.unique(value)) == 1
        assert np.array_equal(value, other[key]) == is_constant, key
    weights = [first[f"block.attention.qkv.{part}.weight"].tobytes() for part in ("query", "key", "value")]
    assert len(set(weights)) == 3


# -- what a constructor writes holds --------------------------------------------------------------------------


class Holder(nn.Module):
    def __init__(self, fill: Callable[[Any], None]) -> None:
        super().__init__()
        fill(self)


def made(fill: Callable[[Any], None], **options: Any) -> Any:
    return build(lambda: Holder(fill), ParallelContext(grid(), seed=5), **options)


def test_constants() -> None:
    def fill(m: Any) -> None:
        m.register_buffer("mask", torch.full((4, 4), float("-inf")).triu(1))
        m.register_buffer("table", torch.tensor([[1, 2], [3, 4]]))
        m.register_buffer("angles", torch.outer(torch.arange(3.0), 10000 ** (-torch.arange(0, 4, 2) / 4)))
        m.register_buffer("turns", torch.polar(torch.ones(2), torch.tensor([0.5, 1.0])).conj())
        m.register_buffer("array", torch.from_numpy(np.arange(4) / 3))
        m.register_buffer("where", (torch.arange(5) % 2 == 0).nonzero())
        m.gain = nn.Parameter(torch.full((3,), 0.1))
        m.rates = [x.item() for x in torch.linspace(0, 1, 5)]
        m.numbers = (torch.arange(4) * 2).numpy()
        m.is_same = torch.equal(torch.ones(2), torch.ones(2))
        m.total = int(torch.arange(4).sum())

    ours, theirs = made(fill), Holder(fill)
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
        assert ours.state_dict()[name].dtype == value.dtype
    assert (ours.rates, ours.is_same, ours.total) == (theirs.rates, True, 6)
    np.testing.assert_array_equal(ours.numbers, theirs.numbers)


def test_writes_of_every_kind() -> None:
    """In place, through views, with indices, into constants, and constants that change after they were used."""

    def fill(m: Any) -> None:
        grown = torch.zeros(3, 4)
        grown[1] = 2.0
        grown[:, 2:] += 1
        grown.t_()[0, 0] = 9
        m.register_buffer("grown", grown)
        chosen = torch.zeros(3, 3)
        chosen[torch.eye(3) > 0] = 1.0
        chosen[torch.tensor([0, 2]), 1] = 5.0
        m.register_buffer("chosen", chosen)
        constant = torch.tensor([0.0, 0.0, 0.0])
        constant[1:] = torch.ones(2)
        m.register_buffer("given", constant)
        source = torch.tensor([1.0, 2.0])
        m.copied = nn.Parameter(torch.empty(2))
        m.copied.data.copy_(source)
        source.zero_()
        base = torch.arange(6.0)
        m.first, m.second = nn.Parameter(base[:2]), nn.Parameter(base[2:] * 2)
        before = base.clone()
        base.add_(1)
        m.register_buffer("before", before)
        like = torch.ones(2, device=base.device)
        m.register_buffer("like", torch.cat([like, torch.zeros_like(like)]))

    ours, theirs = made(fill), Holder(fill)
    assert len(theirs.state_dict()) == 8
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_initialisers_of_torch() -> None:
    """Some of torch.nn.init does nothing on a meta tensor; here all of it must act."""

    def fill(m: Any) -> None:
        m.weights = nn.ParameterDict()
        for name, shape, act in [
            ("trunc", (100, 100), lambda w: nn.init.trunc_normal_(w, std=0.5, a=-0.6, b=0.6)),
            ("orthogonal", (6, 4), nn.init.orthogonal_),
            ("orthogonal_wide", (4, 6), nn.init.orthogonal_),
            ("sparse", (10, 6), lambda w: nn.init.sparse_(w, 0.5)),
            ("eye", (3, 4), nn.init.eye_),
            ("dirac", (3, 3, 3), nn.init.dirac_),
            ("kaiming", (64, 100), nn.init.kaiming_normal_),
            ("xavier", (64, 100), nn.init.xavier_uniform_),
            ("constant", (3,), lambda w: nn.init.constant_(w, 0.5)),
        ]:
            m.weights[name] = nn.Parameter(torch.full(shape, torch.nan))
            act(m.weights[name])

    weights = made(fill).weights
    assert 0.3 < weights["trunc"].std() < 0.5
    assert weights["trunc"].abs().max() <= 0.6
    for w in (weights["orthogonal"], weights["orthogonal_wide"].t()):
        torch.testing.assert_close(w.t() @ w, torch.eye(4), rtol=0, atol=1e-5)
    assert ((weights["sparse"] == 0).sum(0) == 5).all()
    assert torch.equal(weights["eye"], torch.eye(3, 4))
    assert weights["dirac"].sum() == 3
    assert abs(weights["kaiming"].std() - (2 / 100) ** 0.5) < 0.01
    assert abs(weights["xavier"].std() - (2 / 164) ** 0.5) < 0.01
    assert torch.equal(weights["constant"], torch.full((3,), 0.5))


def test_copies_are_copies() -> None:
    """A target network, a moving average, and weights computed from weights."""

    def fill(m: Any) -> None:
        m.online = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        m.target = copy.deepcopy(m.online)
        m.loaded = nn.Linear(3, 4)
        m.loaded.load_state_dict(m.online[0].state_dict())
        m.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
        m.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(30, 40), n_power_iterations=30)
        m.doubled = nn.Parameter(m.online[0].weight.detach() * 2)
        m.seen = m.online[0].weight[0, 0].item()
        m.orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(4, 4))

    m = made(fill)
    for a, b in zip(m.online.parameters(), m.target.parameters(), strict=True):
        assert torch.equal(a, b)
        assert a is not b
        assert a.data_ptr() != b.data_ptr()
    assert torch.equal(m.loaded.weight, m.online[0].weight)
    assert torch.equal(m.doubled, m.online[0].weight * 2)
    assert m.seen == m.online[0].weight[0, 0].item()
    length = m.normed.parametrizations.weight.original1.norm(dim=1, keepdim=True)
    torch.testing.assert_close(m.normed.parametrizations.weight.original0, length)
    assert abs(torch.linalg.matrix_norm(m.spectral.eval().weight, 2).item() - 1) < 0.05
    torch.testing.assert_close(m.orthogonal.weight @ m.orthogonal.weight.t(), torch.eye(4), rtol=0, atol=1e-5)


def test_ties_and_other_references() -> None:
    def fill(m: Any) -> None:
        m.a, m.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        m.b.weight = m.a.weight
        m.attribute = torch.arange(3) + 1
        shared = torch.rand(2)
        m.a.register_buffer("shared", shared)
        m.b.register_buffer("shared", shared)
        m.a.weight.no_decay = True
        m.calls = []
        m.lstm = nn.LSTM(3, 4, num_layers=2)
        m.a.weight.register_hook(lambda grad: m.calls.append(tuple(grad.shape)))

    m = made(fill)
    assert m.b.weight is m.a.weight
    assert m.attribute.tolist() == [1, 2, 3]
    assert m.a.shared is m.b.shared
    assert m.a.weight.no_decay
    m.a(torch.ones(1, 3)).sum().backward()
    assert m.calls == [(3, 3)]
    out, _ = m.lstm(torch.ones(2, 1, 3))  # it keeps a list of its parameters
    out.sum().backward()
    assert all(param.grad is not None for param in m.lstm.parameters())
    assert not [t for t in (*m.parameters(), *m.buffers()) if t.is_meta]


# -- options --------------------------------------------------------------------------------------------------


def test_materialize_false_stays_on_meta() -> None:
    model = build(Net, ParallelContext(grid()), materialize=False)
    assert {p.device.type for name, p in model.named_parameters() if not name.startswith("plain.")} == {"meta"}
    assert model.plain.linear.weight.is_meta
    assert model.plain.mask.is_meta
    assert num_parameters(model) == num_parameters(build(Net, ParallelContext(grid())))


# -- errors ---------------------------------------------------------------------------------------------------


def _use(act: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def factory() -> nn.Module:
        layer = layers.Linear(4, 4)
        replacement = act(layer)
        return replacement if isinstance(replacement, nn.Module) else layer

    return factory


def _extra(layer: nn.Module, value: Tensor) -> None:
    layer.register_buffer("extra", value)


WRITES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nn.init": (
        lambda m: nn.init.normal_(m.weight),
        r"normal_ writes to a Linear parameter of shape \(4, 4\).*pass init=",
    ),
    "a view": (lambda m: m.weight.detach()[0].fill_(1), "pass init="),
    "many at once": (lambda m: torch._foreach_zero_([m.weight.data]), "pass init="),
    "load": (lambda m: m.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}), r"Values\(tensor\)"),
    "other data": (
        lambda m: setattr(m.weight, "data", torch.ones(4, 4)),
        r"weight: the constructor assigned other values .*pass init=",
    ),
    "read": (
        lambda m: _extra(m, m.weight.detach().norm()),
        "the constructor copies or computes with the values of a Linear parameter",
    ),
    "item": (
        lambda m: m.weight.sum().item(),
        "the constructor copies or computes with the values of a Linear parameter",
    ),
}


@pytest.mark.parametrize("name", WRITES)
def test_values_of_our_parameters_come_from_their_names(name: str) -> None:
    act, words = WRITES[name]
    # torch wraps what load_state_dict meets
    with pytest.raises(RuntimeError if name == "load" else ValueError, match=words):
        build(_use(act), ParallelContext(grid()))


def _outside(context: ParallelContext) -> None:
    with context, pytest.raises(ValueError, match=r"a Linear parameter of shape .* is made outside a build"):
        layers.Linear(4, 4)


def test_a_layer_outside_of_a_build_on_several_ranks() -> None:
    run_ranks(2, _outside, plan=grid(data=2))


def _asks_for_meta() -> nn.Module:
    with torch.device("meta"):
        model, number = nn.Linear(3, 2), torch.tensor(1.0)
        model.register_buffer("rate", torch.ones(2))
    tensors = number, model.weight, torch.zeros(2).to("meta"), torch.zeros(2)
    vars(model)["seen"] = [x.is_meta and x.device.type == "meta" for x in tensors]
    if model.rate.is_meta:
        model.rate = torch.empty_like(model.rate, device="cpu")
        model.rate.copy_(torch.arange(2.0))
    model.weight, model.bias = nn.Parameter(torch.ones(2, 3)), None
    return model


def test_what_a_constructor_asks_for_on_meta_it_sees_there() -> None:
    """Ask as transformers' ``from_pretrained`` does, which gives values to what is there alone."""
    for model in (_asks_for_meta(), run_ranks(1, lambda context: build(_asks_for_meta, context))[0]):
        assert vars(model)["seen"] == [True, True, True, False]
        assert torch.equal(model.rate, torch.arange(2.0))


def test_other_errors() -> None:
    with pytest.raises(ValueError, match=r"the model factory returned a int, not a torch\.nn\.Module"):
        build(lambda: 3)  # type: ignore[arg-type, return-value]
    with pytest.raises(ValueError, match=r"0\.weight gets its shape at the first forward pass"):
        build(lambda: nn.Sequential(nn.LazyLinear(3)))
    with pytest.raises(ValueError, match="has no value: it was made on the meta device"):
        build(lambda: Holder(_made_on_meta))
    with pytest.raises(ZeroDivisionError):
        build(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    assert not layers.Linear(2, 2).weight.is_meta  # the failed builds left nothing behind


def _made_on_meta(m: Any) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        m.weight = nn.Parameter(torch.empty(2, device="meta"))
