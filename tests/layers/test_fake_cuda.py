"""Every layer in every tensor mode on CUDA devices that do not exist, recomputed, and with deferred weight gradients:
nothing is on the wrong device, nothing waits."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any
from unittest.mock import patch

import pytest
import torch
from helpers.every_layer import CASES, HEADS, HIDDEN, WIDE, Adapted, Sampled, hidden, ids
from helpers.fake_cuda import HiddenWait, Waits, run_fake_ranks
from helpers.fake_cuda.contexts import CUDA, as_input, fake_context
from helpers.long import but
from helpers.modes import MODES, Mode, own
from torch import Tensor, nn

import colossus
from colossus import layers
from colossus.config.schema import Parallel
from colossus.context.grid import build_grid
from colossus.context.local_ranks import RanksFailed
from colossus.context.parallel_context import ParallelContext
from colossus.context.precision import Precision
from colossus.layers.checkpointing import checkpoint_module
from colossus.layers.deferred_wgrad import DeferredWgrad
from colossus.layers.model_parallel import model_parallel_of

ALL = {"none": Mode("1d", (1,)), **MODES}
PRECISIONS = ("fp64", "fp32", "bf16", "fp16", "pure bf16")
#: of each kind one, where all modes run
SOME = ("pair", "embedding", "bag of means, padding", "attention, dropout", "block", "lora", "vocabulary loss")


def run_case(context: ParallelContext, name: str, times: int) -> list[str]:
    """Forwards and backwards, with gradients on the device. What of them waits."""
    make, inputs_of = CASES[name]
    precision = context.precision
    model = colossus.build(make, context, dtype=precision.params, wide_dtype=precision.data)
    inputs = [as_input(own(context, x) if isinstance(x, Tensor) else x, precision) for x in inputs_of(CUDA)]
    with Waits(allowed=True) as waits:
        for _ in range(times):  # what is made once, and what is found again
            with context, precision.autocast(context.device):
                out = layers.to_whole(model(*inputs))
            out.float().sum().backward()
    assert out.device == context.device
    for key, parameter in model.named_parameters():
        assert parameter.device == context.device, key
        if parameter.requires_grad:
            assert parameter.grad is not None, key
            assert parameter.grad.device == context.device, key
    assert all(x.grad is not None for x in inputs if isinstance(x, Tensor) and x.requires_grad)
    return waits.found


def body(rank: int, mode: Mode, precisions: Collection[str], names: Collection[str], times: int) -> dict[str, Any]:
    """What waits, by case."""
    found = {}
    for precision in precisions:
        with fake_context(rank, mode, precision) as context:
            for name in names:
                try:
                    waits = run_case(context, name, times)
                except Exception as error:
                    error.add_note(f"in the case {name!r}, {precision}")
                    raise
                if waits:
                    found[f"{name}, {precision}"] = waits
    return found


def test_layers() -> None:
    assert run_fake_ranks(1, body, ALL["none"], ["fp32"], CASES, 1) == [{}]


@pytest.mark.long
@pytest.mark.parametrize("mode", ALL)
def test_layers_in_modes(mode: str) -> None:
    """Under autocast, in which most is done to a tensor."""
    assert run_fake_ranks(ALL[mode].world, body, ALL[mode], ["bf16"], SOME, 1) == [{}]


@pytest.mark.long
@pytest.mark.parametrize("mode", ALL)
def test_all_layers_in_all_modes_and_precisions(mode: str) -> None:
    """Of the first rank and of the last, which may have an empty shard."""
    ranks = sorted({0, ALL[mode].world - 1})
    results = run_fake_ranks(ALL[mode].world, body, ALL[mode], PRECISIONS, CASES, 2, ranks=ranks)
    assert results == [{}] * len(ranks)


def tables(rank: int) -> dict[str, int]:
    """How often the host waits in a forward and a backward of tables with a gradient of rows."""
    found = {}
    with fake_context(rank, ALL["none"], "fp32") as context:
        for name, make, inputs in (
            ("embedding", lambda: layers.Embedding(41, 24, sparse=True), (ids(CUDA),)),
            ("bag", lambda: layers.EmbeddingBag(41, 24, sparse=True), (ids(CUDA),)),
            ("bag, padding", lambda: layers.EmbeddingBag(41, 24, sparse=True, padding_idx=1), (ids(CUDA),)),
            ("sampled softmax", Sampled, (hidden(CUDA), ids(CUDA))),
            ("sampled softmax, evaluated", lambda: Sampled().eval(), (hidden(CUDA), ids(CUDA))),
        ):
            model = colossus.build(make, context)
            with Waits(allowed=True) as waits:
                out = model(*inputs)
                if out.requires_grad:
                    out.sum().backward()
            found[name] = len(waits.found)
    return found


def test_waits_of_sparse_tables_are_these() -> None:
    """For the number of distinct ids, and of those that count."""
    assert run_fake_ranks(1, tables) == [
        {"embedding": 0, "bag": 1, "bag, padding": 2, "sampled softmax": 3, "sampled softmax, evaluated": 1}
    ]


def experts(rank: int) -> list[list[str]]:
    """What waits in a forward and a backward of experts, without losses and with."""
    found = []
    with fake_context(rank, ALL["none"], "bf16") as context:
        for losses in ({}, dict(aux_loss=0.1, z_loss=0.1, router=dict(score="sigmoid", bias_update=0.1))):
            model = colossus.build(lambda options=losses: layers.MoE(24, 40, 3, 2, **options), context)
            with Waits(allowed=True) as waits, context.precision.autocast(context.device):
                model(hidden(CUDA)).float().sum().backward()
            assert all(parameter.grad is not None for parameter in model.parameters())
            found.append(waits.found)
    return found


def test_nothing_waits_for_experts_of_bfloat16() -> None:
    assert run_fake_ranks(1, experts) == [[[], []]]


def spread_experts(rank: int, kind: str | None) -> list[str]:
    """What waits in a step of one layer whose experts are spread over ranks, recomputed or not."""
    plan = build_grid(Parallel(data=2, expert=2))
    with ParallelContext(plan, rank, device=CUDA, precision=Precision()) as context:
        model = colossus.build(lambda: layers.MoE(24, 40, 4, 2, capacity=1.0), context)
        if kind is not None:
            checkpoint_module(model, kind, context)
        with Waits(allowed=True) as waits, torch.autocast("cuda", torch.bfloat16):
            Waits.begin_step()
            model(hidden(CUDA)).float().sum().backward()
        return waits.found


@pytest.mark.parametrize("kind", [None, "full", "selective"])
def test_spread_experts_wait_once_for_the_numbers_of_their_rows(kind: str | None) -> None:
    """Also those that drop rows; a recomputation does not read the numbers again."""
    ((wait,),) = run_fake_ranks(2, spread_experts, kind)
    assert "Event.synchronize" in wait


def asserted(rank: int) -> list[str]:
    """What the device is told to check of ids that are looked up in a split vocabulary, and of labels."""
    told: list[str] = []
    with fake_context(rank, MODES["1d"], "fp32") as context:
        embedding = colossus.build(lambda: layers.Embedding(40, 24), context)
        head = colossus.build(lambda: layers.LMHead(24, 40), context)
        with patch.object(torch, "_assert_async", lambda condition, message: told.append(message)), Waits():
            y = embedding(ids(CUDA))
            layers.cross_entropy(head(y), ids(CUDA))
    return told


def test_ids_out_of_range_are_found_by_the_device() -> None:
    """A rank whose part of the vocabulary has none of them would take them for another's: rows of zeros, in silence."""
    for told in run_fake_ranks(MODES["1d"].world, asserted):
        assert [message.partition(" are outside")[2] for message in told] == [" the vocabulary 0..39"] * 2


