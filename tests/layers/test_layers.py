"""Every layer against torch's own, outputs and all gradients, alone and split over 2 and 4 ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.ranks import RankError, run_ranks
from helpers.twins import PlainAttention, PlainBlock
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.checkpoint.state_dict import full_state_dict
from colossus.context.parallel_context import ParallelContext
from colossus.gradients.buckets import gradient_sum_axes
from colossus.layers.rotary import Rotary
from colossus.models.options import GPTOptions

TOLERANCE = {torch.float32: dict(rtol=1e-5, atol=1e-5), torch.float64: dict(rtol=1e-10, atol=1e-10)}
SHARDED = [False, True]


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(context: ParallelContext, model: nn.Module, *inputs: Tensor) -> dict[str, Tensor]:
    """Output, input gradients, whole parameters and whole summed gradients of sum(model(..) * weights)."""
    inputs = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    out = layers.to_whole(model(*inputs))
    (out * numbers(*out.shape, seed=9, dtype=out.dtype)).sum().backward()
    for parameter in model.parameters():
        axes = gradient_sum_axes(parameter, context)
        if axes and parameter.grad is not None:
            torch.distributed.all_reduce(parameter.grad, group=context.group(axes).process_group)
    found = {f"gradient of {name}": grad for name, grad in full_state_dict(model, context, gradients=True).items()}
    found.update({f"parameter {name}": value for name, value in full_state_dict(model, context).items()})
    found.update({f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None})
    return {"output": out.detach(), **found}


def expected(twin: nn.Module, found: dict[str, Tensor], *inputs: Tensor) -> dict[str, Tensor]:
    """The same from plain torch with the same parameters."""
    state = {name.removeprefix("parameter "): value for name, value in found.items() if name.startswith("parameter ")}
    twin = twin.to(found["output"].dtype)
    twin.load_state_dict(state)
    inputs = tuple(x.clone().requires_grad_() if x.is_floating_point() else x for x in inputs)
    out = twin(*inputs)
    (out * numbers(*out.shape, seed=9, dtype=out.dtype)).sum().backward()
    want = {"output": out.detach()}
    want.update({f"gradient of {name}": p.grad for name, p in twin.named_parameters() if p.grad is not None})
    want.update({f"gradient of input {i}": x.grad for i, x in enumerate(inputs) if x.grad is not None})
    return want


#: ours, torch's own, inputs, and the type of all numbers
Case = tuple[Callable[[], nn.Module], Callable[[], nn.Module], tuple[Tensor, ...], torch.dtype]


def case(
    ours: Callable[[], nn.Module], plain: Callable[[], nn.Module], *inputs: Tensor, dtype: torch.dtype = torch.float64
) -> Case:
    return ours, plain, tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs), dtype


def check(ranks: int, cases: list[Case], sharded: bool = False) -> None:
    """All cases in one fork."""

    def body(context: ParallelContext) -> list[dict[str, Tensor]]:
        return [run(context, colossus.build(ours, context, dtype=dtype), *inputs) for ours, _, inputs, dtype in cases]

    for rank, results in enumerate(run_ranks(ranks, body, sequence_sharded=sharded)):
        for (_, plain, inputs, dtype), found in zip(cases, results, strict=True):
            want = expected(plain(), found, *inputs)
            assert {key for key in found if not key.startswith("parameter")} == set(want)
            for key, value in want.items():
                torch.testing.assert_close(
                    found[key], value, **TOLERANCE[dtype], msg=lambda m, k=key: f"rank {rank}, {k}: {m}"
                )


class Pair(nn.Module):
    def __init__(self, linear: Any, bias: bool, **split: Any) -> None:
        super().__init__()
        self.up = linear(6, 12, bias, **({"split": "column"} if split else {}))
        self.down = linear(12, 5, bias, **({"split": "row"} if split else {}))

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.gelu(h) * 2.0 + h)


@pytest.mark.rest("2-False", "2-True")
@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_linear_alone_and_in_pairs(ranks: int, sharded: bool) -> None:
    """2-D, 3-D and 4-D inputs, with and without bias, sizes that split by output, by input, or not at all."""
    shapes = [(8, 1), (3, 8, 1), (2, 3, 4, 1)]
    cases = []
    for dtype in (torch.float32, torch.float64):
        for index, (inner, outer) in enumerate([(6, 12), (12, 6), (12, 7), (7, 12), (7, 5)]):
            sizes = (inner, outer, index % 2 == 0)
            x = numbers(*shapes[index % 3][:-1], inner)
            cases.append(case(partial(layers.Linear, *sizes), partial(nn.Linear, *sizes), x, dtype=dtype))
        for shape in shapes:
            for bias in (True, False):
                ours, plain = partial(Pair, layers.Linear, bias, split=True), partial(Pair, nn.Linear, bias)
                cases.append(case(ours, plain, numbers(*shape[:-1], 6), dtype=dtype))
    check(ranks, cases, sharded)


class UsedTwice(nn.Module):
    def __init__(self, linear: Any) -> None:
        super().__init__()
        self.inner, self.frozen = linear(8, 8), linear(8, 8)
        self.frozen.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.tanh(self.frozen(self.inner(x))))


def test_a_layer_used_twice_and_a_frozen_one() -> None:
    check(2, [case(partial(UsedTwice, layers.Linear), partial(UsedTwice, nn.Linear), numbers(3, 5, 8))])


@pytest.mark.rest("16-1", "16-4", "13-1", "13-2", "5-2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [16, 13, 5])
def test_embedding(ranks: int, vocabulary: int) -> None:
    """13 over 4 leaves an uneven box, 5 over 4 an empty one."""
    ids = torch.randint(0, vocabulary, (3, 7), generator=torch.Generator().manual_seed(1))
    sizes = [(vocabulary, 6, padding) for padding in (None, 2, -1)]
    check(ranks, [case(partial(layers.Embedding, *each), partial(nn.Embedding, *each), ids) for each in sizes])


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("sharded", SHARDED)
def test_norms_between_blocks(ranks: int, sharded: bool) -> None:
    class Both(nn.Module):
        def __init__(self, kind: Any, **options: Any) -> None:
            super().__init__()
            self.norm = kind(6, **options)

        def forward(self, x: Tensor) -> Tensor:
            if isinstance(self.norm, (nn.LayerNorm, nn.RMSNorm)):
                return self.norm(x)
            return layers.to_whole(self.norm(layers.to_residual(x)))

    kinds = [("LayerNorm", {}), ("LayerNorm", {"bias": False}), ("RMSNorm", {"eps": 1e-6}),
             ("LayerNorm", {"elementwise_affine": False})]  # fmt: skip
    pairs = [(partial(Both, getattr(layers, n), **o), partial(Both, getattr(nn, n), **o)) for n, o in kinds]
    check(ranks, [case(ours, plain, numbers(3, 4, 6)) for ours, plain in pairs], sharded)


@pytest.mark.parametrize("sharded", SHARDED)
@pytest.mark.parametrize("ranks", [1, 2])
def test_attention_and_block_of_grouped_heads(ranks: int, sharded: bool) -> None:
    o = GPTOptions(hidden_size=24, num_heads=4, num_kv_heads=2, seq_len=8, ffn_hidden_size=20)
    x = numbers(3, 8, 24)
    check(
        ranks,
        [
            case(partial(layers.Attention, 24, 4, 2), partial(PlainAttention, o), x),
            case(partial(layers.TransformerBlock, 24, 4, 2, 20, mlp=o.mlp), partial(PlainBlock, o), x),
        ],
        sharded,
    )


@pytest.mark.rest("12-1", "12-4", "13-1", "13-2", "5-2")
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("vocabulary", [12, 13, 5])
def test_cross_entropy_of_a_split_vocabulary(ranks: int, vocabulary: int) -> None:
    labels = torch.randint(0, vocabulary, (3, 7), generator=torch.Generator().manual_seed(2))
    labels[0, :4] = -100
    x = numbers(3, 7, 6) * 5.0
    terms = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.02)]

    def body(context: ParallelContext) -> list[tuple[Tensor, ...]]:
        return [one(context, *term) for term in terms]

    def one(context: ParallelContext, smoothing: float, z_loss: float) -> tuple[Tensor, ...]:
        head = colossus.build(lambda: layers.LMHead(6, vocabulary), context, dtype=torch.float64)
        held = x.clone().requires_grad_()
        logits = head(held)
        loss, count = layers.cross_entropy(logits, labels, label_smoothing=smoothing, z_loss=z_loss)
        loss.backward()
        state = full_state_dict(head, context)["weight"]
        gradient = full_state_dict(head, context, gradients=True)["weight"]
        return loss.detach(), count, held.grad, state, gradient, layers.to_whole(logits).detach()

    for (smoothing, z_loss), (loss, count, dx, weight, dw, whole) in (
        pair for found in run_ranks(ranks, body) for pair in zip(terms, found, strict=True)
    ):
        held, leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = held @ leaf.t()
        valid = labels != -100
        want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
        want = want + z_loss * (torch.logsumexp(logits, -1)[valid] ** 2).sum()
        want.backward()
        assert count == valid.sum()
        torch.testing.assert_close(whole, logits.detach(), rtol=1e-12, atol=1e-12)
        for mine, other in ((loss, want.detach()), (dx, held.grad), (dw, leaf.grad)):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


# -- what must be refused ------------------------------------------------------------------------------------


def require_refusals(cases: Sequence[tuple[Callable[[], nn.Module], Callable[[Any], Any], str]]) -> None:
    """That each is refused on two ranks with words that match: a model is made and something is done with it."""

    def body(context: ParallelContext) -> list[str]:
        return [message(context, make, act) for make, act, _ in cases]

    def message(context: ParallelContext, make: Callable[[], nn.Module], act: Callable[[Any], Any]) -> str:
        try:
            act(colossus.build(make, context))
        except ValueError as error:
            return str(error)
        return "nothing was refused"

    for found in run_ranks(2, body):
        wrong = [(text, match) for text, (*_, match) in zip(found, cases, strict=True) if not re.search(match, text)]
        assert not wrong


class Column(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = layers.Linear(6, 12, split="column")

    def forward(self, x: Tensor) -> Any:
        return self.up(x)


def test_what_would_be_wrong_on_a_part_is_refused_in_words() -> None:
    x = torch.ones(2, 6)
    acts: dict[str, Callable[[Any], Any]] = {
        "chunk": lambda m: m(x).chunk(2, -1),
        "layer_norm": lambda m: nn.LayerNorm(6)(m(x)),
        "reshape": lambda m: m(x).reshape(4, -1),
        "softmax": lambda m: m(x).softmax(-1),
        "mean": lambda m: m(x).mean(-1),
        "dropout": lambda m: F.dropout(m(x)),
        "linear": lambda m: nn.Linear(6, 3)(m(x)),
        "plain tensor": lambda m: m(x) * torch.ones(6),
        "indexing": lambda m: m(x)[..., :2],
        "cat": lambda m: torch.cat([m(x), m(x)], -1),
    }
    require_refusals([(Column, act, f"{name}.*(to_whole|Dropout)") for name, act in acts.items()])


def test_tokens_split_between_blocks_are_guarded_too() -> None:
    def body(context: ParallelContext) -> None:
        with context:
            x = layers.to_residual(torch.ones(2, 4, 4))
        assert tuple(x.shape) == (2, 2, 4)
        x.mean(1)

    with pytest.raises(RankError, match=r"mean reduces dim 1, which is split.*dim 1 over tensor"):
        run_ranks(2, body, sequence_sharded=True)


def test_sizes_that_cannot_work_are_explained() -> None:
    kv_heads = "num_kv_heads = 3 does not divide"
    refused: dict[str, Callable[[], nn.Module]] = {
        "out_features = 7 does not divide over the 2 ranks of tensor; 6 or 8 does": lambda: layers.Linear(
            6, 7, split="column"
        ),
        "in_features = 7 does not divide .* of tensor; 6 or 8 does": lambda: layers.Linear(7, 6, split="row"),
        "split = 'diagonal'; use None": lambda: layers.Linear(6, 6, split="diagonal"),
        "num_heads = 3 does not divide over the 2 ranks of tensor": lambda: layers.Attention(9, 3),
        f"{kv_heads} over the 2 ranks of tensor; 2 or 4 does": lambda: layers.Attention(12, 6, 3),
        "hidden_size = 10 is not a multiple of num_heads = 4; nearest: 8 or 12": lambda: layers.Attention(10, 4),
        f"{kv_heads} num_heads = 4 .* nearest: 2": lambda: layers.Attention(8, 4, 3),
        "no MLP named 'relu'. Did you mean": lambda: layers.TransformerBlock(8, 4, mlp="relu"),
        "no norm named 'batch'. Known: layernorm": lambda: layers.TransformerBlock(8, 4, norm="batch"),
        "p = 1.0": lambda: layers.Dropout(1.0),
    }
    require_refusals([(make, lambda m: None, match) for match, make in refused.items()])


def test_ids_outside_the_vocabulary_are_refused() -> None:
    outside = r"8\.\.8, outside the vocabulary 0\.\.7"
    require_refusals([(lambda: layers.Embedding(8, 4), lambda m: m(torch.tensor([[8]])), outside)])


def test_two_uses_that_disagree_are_an_error() -> None:
    class Bad(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = layers.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(layers.to_whole(self.norm(layers.to_residual(x))))

    def body(context: ParallelContext) -> None:
        model = colossus.build(Bad, context)
        with context:
            model(torch.ones(2, 4, 4))

    with pytest.raises(RankError, match=r"norm.weight is used under two layouts.*\(tensor\).*no axis"):
        run_ranks(2, body, sequence_sharded=True)


def test_a_plain_checkpoint_around_dropout_used_twice_is_refused() -> None:
    from torch.utils.checkpoint import checkpoint

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = layers.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(lambda y: self.drop(self.drop(y)).square(), x, use_reentrant=False)

    x = torch.ones(4, 4, requires_grad=True)
    require_refusals([(Twice, lambda m: m(x).sum().backward(), "use colossus.layers.recompute")])


def test_dropout_masks_agree_where_replicated_and_differ_where_split() -> None:
    def body(context: ParallelContext) -> tuple[Tensor, Tensor, float]:
        class Net(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.drop, self.up = layers.Dropout(0.4), layers.Linear(8, 64, split="column")

        net: Any = colossus.build(Net, context)
        net.train()
        drop = net.drop
        whole = drop(torch.ones(64, 64))
        part = drop(net.up(torch.zeros(32, 8)) * 0.0 + 1.0)
        again = drop(torch.ones(64, 64))
        assert not torch.equal(whole, again), "two calls in one forward pass draw different masks"
        context.rng.move_to(0, 0)
        assert torch.equal(whole, drop(torch.ones(64, 64))), "the same position draws the same mask"
        context.rng.move_to(1, 0)
        assert not torch.equal(whole, drop(torch.ones(64, 64)))
        return whole, part.detach().as_subclass(Tensor), (whole != 0).double().mean().item()

    (whole0, part0, kept), (whole1, part1, _) = run_ranks(2, body)
    assert torch.equal(whole0, whole1)
    assert not torch.equal(part0, part1)
    assert abs(kept - 0.6) < 0.03
    assert torch.allclose(whole0[whole0 != 0], torch.tensor(1 / 0.6))


def test_a_deep_copy_keeps_what_its_parameters_mean() -> None:
    import copy

    from colossus.layout.parameter import spec_of

    def body(context: ParallelContext) -> None:
        block = colossus.build(lambda: layers.TransformerBlock(8, 4), context)
        x = numbers(2, 3, 8, dtype=torch.float32)
        first = block(x)
        other = copy.deepcopy(block)
        assert torch.equal(other(x), first)
        for (name, mine), (_, copied) in zip(block.named_parameters(), other.named_parameters(), strict=True):
            assert copied is not mine, name
            assert spec_of(copied) is spec_of(mine), name

    run_ranks(2, body)


def test_other_angles_are_those_of_a_subclass() -> None:
    class Slow(Rotary):
        def frequencies(self, device: torch.device) -> Tensor:
            return super().frequencies(device) / 4

    def turned(change: Any) -> Tensor:
        net = colossus.build(lambda: layers.Attention(16, 2, rotary=True), dtype=torch.float64)
        change(net)
        out: Tensor = net(numbers(2, 5, 16))
        return out

    def slower(net: Any) -> None:
        net.rotary = Slow(8)

    linear = dict(rope_type="linear", factor=4.0)
    scaled = colossus.build(lambda: layers.Attention(16, 2, rotary=True, rotary_scaling=linear), dtype=torch.float64)
    torch.testing.assert_close(turned(slower), scaled(numbers(2, 5, 16)), rtol=1e-12, atol=1e-12)
    assert not torch.equal(turned(slower), turned(lambda net: None))
    with pytest.raises(ValueError, match="its rotary, a Identity, is not called: for other angles put a subclass"):
        turned(lambda net: setattr(net, "rotary", nn.Identity()))
