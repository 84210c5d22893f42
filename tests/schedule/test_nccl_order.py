"""The messages of every schedule and of rings, in the order in which the ranks hand them to NCCL, end.

The executor, the transport and the links are the real ones; what they give to torch.distributed is noted and played by
`helpers.nccl`, which knows NCCL's rules.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import cache
from typing import Any

import pytest
import torch
from helpers.long import but
from helpers.nccl import ALL_RULES, NotedLinks, Rules, Stuck, Trace, noted, play
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from colossus.comm import links as links_module
from colossus.comm.links import rotate
from colossus.context.grid import RankGrid
from colossus.context.groups import AxisGroup
from colossus.context.parallel_context import ParallelContext
from colossus.layers.model_parallel import ModelParallel, model_parallel_of
from colossus.schedule.actions import Action, Actions, placement
from colossus.schedule.build import make_schedule
from colossus.schedule.executor import Executor, forward_only
from colossus.schedule.transport import Transport, ValueSpec, flatten_value

META = torch.device("meta")
KINDS = ("gpipe", "1f1b", "interleaved", "zb-h1", "zb-v")


def group_of(size: int, index: int) -> AxisGroup:
    return AxisGroup(("pipeline",), tuple(range(size)), index, None)


@cache
def parallel() -> ModelParallel:
    names = ("pipeline", "data", "sequence", "tensor")
    grid = RankGrid(dict.fromkeys(names, 1), {name: (name,) for name in names})
    return model_parallel_of(ParallelContext(grid, 0, device=META))


@cache
def spec() -> ValueSpec:
    """Of what all stages return: two tensors, one of which has no gradient."""
    return flatten_value(value(torch.ones(3, device=META, requires_grad=True)), parallel(), "a stage")[0]


def value(x: Tensor) -> tuple[Tensor, Tensor]:
    return x * 2, torch.ones(2, device=META)


class NotedStages:
    """Stages of a product each, noted as computed."""

    def __init__(self, trace: Trace, last: int) -> None:
        self.trace, self.last = trace, last
        self.weight = torch.ones(3, device=META, requires_grad=True)

    def forward(self, stage: int, microbatch: int, given: Any, batch: Any) -> Any:
        self.trace.compute(f"forward of {microbatch} on {stage}")
        x = self.weight * 2 if given is None else given[0] * self.weight
        return (x.sum(), torch.ones((), device=META)) if stage == self.last else value(x)

    def before_backward(self, stage: int, microbatch: int, kind: str) -> None:
        pass

    def after_backward(self, stage: int, microbatch: int, kind: str) -> None:
        self.trace.compute(f"{kind} of {microbatch} on {stage}")

    def is_trained(self, stage: int) -> bool:
        return True

    def full_backward(self) -> Any:
        return nullcontext()

    def deferred_wgrad(self) -> Any:
        return nullcontext([])

    def run_wgrad(self, tasks: Any) -> None:
        pass

    def before_last_backward(self, stage: int) -> None:
        pass

    def after_last_backward(self, stage: int) -> None:
        pass

    def reduce(self, stage: int) -> None:
        pass


def traces_of(actions: Actions, microbatches: int, *, early: bool = False) -> list[Trace]:
    """Of all ranks: two steps, in the first of which values are described, and an evaluation of fewer microbatches."""
    rank_of = placement(actions)
    traces = []
    with noted(spec()) as distributed:
        for rank, own in enumerate(actions):
            trace = distributed.trace = Trace(rank)
            links = NotedLinks(group_of(len(actions), rank), [], META)
            links.takes_early = early
            stages = NotedStages(trace, max(rank_of))
            executor = Executor(stages, rank_of, Transport(links, rank_of), parallel())
            batches = [torch.ones(1, device=META)] * microbatches
            for step in range(2):
                executor.run(own, batches, step)
            fewer = max(1, microbatches - 1)
            with torch.no_grad():
                executor.run(forward_only(own, fewer), batches[:fewer], 2)
            traces.append(trace)
    return traces


def play_all(make: Any) -> None:
    for rules in ALL_RULES:
        play(make(), rules)


@pytest.mark.parametrize("kind", but(("gpipe", "interleaved"), KINDS))
@settings(max_examples=4)
@given(ranks=st.integers(2, 5), microbatches=st.integers(1, 9), chunks=st.integers(2, 3))
def test_no_schedule_waits_for_ever(kind: str, ranks: int, microbatches: int, chunks: int) -> None:
    options = dict(chunks=chunks) if kind == "interleaved" else {}
    actions = make_schedule(kind, ranks, microbatches, **options)
    play_all(lambda: traces_of(actions, microbatches))


def test_receives_posted_early_would_wait_for_ever() -> None:
    """Why `Links.takes_early` is False there."""
    actions = make_schedule("1f1b", 3, 6)
    with pytest.raises(Stuck, match=r"rank 0: .* on the GPU: receive of gradient"):
        play(traces_of(actions, 6, early=True), Rules())


def test_receives_posted_early_are_in_the_order_of_their_sends() -> None:
    """Messages of gloo have no tags: the first that is sent meets the first that is awaited. Here a value that is still
    to be described comes before one that could be received early."""

    def own(stages: int, microbatches: int) -> Actions:
        backwards = [[Action("backward", stage, index) for stage in (2 + r, r) for index in (0, 1)] for r in (0, 1)]
        in_turn = [(0, 0), (2, 0), (0, 1), (2, 1)], [(1, 0), (1, 1), (3, 0), (3, 1)]
        return [[*(Action("forward", *at) for at in in_turn[r]), *backwards[r]] for r in (0, 1)]

    sent: dict[tuple[int, int], list[object]] = defaultdict(list)
    received: dict[tuple[int, int], list[object]] = defaultdict(list)
    for trace in traces_of(make_schedule(own, 2, 2), 2, early=True):
        for direction, peer, what in (each for step in trace.steps for each in getattr(step, "messages", ())):
            if direction == "send":
                sent[trace.rank, peer].append(what)
            else:
                received[peer, trace.rank].append(what)
    assert sent == received


# -- rings -----------------------------------------------------------------------------------------------------------


def rotations(size: int) -> list[Trace]:
    """Of keys and values round a ring, and of their gradients behind them, as in the backward of ring attention."""
    traces = []
    with noted() as distributed, pytest.MonkeyPatch.context() as patch:
        for rank in range(size):
            trace = distributed.trace = Trace(rank)
            links = NotedLinks(group_of(size, rank), [], META)
            patch.setattr(links_module, "ring_of", lambda group, device, hop, links=links: links)
            group = group_of(size, rank)
            blocks = [torch.ones(5, device=META), torch.ones(4, device=META)]
            gradients = None
            for step in range(size):
                block = rotate(blocks, group, f"block {step}") if step < size - 1 else None
                trace.compute(f"attention {step}")
                if step:
                    if gradients is not None:
                        gradients()
                    trace.compute(f"sum {step}")
                    gradients = rotate(blocks, group, f"gradients {step}")
                if block is not None:
                    block()
            assert gradients is not None
            gradients()
            trace.compute("end")
            traces.append(trace)
    return traces


@pytest.mark.parametrize("size", range(2, 8))
def test_no_ring_waits_for_ever(size: int) -> None:
    play_all(lambda: rotations(size))


# -- the rules themselves --------------------------------------------------------------------------------------------
