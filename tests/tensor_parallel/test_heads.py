"""Attention written by hand between a column and a row linear: the same as plain torch in every mode, or refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.compared import Case, compare_all, numbers
from helpers.long import long
from helpers.modes import BATCH, MODES, TOKENS
from helpers.ranks import RankError, run_ranks
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.context.parallel_context import ParallelContext

WIDTH, HEADS, KV_HEADS, DIM, MEMORY = 24, 12, 6, 4, 5


class Plain:
    """What plain torch has for each."""

    @staticmethod
    def linear(inputs: int, outputs: int, split: str) -> nn.Module:
        return nn.Linear(inputs, outputs)

    @staticmethod
    def split(x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, -1).transpose(-3, -2)

    @staticmethod
    def merge(x: Tensor) -> Tensor:
        return x.transpose(-3, -2).reshape(*x.shape[:-3], x.shape[-2], -1)


class Ours:
    @staticmethod
    def linear(inputs: int, outputs: int, split: str) -> nn.Module:
        return layers.Linear(inputs, outputs, split=split)

    split = staticmethod(layers.split_heads)
    merge = staticmethod(layers.merge_heads)


class Cross(nn.Module):
    """Queries of one sequence, keys and values of another, fewer heads of these, a mask or a learned bias."""

    def __init__(self, here: Any, bias: bool = False) -> None:
        super().__init__()
        self.here = here
        self.query = here.linear(WIDTH, HEADS * DIM, "column")
        self.key = here.linear(WIDTH, KV_HEADS * DIM, "column")
        self.value = here.linear(WIDTH, KV_HEADS * DIM, "column")
        self.out = here.linear(HEADS * DIM, WIDTH, "row")
        shape = HEADS, TOKENS, MEMORY
        self.bias = nn.Parameter(torch.linspace(-2, 2, HEADS * TOKENS * MEMORY).view(*shape)) if bias else None

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        query = self.here.split(self.query(x), HEADS)
        key, value = (self.here.split(part(memory), KV_HEADS) for part in (self.key, self.value))
        mask = mask if self.bias is None else self.bias.to(x.dtype)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        return self.out(self.here.merge(mixed))


class AsHuggingFace(nn.Module):
    """Views with the number of heads left open, queries and keys normalized, learned numbers of one's own on heads."""

    def __init__(self, here: Any, norm: Any) -> None:
        super().__init__()
        self.q_proj = here.linear(WIDTH, HEADS * DIM, "column")
        self.k_proj, self.v_proj = (here.linear(WIDTH, KV_HEADS * DIM, "column") for _ in range(2))
        self.o_proj = here.linear(HEADS * DIM, WIDTH, "row")
        self.q_norm, self.k_norm = norm(DIM), norm(DIM)
        self.scale, self.gain = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.linspace(-1, 1, DIM))
        self.mix = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        query = self.q_proj(x)
        batch, tokens, _ = query.shape
        shape = batch, tokens, -1, DIM
        query = self.q_norm(query.view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(x).view(shape).transpose(1, 2))
        value = self.mix(self.v_proj(x).view(shape)).transpose(1, 2) * self.gain
        key = key[:, :, None].expand(-1, -1, HEADS // KV_HEADS, -1, -1).reshape(batch, -1, tokens, DIM)
        value = value.repeat_interleave(HEADS // KV_HEADS, dim=1)
        weights = torch.softmax((query * self.scale) @ key.transpose(2, 3), dim=-1)
        return self.o_proj((weights @ value).transpose(1, 2).reshape(batch, tokens, -1).contiguous())


def cases() -> list[Case]:
    x, memory = numbers(BATCH, TOKENS, WIDTH), numbers(BATCH, MEMORY, WIDTH, seed=1)
    first = torch.arange(MEMORY) == 0
    masks = {
        "none": (),
        "tokens": ((numbers(TOKENS, MEMORY) > 0) | first,),
        "samples": ((numbers(BATCH, 1, 1, MEMORY) > 0) | first,),
        "heads": ((numbers(1, HEADS, TOKENS, MEMORY) > 0) | first,),
        "samples and heads": (numbers(BATCH, HEADS, TOKENS, MEMORY),),
    }
    every = [
        Case(f"cross-attention, mask of {name}", lambda: Cross(Ours), lambda: Cross(Plain), (x, memory, *mask))
        for name, mask in masks.items()
    ]
    every.append(Case("learned bias", lambda: Cross(Ours, True), lambda: Cross(Plain, True), (x, memory)))
    for norm, plain in ((nn.RMSNorm, nn.RMSNorm), (layers.RMSNorm, nn.RMSNorm), (layers.LayerNorm, nn.LayerNorm)):
        ours, twin = partial(AsHuggingFace, Ours, norm), partial(AsHuggingFace, Plain, plain)
        every.append(Case(f"normalized by {norm.__module__}.{norm.__name__}", ours, twin, (x,)))
    return every


@pytest.mark.parametrize("mode", ["1d_sequence", *long("1d", "2d_2x3", "3d_2x1x2", "2d", "2.5d_depth2", "3d")])
def test_attention_written_by_hand(mode: str) -> None:
    chosen = [case for case in cases() if mode != "3d" or not has_samples_in_mask(case)]
    for rank, problems in enumerate(MODES[mode].run(compare_all, chosen, [torch.float64], timeout=120)):
        assert not problems, f"rank {rank}: " + "\n".join(problems[:20])


def has_samples_in_mask(case: Case) -> bool:
    return any(x.dim() == 4 and x.shape[0] == BATCH for x in case.inputs)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for case in cases() if has_samples_in_mask(case)], ids=lambda case: case.title)