# -- what a user's own layer may do wrong ---------------------------------------------------------------------


class Planted(nn.Module):
    """A layer of a user's own between ours."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.linear, self.fault = layers.Linear(24, 24), fault
        self.table = torch.ones(24)  # no buffer: it stays where it is

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.fault == "item":
            return y * y.abs().amax().item()
        if self.fault == "item in backward":
            y.register_hook(lambda dy: dy * dy.sum().item())
        if self.fault == "tensor on the CPU":
            return y * torch.ones(24)
        return y


def planted(rank: int, fault: str) -> None:
    with fake_context(rank, MODES["3d"], "fp32") as context:
        model = colossus.build(lambda: Planted(fault), context)
        x = own(context, hidden(CUDA))
        with Waits():
            model(x).sum().backward()


@pytest.mark.parametrize("fault", ["item", "item in backward"])
def test_a_hidden_wait_fails(fault: str) -> None:
    with pytest.raises(RanksFailed, match=HiddenWait.__name__):
        run_fake_ranks(8, planted, fault)


def test_a_tensor_on_the_wrong_device_fails() -> None:
    run_fake_ranks(8, planted, "none")
    with pytest.raises(RanksFailed, match=r"found (at least )?two (different )?devices,? cuda:0(, | and )cpu"):
        run_fake_ranks(8, planted, "tensor on the CPU")


# -- recomputation, and weight gradients left for later -------------------------------------------------------


class Mixed(nn.Module):
    """A block of ours, and modules of torch's own whose activations wait with ours."""

    def __init__(self) -> None:
        super().__init__()
        self.block = layers.TransformerBlock(HIDDEN, HEADS, None, WIDE, dropout=0.1, mlp="swiglu", norm="rmsnorm")
        self.plain, self.dropout = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.plain(layers.to_whole(self.block(x))))


