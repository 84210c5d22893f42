"""Every layer in every tensor mode against plain torch: outputs and all gradients, one fork per mode for all cases."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from helpers import compared
from helpers.compared import Case, close, compare_all, integers, numbers, prepare
from helpers.drawn import examples
from helpers.long import but, long
from helpers.modes import BATCH, MODES, TOKENS, own, with_options
from helpers.twins import PlainAttention, PlainBlock, options_of
from hypothesis import given, settings
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.comm.accounting import Counter, count
from colossus.comm.conjugate import start
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import model_parallel_of
from colossus.sequence_parallel.mask import CAUSAL, FULL
from colossus.state.model_state_dict import full_state_dict
from colossus.tensor_parallel import move_plan

HIDDEN, HEADS, WIDE = 24, 6, 36


# -- cases ----------------------------------------------------------------------------------------------------


def lead(ndim: int) -> tuple[int, ...]:
    return {2: (BATCH,), 3: (BATCH, TOKENS), 4: (BATCH, 2, TOKENS)}[ndim]


class Sequential(nn.Module):
    """Named parts one after the other, with functions between them."""

    def __init__(self, *steps: Any, **parts: nn.Module) -> None:
        super().__init__()
        self.steps = steps
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, *x: Tensor) -> Any:
        out: Any = x
        for step in self.steps:
            call = getattr(self, step) if isinstance(step, str) else step
            out = call(*out) if isinstance(out, tuple) else call(out)
        return out


def bend(x: Tensor) -> Tensor:
    return F.gelu(x) * 2.0 + x


def together(*parts: Tensor) -> Tensor:
    return torch.cat([layers.to_whole(part) for part in parts], -1)


class PlainFused(nn.Module):
    def __init__(self, inputs: int, outputs: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.many = nn.ModuleDict({name: nn.Linear(inputs, out, bias) for name, out in outputs.items()})

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.many.values()], -1)


class Residual(nn.Module):
    """The same layer twice, and a frozen one between."""

    def __init__(self, linear: Any, bias: bool) -> None:
        super().__init__()
        self.inner, self.frozen = linear(HIDDEN, HIDDEN, bias), linear(HIDDEN, HIDDEN, bias)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(torch.tanh(self.frozen(self.inner(x))))


class Tied(nn.Module):
    """Embedding, norm and head on one weight."""

    def __init__(self, vocabulary: int, tie: bool, bias: bool) -> None:
        super().__init__()
        self.embedding = layers.Embedding(vocabulary, HIDDEN)
        self.norm = layers.LayerNorm(HIDDEN)
        self.head = layers.LMHead(HIDDEN, vocabulary, bias, tied_to=self.embedding if tie else None)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(layers.to_residual(self.embedding(ids))))


class PlainTied(nn.Module):
    def __init__(self, vocabulary: int, tie: bool, bias: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, HIDDEN)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, vocabulary, bias)
        if tie:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.embedding(ids)))


class PlainPositions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(9, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight[: x.shape[-2]]


class PlainMasked(PlainAttention):
    """Attention under a mask, causal or not."""

    def __init__(self, causal: bool) -> None:
        super().__init__(options_of("gpt", HIDDEN, HEADS, WIDE))
        self.causal = causal

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            self.qkv[name](x).view(batch, tokens, HEADS, -1).transpose(1, 2) for name in ("query", "key", "value")
        )
        scores = query @ key.transpose(-1, -2) / self.head_dim**0.5
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
        if self.causal:
            scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        return self.out((scores.softmax(-1) @ value).transpose(1, 2).reshape(batch, tokens, -1))


def masks() -> Iterator[tuple[str, Tensor]]:
    """Every token sees itself, so that no row is empty."""
    eye = torch.eye(TOKENS, dtype=torch.bool)
    shapes = {"all": (), "heads": (HEADS,), "samples": (BATCH, 1), "samples and heads": (BATCH, HEADS), "ones": (1, 1)}
    for name, shape in shapes.items():
        yield name, (numbers(*shape, TOKENS, TOKENS) > 0) | eye
    yield "floating", numbers(BATCH, HEADS, TOKENS, TOKENS)


def cases() -> Iterator[Case]:
    for ndim in (2, 3, 4):
        x = numbers(*lead(ndim), HIDDEN)
        for bias in (True, False):
            title = f"{ndim}-D, bias {bias}"
            for out in (WIDE, 12, HIDDEN, 7):
                yield Case(f"linear {HIDDEN} to {out}, {title}", partial(layers.Linear, HIDDEN, out, bias),
                           partial(nn.Linear, HIDDEN, out, bias), (x,))  # fmt: skip
            for last in (HIDDEN, 5):
                yield Case(
                    f"column, row {HIDDEN} to {WIDE} to {last}, {title}",
                    lambda b=bias, last=last: Sequential(
                        "up", bend, "down", up=layers.Linear(HIDDEN, WIDE, b, split="column"),
                        down=layers.Linear(WIDE, last, b, split="row") if last != 5 else layers.Linear(WIDE, last, b),
                    ),
                    lambda b=bias, last=last: Sequential(
                        "up", bend, "down", up=nn.Linear(HIDDEN, WIDE, b), down=nn.Linear(WIDE, last, b)
                    ),
                    (x,),
                )  # fmt: skip
            yield Case(
                f"column, norm, row, {title}",
                lambda b=bias: Sequential(
                    "up", "norm", "down", up=layers.Linear(HIDDEN, WIDE, b, split="column"),
                    norm=layers.LayerNorm(WIDE, bias=b), down=layers.Linear(WIDE, HIDDEN, b, split="row"),
                ),
                lambda b=bias: Sequential(
                    "up", "norm", "down", up=nn.Linear(HIDDEN, WIDE, b), norm=nn.LayerNorm(WIDE, bias=b),
                    down=nn.Linear(WIDE, HIDDEN, b),
                ),
                (x,),
            )  # fmt: skip
            for outputs in ({"a": 12, "b": 12, "c": 12}, {"a": 24, "b": 12, "c": 36}):
                for split in (None, "column"):
                    yield Case(
                        f"fused {outputs}, split {split}, {title}",
                        lambda o=outputs, s=split, b=bias: Sequential(
                            "many", together, many=layers.Linear(HIDDEN, o, b, split=s)
                        ),
                        partial(PlainFused, HIDDEN, outputs, bias),
                        (x,),
                    )
            yield Case(f"used twice, frozen, {title}", partial(Residual, layers.Linear, bias),
                       partial(Residual, nn.Linear, bias), (x,))  # fmt: skip
            yield Case(f"layer norm, {title}", partial(layers.LayerNorm, HIDDEN, bias=bias),
                       partial(nn.LayerNorm, HIDDEN, bias=bias), (x,))  # fmt: skip
            yield Case(f"layer norm between blocks, {title}",
                       lambda b=bias: Sequential(layers.to_residual, "norm", norm=layers.LayerNorm(HIDDEN, bias=b)),
                       lambda b=bias: Sequential("norm", norm=nn.LayerNorm(HIDDEN, bias=b)), (x + 3.0,))  # fmt: skip
            yield Case(f"mlp, {title}",
                       lambda b=bias: layers.MLP(HIDDEN, WIDE, b),
                       lambda b=bias: Sequential("up", F.gelu, "down", up=nn.Linear(HIDDEN, WIDE, b),
                                                 down=nn.Linear(WIDE, HIDDEN, b)), (x,))  # fmt: skip
            for vocabulary in (36, 53, 3):
                ids = integers(vocabulary, *lead(ndim))
                for tie in (True, False):
                    yield Case(f"embedding and head of {vocabulary}, tied {tie}, {title}",
                               partial(Tied, vocabulary, tie, bias), partial(PlainTied, vocabulary, tie, bias),
                               (ids,))  # fmt: skip
            yield Case(f"embedding with padding, {title}", partial(layers.Embedding, 13, HIDDEN, -1 if bias else 2),
                       partial(nn.Embedding, 13, HIDDEN, -1 if bias else 2), (integers(13, *lead(ndim)),))  # fmt: skip
            for classes in (10, 12):
                yield Case(f"{classes} classes and their loss, {title}",
                           lambda b=bias, c=classes: Sequential("head", head=layers.Classifier(HIDDEN, c, b)),
                           lambda b=bias, c=classes: Sequential("head", head=nn.Linear(HIDDEN, c, b)),
                           (x,), loss=True)  # fmt: skip
        yield Case(f"rms norm, {ndim}-D", partial(layers.RMSNorm, HIDDEN), partial(nn.RMSNorm, HIDDEN), (x,))
        yield Case(f"rms norm between blocks, {ndim}-D",
                   lambda: Sequential(layers.to_residual, "norm", norm=layers.RMSNorm(HIDDEN, eps=1e-6)),
                   lambda: Sequential("norm", norm=nn.RMSNorm(HIDDEN, eps=1e-6)), (x,))  # fmt: skip
        if ndim > 2:
            for place in (layers.to_whole, layers.to_residual):
                yield Case(f"positions {place.__name__}, {ndim}-D",
                           lambda p=place: Sequential(p, "at", at=layers.PositionEmbedding(9, HIDDEN)),
                           lambda: Sequential("at", at=PlainPositions()), (x,))  # fmt: skip
    x = numbers(BATCH, TOKENS, HIDDEN)
    for name, mask in masks():
        for causal in (False, True):
            yield Case(f"attention, mask of {name}, causal {causal}",
                       partial(layers.Attention, HIDDEN, HEADS, mask=CAUSAL if causal else FULL),
                       partial(PlainMasked, causal), (x, mask))  # fmt: skip
    for place in (layers.to_whole, layers.to_residual):
        for kind in ("gpt", "llama"):
            o = options_of(kind, HIDDEN, HEADS, WIDE)
            more = dict(bias=o.bias, rotary=o.positions == "rotary")
            yield Case(
                f"attention, {kind}, {place.__name__}",
                lambda p=place, o=o, m=more: Sequential(
                    p, "part", part=layers.Attention(HIDDEN, HEADS, o.num_kv_heads, **m)
                ),
                lambda o=o: Sequential("part", part=PlainAttention(o)),
                (x,),
            )
            yield Case(
                f"block, {kind}, {place.__name__}",
                lambda p=place, o=o, m=more: Sequential(
                    p,
                    "part",
                    part=layers.TransformerBlock(HIDDEN, HEADS, o.num_kv_heads, WIDE, norm=o.norm, mlp=o.mlp, **m),
                ),
                lambda o=o: Sequential("part", part=PlainBlock(o)),
                (x,),
            )


# -- comparison -----------------------------------------------------------------------------------------------

ALL = list(cases())


def representative() -> Iterator[Case]:
    """Each kind of layer with each number of dims, and with and without a bias, but not with all of their product."""
    by_kind: dict[str, list[Case]] = {}
    for case in ALL:
        by_kind.setdefault(re.sub(r", \d-D.*|causal .*", "", case.title), []).append(case)
    for number, alike in enumerate(by_kind.values()):
        if len(alike) == 6:  # 2-D, 3-D, 4-D, each first with a bias
            yield from (alike[index] for index in ((0, 3, 4), (1, 2, 5))[number % 2])
        elif len(alike) == 2:  # attention under a mask, causal or not
            yield alike[number % 2]
        else:
            yield from alike


REPRESENTATIVE = list(representative())
#: beside these the others are more of the same: 2.5D is 2D on a share of the batch
FEW = ("1d_sequence", "2d_2x3", "3d_2x1x2")


def check(mode: str, chosen: dict[torch.dtype, list[Case]]) -> None:
    """All cases in one fork."""
    for dtype, cases in chosen.items():
        prepare(cases, [dtype])

    def body(context: ParallelContext) -> list[str]:
        return [words for dtype, cases in chosen.items() for words in compare_all(context, cases, [dtype])]

    for rank, lines in enumerate(MODES[mode].run(body, timeout=300)):
        assert not lines, f"rank {rank}: " + "\n".join(lines[:20])


@pytest.mark.rest("2d_2x3", "2.5d_depth2")
@pytest.mark.parametrize("mode", but([mode for mode in MODES if mode not in (*FEW, "2.5d_depth2")], MODES))
def test_layers_in_every_mode(mode: str) -> None:
    """In double precision, some in single precision too; fewer on many ranks."""
    chosen = REPRESENTATIVE[:: {"2d_2x3": 2, "3d_2x1x2": 3, "2.5d_depth2": 4}.get(mode, 1)]
    check(mode, {torch.float64: chosen, torch.float32: chosen[::8]})


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("mode", list(MODES))
def test_every_layer_in_each_precision(mode: str, dtype: torch.dtype) -> None:
    check(mode, {dtype: ALL})


SOME = [case for case in ALL if "bias True" in case.title or case.title.startswith("block")][::7]


POLICIES = [("keep", "matmul"), ("again", "microbatch"), ("again", "step"), ("keep", "step")]


@pytest.mark.parametrize("mode", ["3d_2x1x2", *long("1d_sequence", "2d", "3d")])
def test_policies_of_what_was_gathered(mode: str) -> None:
    prepare(SOME, [torch.float64])

    def body(context: ParallelContext) -> list[str]:
        lines = []
        for gathered, weights in POLICIES:
            policy = with_options(context, keep_gathered=gathered == "keep", weight_scope=weights)
            with policy:
                lines += [f"{gathered}, {weights}: {words}" for words in compare_all(policy, SOME, [torch.float64])]
        return lines

    for lines in MODES[mode].run(body, timeout=120):
        assert not lines, "\n".join(lines[:20])


@pytest.mark.parametrize("mode", ["1d_sequence", "3d", *long("1d", "2d_2x3", "2.5d_depth2", "3d_1x2x3", "data2_2d")])
def test_products_in_panels(mode: str) -> None:
    """The same values and bytes in more calls."""
    prepare(SOME, [torch.float64])

    def body(context: ParallelContext) -> tuple[list[str], list[Counter]]:
        wrong, moved = [], []
        for panels in (1, 2, 3):
            options = with_options(context, panels=panels)
            with options, count() as counter:
                wrong += [f"{panels} panels: {words}" for words in compare_all(options, SOME, [torch.float64])]
            moved.append(counter)
        return wrong, moved

    for wrong, (whole, *in_panels) in MODES[mode].run(body, timeout=120):
        assert not wrong, "\n".join(wrong[:20])
        for moved in in_panels:
            assert moved.bytes() == whole.bytes()
        assert in_panels[-1].calls() > whole.calls()


# -- drawn shapes ---------------------------------------------------------------------------------------------

multiples = st.integers(1, 4).map(lambda n: 12 * n)
shapes = st.lists(st.tuples(multiples, multiples, multiples, st.integers(2, 4), st.booleans()), min_size=6, max_size=6)


@pytest.mark.parametrize("mode", but([mode for mode in MODES if mode not in FEW[:2]], MODES))
@settings(max_examples=examples(2))  # a fork and six layers each; the first is of the smallest sizes
@given(drawn=shapes)
@pytest.mark.rest("2d_2x3")
def test_drawn_shapes(mode: str, drawn: list[tuple[int, int, int, int, bool]]) -> None:
    chosen = []
    for first, wide, last, ndim, bias in drawn:
        x = numbers(*lead(ndim), first)
        chosen.append(
            Case(
                f"{first} to {wide} to {last}, {ndim}-D, bias {bias}",
                lambda f=first, w=wide, o=last, b=bias: Sequential(
                    "up", bend, "down", "alone", up=layers.Linear(f, w, b, split="column"),
                    down=layers.Linear(w, o, b, split="row"), alone=layers.Linear(o, f, b),
                ),
                lambda f=first, w=wide, o=last, b=bias: Sequential(
                    "up", bend, "down", "alone", up=nn.Linear(f, w, b), down=nn.Linear(w, o, b),
                    alone=nn.Linear(o, f, b),
                ),
                (x,),
            )
        )  # fmt: skip
    prepare(chosen, [torch.float64])
    for lines in MODES[mode].run(compare_all, chosen, [torch.float64], timeout=60):
        assert not lines, "\n".join(lines[:20])


# -- the comparison is able to fail ---------------------------------------------------------------------------


def broken(context: ParallelContext, chosen: list[Case], what: str) -> list[str]:
    """The comparison with one kind of sum left out, on this rank's process only."""
    if what == "gradient sync":
        compared.gradient_sum_axes = lambda parameter, context: ()
    else:

        def partly(
            operation: str, x: Tensor, group: Any, dim: int = -1, to_dim: int = -1, *, owned: bool = False
        ) -> Any:
            pending = start(operation, x, group, dim, to_dim, owned=owned)
            return pending.then(lambda y: y * 0.5) if operation == what else pending

        move_plan.start = partly
    return compare_all(context, chosen, [torch.float64])