def test_a_mask_of_samples_that_ranks_have_exchanged_is_refused(case: Case) -> None:
    """In 3D: a rank whose samples need no mask would leave it out, and the others would wait for it."""
    with pytest.raises(RankError, match=r"combines a plain tensor .* with samples that ranks have exchanged"):
        MODES["3d"].run(compare_all, [case], [torch.float64], timeout=120)


def test_without_a_plan_heads_are_plain_tensors() -> None:
    x = numbers(2, TOKENS, HEADS * DIM)
    heads = layers.split_heads(x, HEADS)
    assert type(heads) is Tensor
    assert torch.equal(heads, Plain.split(x, HEADS))
    assert torch.equal(layers.merge_heads(heads), x)


def split(h: Tensor) -> Tensor:
    return layers.split_heads(h, 4)


X = torch.ones(2, 3, 8)
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "three heads": (lambda m, h: layers.split_heads(h, 3), "heads = 3 must divide 16 features"),
    "one head": (lambda m, h: layers.split_heads(h, 1), "heads = 1 must divide .* over the 2 ranks"),
    "view": (lambda m, h: h.view(2, 3, 2, 4), "view takes the split dim apart.*layers.split_heads"),
    "reshape of heads": (lambda m, h: split(h).reshape(2, 3, -1), "reshape takes the split dim apart"),
    "mean over heads": (lambda m, h: split(h).mean(1), "mean reduces dim 1, which is split"),
    "mean of all": (lambda m, h: split(h).mean(), "mean reduces all dims at once"),
    "softmax over heads": (lambda m, h: split(h).softmax(1), "softmax works along dim 1, which is split"),
    "one head of them": (lambda m, h: split(h)[:, 0], "indexing selects from dim 1, which is split"),
    "cat of heads": (lambda m, h: torch.cat([split(h), split(h)], 1), "cat concatenates along dim 1"),
    "a scale of some heads": (
        lambda m, h: split(h) * torch.ones(2, 1, 1),
        "mul combines dim 0 of a plain tensor of shape",
    ),
    "a layer": (lambda m, h: m.down(split(h)), "merge_heads"),
    "to_whole": (lambda m, h: layers.to_whole(split(h)), "dim 1 over tensor.*merge_heads"),
    "a plain key": (
        lambda m, h: F.scaled_dot_product_attention(split(h), torch.ones(2, 4, 3, 4), torch.ones(2, 4, 3, 4)),
        "needs query, key and value split alike",
    ),
    "dropout": (
        lambda m, h: F.scaled_dot_product_attention(split(h), split(h), split(h), dropout_p=0.1),
        "layers.Dropout behind merge_heads",
    ),
    "a parameter where nothing is recorded": (lambda m, h: Scaled.apply(h, m.scale), "inside of an autograd function"),
}


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        return x * scale


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = layers.Linear(8, 16, split="column"), layers.Linear(16, 8, split="row")
        self.scale = nn.Parameter(torch.ones(()))


def test_what_would_be_wrong_on_some_heads_is_refused() -> None:
    def body(context: ParallelContext) -> dict[str, str]:
        model: Any = colossus.build(Pair, context)
        messages = {}
        for name, (act, _) in REFUSED.items():
            try:
                act(model, model.up(X))
                messages[name] = "nothing"
            except ValueError as error:
                messages[name] = str(error)
        return messages

    for messages in run_ranks(2, body):
        assert not {name: words for name, words in messages.items() if not re.search(REFUSED[name][1], words)}


def test_split_tokens_are_no_heads() -> None:
    def body(context: ParallelContext) -> None:
        with context:
            layers.split_heads(layers.to_residual(torch.ones(2, 4, 4)), 2)

    with pytest.raises(RankError, match=r"split_heads: tokens are split .*an attention needs all of them"):
        run_ranks(2, body, sequence_sharded=True)
