"""Layers beside products (`tests/tensor_parallel/test_modes.py` has these): losses, dropout, copies, angles, words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from helpers.long import long
from helpers.modes import MODES, own
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import colossus
from colossus import layers
from colossus.comm import accounting
from colossus.context.parallel_context import ParallelContext
from colossus.layers import head_attention
from colossus.layers.linear import share_input
from colossus.sequence_parallel import tiles
from colossus.sequence_parallel.mask import CAUSAL, FULL
from colossus.sharded_tensor.tensor import plain
from colossus.state.model_state_dict import full_state_dict


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(("vocabulary", "ranks"), [(12, 2), (13, 1), (5, 4)])
def test_cross_entropy_of_a_split_vocabulary(ranks: int, vocabulary: int) -> None:
    labels = torch.randint(0, vocabulary, (3, 7), generator=torch.Generator().manual_seed(2))
    labels[0, :4] = -100
    x = numbers(3, 7, 6) * 5.0
    terms = [(0.0, 0.0), (0.1, 0.0), (0.0, 0.02), (0.1, 0.02)]

    def body(context: ParallelContext) -> list[tuple[Tensor, ...]]:
        return [one(context, *term) for term in terms]

    def one(context: ParallelContext, smoothing: float, z_loss: float) -> tuple[Tensor, ...]:
        head = colossus.build(lambda: layers.LMHead(6, vocabulary), context, dtype=torch.float64)
        features = x.clone().requires_grad_()
        logits = head(features)
        loss, count = layers.cross_entropy(logits, labels, label_smoothing=smoothing, z_loss=z_loss)
        loss.backward()
        state = full_state_dict(head, context)["weight"]
        gradient = full_state_dict(head, context, gradients=True)["weight"]
        return loss.detach(), count, features.grad, state, gradient, layers.to_whole(logits).detach()

    for (smoothing, z_loss), (loss, count, dx, weight, dw, whole) in (
        pair for results in run_ranks(ranks, body) for pair in zip(terms, results, strict=True)
    ):
        features, leaf = x.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = features @ leaf.t()
        valid = labels != -100
        want = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", label_smoothing=smoothing)
        want = want + z_loss * (torch.logsumexp(logits, -1)[valid] ** 2).sum()
        want.backward()
        assert count == valid.sum()
        torch.testing.assert_close(whole, logits.detach(), rtol=1e-12, atol=1e-12)
        for mine, other in ((loss, want.detach()), (dx, features.grad), (dw, leaf.grad)):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


class _Largest(TorchDispatchMode):
    """The most elements of a result whose last dim is the vocabulary."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.vocabulary, self.most = vocabulary, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.dim() > 1 and out.shape[-1] == self.vocabulary:
            self.most = max(self.most, out.numel())
        return out


@pytest.mark.parametrize(("chunk", "rows"), [(None, 16 * 5), (20, 20), (1, 5)])
def test_no_more_than_a_chunk_of_the_logits_is_ever_made(chunk: int | None, rows: int) -> None:
    """Nor in the backward; one token of each of 5 samples at least."""
    head, x, labels = layers.LMHead(2, 101), numbers(5, 16, 2, dtype=torch.float32), torch.arange(80).view(5, 16)
    x.requires_grad_()
    with _Largest(101) as largest:
        if chunk is None:
            total, count = layers.cross_entropy(head(x), labels)
        else:
            total, count = layers.chunked_cross_entropy(x, head, labels, chunk=chunk)
        total.backward()
    assert count == 80
    assert largest.most == rows * 101


def test_logits_in_chunks_need_a_head_and_tokens() -> None:
    x, labels = torch.zeros(2, 3, 6), torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match="needs a colossus"):
        layers.chunked_cross_entropy(x, nn.Linear(6, 9), labels, chunk=4)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"\[batch, tokens, features\]"):
        layers.chunked_cross_entropy(x[0], layers.LMHead(6, 9), labels[0], chunk=4)
    with pytest.raises(ValueError, match="labels have"):
        layers.chunked_cross_entropy(x, layers.LMHead(6, 9), labels[:, :2], chunk=4)