@pytest.mark.parametrize(
    ("mode", "what"),
    [
        ("1d", "sum"),
        ("2d", "gradient sync"),
        ("3d_2x1x2", "reduce_scatter"),
        *(pytest.param(mode, "reduce_scatter", marks=pytest.mark.long) for mode in ("1d_sequence", "2d")),
        *(pytest.param(mode, "gradient sync", marks=pytest.mark.long) for mode in ("2.5d_depth2", "3d_2x1x2")),
    ],
)
def test_a_broken_sum_is_seen(mode: str, what: str) -> None:
    titles = ("mlp, 3-D, bias True", "block, gpt, to_whole", "block, llama, to_residual")
    chosen = [case for case in ALL if case.title in titles]
    prepare(chosen, [torch.float64])
    for lines in MODES[mode].run(broken, chosen, what, timeout=60):
        assert len(lines) > 1, f"{what} is missing and nobody noticed"


# -- weights apart from the matmul ----------------------------------------------------------------------------


def deferred(context: ParallelContext) -> list[str]:
    """Backward of inputs first, weights later; and a step of three microbatches in one gather and one reduction."""
    factory = lambda: Sequential("up", bend, "down", up=layers.Linear(HIDDEN, WIDE, split="column"),  # noqa: E731
                                 down=layers.Linear(WIDE, HIDDEN, split="row"))  # fmt: skip
    x = own(context, numbers(BATCH, TOKENS, HIDDEN))
    weights = model_parallel_of(context).weights

    def gradients(act: Callable[[nn.Module], None]) -> dict[str, Tensor]:
        model = colossus.build(factory, context, dtype=torch.float64)
        act(model)
        return full_state_dict(model, context, gradients=True)

    def plain(model: nn.Module) -> None:
        for scale in (1.0, 2.0, 3.0):
            model(x * scale).square().sum().backward()

    def later(model: nn.Module) -> None:
        for scale in (1.0, 2.0, 3.0):
            loss = model(x * scale).square().sum()
            with weights.deferral.deferred() as rest:
                loss.backward()
            assert len(rest) == 2
            for work in rest:
                work()

    def in_a_step(model: nn.Module) -> None:
        weights.begin_step()
        plain(model)
        weights.end_step()  # never told which backward was the last: it reduces here

    want = gradients(plain)
    lines = []
    for act in (later, in_a_step):
        for name, grad in gradients(act).items():
            lines += close(f"{act.__name__}: {name}", grad, want[name], torch.float64)
    return lines


@pytest.mark.rest("3d_1x2x3-matmul", "1d-microbatch", "3d_1x2x3-microbatch")
@pytest.mark.parametrize("scope", ["matmul", "microbatch", "step"])
@pytest.mark.parametrize("mode", ["1d", "3d_1x2x3"])
def test_weight_gradients_later_and_once_per_step(mode: str, scope: str) -> None:
    for lines in MODES[mode].run(deferred, weight_scope=scope):
        assert not lines, "\n".join(lines)


def tied_by_assignment(context: ParallelContext) -> str:
    def factory() -> nn.Module:
        model = Sequential("embed", "head", embed=layers.Embedding(8, 24), head=layers.Linear(24, 8, False))
        model.head.weight = model.embed.weight
        return model

    try:
        colossus.build(factory, context)(own(context, integers(8, BATCH, TOKENS)))
    except ValueError as error:
        return str(error)
    return ""


def test_a_weight_tied_by_assignment_is_refused_where_it_would_be_wrong() -> None:
    for words in MODES["2d"].run(tied_by_assignment):
        assert "LMHead(hidden_size, vocab_size, tied_to=embedding)" in words


# -- what the modes promise -----------------------------------------------------------------------------------