def checkpointed(rank: int, mode: Mode, precision: str, kinds: list[str]) -> list[list[str]]:
    """For each kind what waits."""
    results = []
    with fake_context(rank, mode, precision, keep_gathered=True) as context:
        model = colossus.build(Mixed, context)
        x = as_input(own(context, hidden(CUDA)), context.precision)
        for kind in kinds:
            with Waits(allowed=True) as waits:
                for _ in range(2):
                    with context, context.precision.autocast(context.device):
                        y = layers.recompute(model, x, context=context, kind=kind)
                    y.float().sum().backward()
            assert x.grad is not None
            assert all(each.grad is not None and each.grad.is_cuda for each in model.parameters())
            results.append(waits.found)
    return results


@pytest.mark.parametrize("mode", but(ALL.keys() - {"3d_2x1x2"}, ALL))
@pytest.mark.rest("3d_2x1x2")
def test_checkpointed_blocks(mode: str) -> None:
    (results,) = run_fake_ranks(ALL[mode].world, checkpointed, ALL[mode], "bf16", ["full", "selective"])
    assert results == [[], []]


def deferred(rank: int, mode: Mode, precision: str) -> dict[str, Any]:
    """Of a dgrad alone, and of wgrad after it: what waits; how many gradients were left."""
    results: dict[str, Any] = {}
    with fake_context(rank, mode, precision, weight_scope="microbatch") as context:
        for name, make in (("block", Mixed), ("lora", Adapted)):
            model = colossus.build(make, context)
            x = as_input(own(context, hidden(CUDA)), context.precision)
            with Waits(allowed=True) as waits:
                left = _backward_in_two(model, x, context)
            trained = [each for each in model.parameters() if each.requires_grad]
            assert all(each.grad is not None and each.grad.is_cuda for each in trained)
            results[name] = waits.found, left
    return results


def _backward_in_two(model: nn.Module, x: Tensor, context: ParallelContext) -> int:
    weights = model_parallel_of(context).weights
    with context, DeferredWgrad(weights), context.precision.autocast(context.device):
        y = layers.to_whole(model(x))
    with weights.deferral.deferred() as tasks:
        y.float().sum().backward()
    assert x.grad is not None
    matrices = [each for each in model.parameters() if each.dim() == 2 and each.requires_grad]
    assert all(each.grad is None for each in matrices)
    weights.deferral.run(tasks)
    return len(tasks)


@pytest.mark.parametrize("mode", but(ALL.keys() - {"3d_2x1x2"}, ALL))
def test_weight_gradients_left_for_later(mode: str) -> None:
    (results,) = run_fake_ranks(ALL[mode].world, deferred, ALL[mode], "bf16")
    assert results == {"block": ([], 5), "lora": ([], 6)}