class _Gated(nn.Module):
    """A gate and a value of one input, twice."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.gate = layers.Linear(24, 48, split="column")
        self.value = layers.Linear(24, 48, split="column", bias=False)
        self.down = layers.Linear(48, 24, split="row")
        if shared:
            share_input([self.gate, self.value])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = x + self.down(torch.tanh(self.gate(x)) * self.value(x))
        return x


@pytest.mark.parametrize("name", ["1d", "3d_2x1x2", *long("2d_2x3", "3d")])
def test_columns_of_one_input_move_it_once(name: str) -> None:
    """As one process computes it, with fewer collectives than when each moves it."""
    x, dy = numbers(12, 6, 24), numbers(12, 6, 24, seed=1)

    def body(context: ParallelContext) -> list[tuple[Any, ...]]:
        return [one(context, shared) for shared in (True, False)]

    def one(context: ParallelContext, shared: bool) -> tuple[Any, ...]:
        model = colossus.build(lambda: _Gated(shared), context, dtype=torch.float64)
        rows = own(context, x).clone().requires_grad_()
        with accounting.count() as moved:
            y = model(rows)
            y.backward(own(context, dy))
        return own(context, x), y.detach(), own(context, dy), rows.grad, full_state_dict(model, context), moved.calls()

    for results in MODES[name].run(body):
        for rows, y, dy_, dx, state, _ in results:
            leaf = rows.clone().requires_grad_()
            want = leaf
            for _ in range(2):
                gate = F.linear(want, state["gate.weight"], state["gate.bias"])
                hidden = torch.tanh(gate) * F.linear(want, state["value.weight"])
                want = want + F.linear(hidden, state["down.weight"], state["down.bias"])
            want.backward(dy_)
            torch.testing.assert_close(y, want.detach(), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(dx, leaf.grad, rtol=1e-12, atol=1e-12)
        assert results[0][-1] < results[1][-1]


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

    for texts in run_ranks(2, body):
        wrong = [(text, match) for text, (*_, match) in zip(texts, cases, strict=True) if not re.search(match, text)]
        assert not wrong


def test_tokens_split_between_blocks_are_guarded_too() -> None:
    def body(context: ParallelContext) -> None:
        with context:
            x = layers.to_residual(torch.ones(2, 4, 4))
        assert tuple(x.shape) == (2, 4, 4)
        assert tuple(plain(x).shape) == (2, 2, 4)
        x.mean(1)

    with pytest.raises(RankError, match=r"mean reduces dim 1, which is split.*dim 1 over tensor"):
        run_ranks(2, body, sequence_sharded=True)


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

    (whole0, part0, kept_share), (whole1, part1, _) = run_ranks(2, body)
    assert torch.equal(whole0, whole1)
    assert not torch.equal(part0, part1)
    assert abs(kept_share - 0.6) < 0.03
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


@pytest.mark.parametrize("causal", [True, False])
def test_long_documents_need_no_mask_of_all_tokens(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the same attention with that mask; values and every gradient."""
    for module in (head_attention, tiles):
        monkeypatch.setattr(module, "TILE", 3)
    torch.manual_seed(0)
    layer = layers.Attention(12, 3, mask=CAUSAL if causal else FULL).double()
    x = torch.randn(2, 10, 12, dtype=torch.float64, requires_grad=True)
    documents = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1, 2], [3, 3, 3, 3, 3, 3, 3, -1, -1, -1]])
    same = (documents[:, :, None] == documents[:, None, :])[:, None]
    with patch.object(head_attention, "attend", wraps=head_attention.attend) as in_tiles:
        tiled, whole = layer(x, documents=documents), layer(x, mask=same)
    assert in_tiles.call_count == 1
    torch.testing.assert_close(tiled, whole, rtol=0, atol=1e-14)
    dy = torch.randn_like(whole)
    inputs = [x, *layer.parameters()]
    for one, other in zip(torch.autograd.grad(tiled, inputs, dy), torch.autograd.grad(whole, inputs, dy), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
